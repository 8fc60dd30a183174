"""FBGEMM's operators over tilerec's jagged ops, against loops over bags. Expected values are those of FBGEMM 1.8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilerec.compat.standins.session import installed

LENGTHS = torch.tensor([2, 0, 3, 1])
OFFSETS = torch.tensor([0, 2, 2, 5, 6])


@pytest.fixture(scope="module")
def ops() -> object:
    with installed():
        return torch.ops.fbgemm


def bags(values: Tensor) -> list[Tensor]:
    return list(values.split(LENGTHS.tolist()))


def padded(values: Tensor, length: int, fill: float = 0.0) -> Tensor:
    rows = torch.full((len(LENGTHS), length, *values.shape[1:]), fill)
    for i, bag in enumerate(bags(values)):
        rows[i, : len(bag)] = bag[:length]
    return rows


def test_offsets_and_ranges(ops: object) -> None:
    f = torch.ops.fbgemm
    assert f.asynchronous_complete_cumsum(LENGTHS).tolist() == OFFSETS.tolist()
    assert f.asynchronous_complete_cumsum(LENGTHS.reshape(2, 2).int()).tolist() == [[0, 2, 2], [0, 3, 4]]
    assert f.asynchronous_inclusive_cumsum(LENGTHS).tolist() == [2, 2, 5, 6]
    assert f.asynchronous_exclusive_cumsum(LENGTHS).tolist() == [0, 2, 2, 5]
    assert f.offsets_range(OFFSETS[:-1], 6).tolist() == [0, 1, 0, 1, 2, 0]
    assert f.repeat_arange(LENGTHS).tolist() == [0, 1, 0, 1, 2, 0]
    assert f.lengths_range(LENGTHS).tolist() == [0, 1, 0, 1, 2, 0]
    assert f.invert_permute(torch.tensor([2, 0, 1])).tolist() == [1, 2, 0]
    out = f.expand_into_jagged_permute(torch.tensor([1, 0]), torch.tensor([0, 2, 3]), torch.tensor([0, 1, 3]), 3)
    assert out.tolist() == [2, 0, 1]
    assert f.segment_sum_csr(2, torch.tensor([0, 1, 1, 3]), torch.arange(6.0)).tolist() == [1.0, 0.0, 14.0]


@pytest.mark.parametrize("length", [2, 5])
def test_padded_and_back_equals_a_loop_with_gradients(ops: object, length: int) -> None:
    f = torch.ops.fbgemm
    values = torch.randn(6, 3, requires_grad=True)
    out = f.jagged_to_padded_dense(values, [OFFSETS], [length], -1.5)
    torch.testing.assert_close(out, padded(values.detach(), length, -1.5))
    torch.testing.assert_close(f.jagged_2d_to_dense(values, OFFSETS, length), padded(values.detach(), length))
    out.square().sum().backward()
    kept = torch.cat([torch.arange(int(n)) < length for n in LENGTHS])
    torch.testing.assert_close(values.grad, 2 * values.detach() * kept[:, None])
    ids = torch.arange(6)
    assert f.jagged_1d_to_dense(ids, OFFSETS, length, 9)[1].tolist() == [9] * length
    dense = torch.randn(4, length, 3, requires_grad=True)
    back, offsets = f.dense_to_jagged(dense, [OFFSETS], 6)
    torch.testing.assert_close(f.jagged_to_padded_dense(back, offsets, [length]), padded(back.detach(), length))
    assert f.dense_to_jagged(dense, [OFFSETS])[0].shape == (6, 3)


def test_two_jagged_dimensions(ops: object) -> None:
    outer, inner = torch.tensor([0, 1, 4]), OFFSETS
    values = torch.randn(6, 2)
    out = torch.ops.fbgemm.jagged_to_padded_dense(values, [outer, inner], [3, 3], 0.0)
    assert out.shape == (2, 3, 3, 2)
    torch.testing.assert_close(out[1, 1, :3], values[2:5])
    back, _ = torch.ops.fbgemm.dense_to_jagged(out, [outer, inner], 6)
    torch.testing.assert_close(back, values)


def test_arithmetic_equals_a_loop(ops: object) -> None:
    f = torch.ops.fbgemm
    x, y, dense = torch.randn(6, 4), torch.randn(6, 5), torch.randn(4, 3, 4)
    rows = torch.cat([dense[i, : len(bag)] for i, bag in enumerate(bags(x))])
    torch.testing.assert_close(f.jagged_dense_elementwise_add(x, [OFFSETS], dense), padded(x, 3) + dense)
    torch.testing.assert_close(f.jagged_dense_elementwise_add_jagged_output(x, [OFFSETS], dense)[0], x + rows)
    torch.testing.assert_close(f.jagged_dense_elementwise_mul(x, [OFFSETS], dense)[0], x * rows)
    added = f.jagged_dense_dense_elementwise_add_jagged_output(x, [OFFSETS], dense, dense)[0]
    torch.testing.assert_close(added, x + 2 * rows)
    products = torch.stack([a.T @ b for a, b in zip(bags(x), bags(y), strict=True)])
    torch.testing.assert_close(f.jagged_jagged_bmm(x, y, OFFSETS, 3), products)
    matrices = torch.randn(4, 4, 2)
    torch.testing.assert_close(
        f.jagged_dense_bmm(x, OFFSETS, matrices, 3)[0],
        torch.cat([bag @ matrix for bag, matrix in zip(bags(x), matrices, strict=True)]),
    )
    torch.testing.assert_close(f.jagged_softmax(x, OFFSETS, 3)[0], torch.cat([bag.softmax(0) for bag in bags(x)]))
    weights = torch.randn(8, 3)
    heads = torch.randn(6, 10)
    wanted = [
        weights[2 * i + h, : len(b)] @ b.reshape(-1, 2, 5)[:, h] for i, b in enumerate(bags(heads)) for h in (0, 1)
    ]
    torch.testing.assert_close(f.batched_dense_vec_jagged_2d_mul(weights, heads, OFFSETS), torch.stack(wanted))


def test_selection_equals_a_loop(ops: object) -> None:
    f = torch.ops.fbgemm
    values = torch.arange(6)
    picked, lengths = f.jagged_index_select(values, LENGTHS, torch.tensor([2, 0, 2]))
    assert picked.tolist() == [2, 3, 4, 0, 1, 2, 3, 4]
    assert lengths.tolist() == [3, 2, 3]
    lengths, ids, weights = f.permute_1D_sparse_data(torch.tensor([3, 0]).int(), LENGTHS, values, values / 2)
    assert (lengths.tolist(), ids.tolist(), weights.tolist()) == ([1, 2], [5, 0, 1], [2.5, 0.0, 0.5])
    lengths, ids, weights = f.permute_2D_sparse_data(torch.tensor([1, 0]).int(), LENGTHS.reshape(2, 2), values, None, 6)
    assert (lengths.tolist(), ids.tolist(), weights) == ([[3, 1], [2, 0]], [2, 3, 4, 5, 0, 1], None)
    first, second = f.stacked_jagged_1d_to_dense(values, LENGTHS.reshape(2, 2), [0, 2, 6], [2, 3], 9)
    assert (first.tolist(), second.tolist()) == ([[0, 1], [9, 9]], [[2, 3, 4], [5, 9, 9]])
    columns = torch.arange(6.0)[None]
    d = [torch.tensor(numbers) for numbers in ([0, 2, 5, 6], [2, 0, 1], [0, 1, 3, 6], [1, 2, 0])]
    assert f.permute_pooled_embs_auto_grad(columns, *d).tolist() == [[5.0, 0.0, 1.0, 2.0, 3.0, 4.0]]
