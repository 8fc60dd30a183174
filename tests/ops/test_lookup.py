"""Lookups and their gradients against `torch.nn.functional` in float64, on hostile shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops import backends  # noqa: F401

NO_SINKS = torch.zeros(0, dtype=torch.int64)


def bags(lengths: list[int], rows: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    return torch.randint(0, rows, (int(offsets[-1]),), generator=generator).to(dtype), offsets


def oracle(weight: Tensor, ids: Tensor, offsets: Tensor, sample_weights: Tensor | None, mean: bool) -> Tensor:
    """One bag after the other, in float64."""
    out = []
    for begin, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        rows = weight.double()[ids[begin:end].long()]
        if sample_weights is not None:
            rows = rows * sample_weights[begin:end, None].double()
        out.append(rows.sum(0) / (max(end - begin, 1) if mean else 1))
    return torch.stack(out) if out else weight.new_zeros((0, weight.shape[1])).double()


@pytest.mark.parametrize("dim", [1, 3, 4, 64, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_lookup_equals_bag_by_bag(dim, dtype, id_dtype, weighted) -> None:
    first, second = torch.randn(10, dim, dtype=dtype), torch.randn(7, 5, dtype=dtype)
    lengths = [2, 0, 3, 1, 0, 40, 1, 0, 0]  # three keys of three samples
    ids, offsets = bags(lengths, 7, id_dtype)
    weights = torch.rand(ids.numel()) if weighted else None
    out, _ = torch.ops.tilerec.pooled_lookup(
        [first, second],
        NO_SINKS,
        ids,
        offsets,
        weights,
        [0, 1, 0],
        [0, 2, 1],
        [0, 1, 1],
        [3],
        dtype,
        "a@x,b@y,c@x",
    )
    want = torch.cat(
        [
            oracle(first, ids, offsets[0:4], weights, False),
            oracle(second, ids, offsets[6:10], weights, True),
            oracle(first, ids, offsets[3:7], weights, True),
        ],
        dim=1,
    )
    assert out.dtype == dtype
    assert out.shape == (3, 2 * dim + 5)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("output", [torch.float32, torch.bfloat16, torch.float16])
def test_tables_of_mixed_types_are_summed_in_fp32_and_rounded_once(output: torch.dtype) -> None:
    tables = [torch.randn(9, 8).to(d) for d in (torch.float32, torch.bfloat16, torch.float16)]
    ids, offsets = bags([5, 4, 3], 9)
    out, _ = torch.ops.tilerec.pooled_lookup(
        tables, NO_SINKS, ids, offsets, None, [0, 1, 2], [0, 1, 2], [0, 0, 0], [1], output, "a@a,b@b,c@c"
    )
    for k, table in enumerate(tables):
        rows = table.float()[ids[offsets[k] : offsets[k + 1]]]
        total = torch.zeros(8)
        for row in rows:
            total = total + row
        assert torch.equal(out[0, 8 * k : 8 * k + 8], total.to(output))


def test_a_variable_batch_gives_one_block_per_feature() -> None:
    table = torch.randn(9, 4)
    ids, offsets = bags([1, 2, 0, 3, 1], 9)
    out, _ = torch.ops.tilerec.pooled_lookup(
        [table],
        NO_SINKS,
        ids,
        offsets,
        None,
        [0, 0, 0],
        [2, 0, 1],
        [0, 0, 1],
        [1, 3, 1],
        torch.float32,
        "a@t,b@t,c@t",
    )
    want = [
        oracle(table, ids, offsets[4:6], None, False),
        oracle(table, ids, offsets[0:2], None, False),
        oracle(table, ids, offsets[1:5], None, True),
    ]
    torch.testing.assert_close(out.double(), torch.cat([w.reshape(-1) for w in want]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch", [0, 3])
def test_no_ids_give_zeros_and_no_bags_give_nothing(batch: int) -> None:
    table = torch.randn(4, 5, requires_grad=True)
    offsets = torch.zeros(2 * batch + 1, dtype=torch.int64)
    out, _ = torch.ops.tilerec.pooled_lookup(
        [table], NO_SINKS, torch.zeros(0, dtype=torch.int64), offsets, None, [0, 0], [0, 1], [1, 0], [batch],
        torch.float32, "a@t,b@t",
    )  # fmt: skip
    assert torch.equal(out, torch.zeros(batch, 10))
    out.sum().backward()
    assert torch.equal(table.grad, torch.zeros(4, 5))


@pytest.mark.parametrize("bad", [-1, 10, 2**31 + 1])
def test_an_id_outside_its_table_is_named(bad: int) -> None:
    table = torch.randn(10, 4)
    ids = torch.tensor([1, 2, bad, 3])
    with pytest.raises(InputError, match=rf"Table 'items': got id {bad} of feature 'clicks' \(position 2 .*\[0, 10\)"):
        torch.ops.tilerec.pooled_lookup(
            [table],
            NO_SINKS,
            ids,
            torch.tensor([0, 1, 4]),
            None,
            [0],
            [0],
            [0],
            [2],
            torch.float32,
            "clicks@items",
        )
    with pytest.raises(InputError, match=rf"Table 'items': got id {bad} of feature 'clicks' \(position 2"):
        torch.ops.tilerec.sequence_lookup(
            [table], NO_SINKS, ids, torch.tensor([0, 4]), [0], torch.float32, "clicks@items"
        )


def test_ids_of_keys_that_no_feature_reads_are_not_looked_at() -> None:
    ids = torch.tensor([999, 1])
    out, _ = torch.ops.tilerec.pooled_lookup(
        [torch.eye(3)], NO_SINKS, ids, torch.tensor([0, 1, 2]), None, [0], [1], [0], [1], torch.float32, "b@t"
    )
    assert out.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dim", [1, 3, 64, 257])
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_sequence_lookup_returns_rows_in_order(dtype, dim, id_dtype) -> None:
    tables = [torch.randn(10, dim, dtype=dtype), torch.randn(7, dim, dtype=dtype)]
    ids, starts = bags([4, 0, 3], 7, id_dtype)
    out, _ = torch.ops.tilerec.sequence_lookup(tables, NO_SINKS, ids, starts, [1, 0, 0], torch.float32, "a@y,b@x,c@x")
    want = torch.cat([tables[1][ids[:4].long()], tables[0][ids[4:].long()]]).float()
    assert torch.equal(out, want)


@given(
    lengths=st.lists(st.integers(0, 6), min_size=2, max_size=12).filter(lambda x: len(x) % 2 == 0),
    dim=st.sampled_from([1, 3, 8, 20]),
    means=st.tuples(st.booleans(), st.booleans()),
    weighted=st.booleans(),
    shared=st.booleans(),
)
def test_gradients_equal_autograd_through_the_oracle(lengths, dim, means, weighted, shared) -> None:
    """Dense gradients of both tables and of the weights, shared and separate tables, float64."""
    batch = len(lengths) // 2
    ids, offsets = bags(lengths, 5)
    tables = [torch.randn(5, dim, dtype=torch.float64, requires_grad=True) for _ in range(1 if shared else 2)]
    weights = torch.rand(ids.numel(), requires_grad=True) if weighted else None
    upstream = torch.randn(batch, 2 * dim, dtype=torch.float64)
    out, _ = torch.ops.tilerec.pooled_lookup(
        tables, NO_SINKS, ids, offsets, weights, [0, 0 if shared else 1], [0, 1], [int(m) for m in means], [batch],
        torch.float64, "a@x,b@y",
    )  # fmt: skip
    leaves = [*tables, *([weights] if weights is not None else [])]
    got = torch.autograd.grad(out, leaves, upstream)
    want_out = torch.cat(
        [
            oracle(tables[0], ids, offsets[: batch + 1], weights, means[0]),
            oracle(tables[-1], ids, offsets[batch:], weights, means[1]),
        ],
        dim=1,
    )
    want = torch.autograd.grad(want_out, leaves, upstream, allow_unused=True)
    for g, w, leaf in zip(got, want, leaves, strict=True):
        w = torch.zeros_like(leaf) if w is None else w
        torch.testing.assert_close(
            g, w, rtol=1e-5 if leaf is weights else 1e-10, atol=1e-6 if leaf is weights else 1e-10
        )


def test_sequence_gradients_add_up_repeated_ids() -> None:
    tables = [torch.randn(5, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)]
    ids, starts = torch.tensor([1, 1, 0, 3, 3]), torch.tensor([0, 3, 5])
    out, _ = torch.ops.tilerec.sequence_lookup(tables, NO_SINKS, ids, starts, [0, 1], torch.float32, "a@x,b@y")
    upstream = torch.arange(15.0).view(5, 3)
    out.backward(upstream)
    assert torch.equal(tables[0].grad[1], upstream[0] + upstream[1])
    assert torch.equal(tables[0].grad[0], upstream[2])
    assert torch.equal(tables[1].grad[3], upstream[3] + upstream[4])
    assert tables[1].grad[:3].abs().sum() == 0


def test_frozen_tables_get_no_gradient() -> None:
    frozen, live = torch.randn(4, 2), torch.randn(4, 2, requires_grad=True)
    ids, offsets = bags([2, 2], 4)
    out, _ = torch.ops.tilerec.pooled_lookup(
        [frozen, live], NO_SINKS, ids, offsets, None, [0, 1], [0, 1], [0, 0], [1], torch.float32, "a@x,b@y"
    )
    out.sum().backward()
    assert frozen.grad is None
    assert live.grad is not None


def test_the_graph_reaches_the_leaf_directly() -> None:
    table = torch.nn.Parameter(torch.randn(4, 2))
    ids, offsets = bags([2], 4)
    out, _ = torch.ops.tilerec.pooled_lookup(
        [table], NO_SINKS, ids, offsets, None, [0], [0], [0], [1], torch.float32, "a@x"
    )
    nodes = [node.name() for node, _ in out.grad_fn.next_functions if node is not None]
    assert nodes == ["torch::autograd::AccumulateGrad"]


def test_a_table_beyond_2_to_the_31_elements_is_read_at_its_end(tmp_path) -> None:
    """2^31 + 2^21 elements in a sparse file: int64 offsets, only the touched pages exist."""
    rows, dim = 2**20 + 2**10, 2048
    path = tmp_path / "huge"
    with open(path, "wb") as file:
        file.truncate(rows * dim * 2)
    table = torch.from_file(str(path), shared=True, size=rows * dim, dtype=torch.bfloat16).view(rows, dim)
    table[-1] = 3.0
    out, _ = torch.ops.tilerec.pooled_lookup(
        [table],
        NO_SINKS,
        torch.tensor([rows - 1, 0]),
        torch.tensor([0, 2]),
        None,
        [0],
        [0],
        [0],
        [1],
        torch.float32,
        "a@x",
    )
    assert torch.equal(out, torch.full((1, dim), 3.0))


def test_lookups_pass_opcheck() -> None:
    tables = [torch.randn(10, 4, requires_grad=True), torch.randn(7, 3, requires_grad=True)]
    ids, offsets = bags([2, 0, 3, 1], 7)
    weights = torch.rand(6, requires_grad=True)
    args = (tables, NO_SINKS, ids, offsets, weights, [0, 1], [0, 1], [0, 1], [2], torch.float32, "a@x,b@y")
    # The ticket counts lookups, so two runs differ in it by design: everything but the aot comparison of values.
    torch.library.opcheck(
        torch.ops.tilerec.pooled_lookup,
        args,
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )
    plain = [t.detach() for t in tables]
    grad = torch.randn(2, 7)
    torch.library.opcheck(
        torch.ops.tilerec.sample_weight_grad, (plain, ids, offsets, grad, [0, 1], [0, 1], [0, 1], [2])
    )
    torch.library.opcheck(
        torch.ops.tilerec.dense_weight_grads,
        (plain[:1], [4, 3], [0], grad, ids, offsets, None, [0, 1], [0, 1], [0, 1], [2]),
    )
    torch.library.opcheck(
        torch.ops.tilerec.sequence_lookup,
        ([tables[0]], NO_SINKS, ids, torch.tensor([0, 6]), [0], torch.float32, "a@x"),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_a_table_on_another_device_than_the_ids_is_named() -> None:
    table, ids, no_sinks = (
        torch.empty(3, 2, device="meta"),
        torch.tensor([1]),
        torch.zeros(0, dtype=torch.int64),
    )
    bounds, message = (
        torch.tensor([0, 1]),
        r"Table 't': its rows are on meta, the ids of feature 'f' are on cpu. .*to_em",
    )
    with pytest.raises(InputError, match=message):
        torch.ops.tilerec.pooled_lookup([table], no_sinks, ids, bounds, None, [0], [0], [0], [1], torch.float32, "f@t")
    with pytest.raises(InputError, match=message):
        torch.ops.tilerec.sequence_lookup([table], no_sinks, ids, bounds, [0], torch.float32, "f@t")


def test_gradients_of_sample_weights_keep_float64() -> None:
    torch.manual_seed(0)
    table, grad = torch.randn(5, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    ids, offsets = torch.tensor([4, 1, 1]), torch.tensor([0, 2, 3])
    own = torch.ops.tilerec.sample_weight_grad([table], ids, offsets, grad, [0], [0], [0], [2])
    assert own.dtype == torch.float64
    torch.testing.assert_close(own, (table[ids] * grad[[0, 0, 1]]).sum(1), rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_repeat_one_number_are_read_as_they_stand(dtype: torch.dtype) -> None:
    """The backward of `sum()` gives a gradient whose elements are all one place in memory."""
    table, ids, offsets = torch.randn(5, 3, dtype=dtype), torch.tensor([4, 1, 1]), torch.tensor([0, 2, 3])
    grad = torch.full((1,), 2.0, dtype=dtype).expand(2, 3)
    own = torch.ops.tilerec.sample_weight_grad([table], ids, offsets, grad, [0], [0], [0], [2])
    torch.testing.assert_close(own, 2 * table[ids].sum(1))
