"""The update op: rows summed once, rules applied once, phases that equal the whole row."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilerec.ops import backends  # noqa: F401
from tilerec.ops.rules import make_rule
from tilerec.ops.update import (
    rule_apply_reference_,
    rule_partials_reference,
    sum_row_gradients_reference,
    update_rows_reference_,
)

COMMON = [0.1, 1.0, 0.05, 1.0]  # lr, grad_scale, weight_decay, stochastic_rounding
RULES: dict[str, tuple[str, list[float], tuple[str, ...]]] = {
    "sgd": ("sgd", [0.0, 0.0], ()),
    "sgd-momentum": ("sgd", [0.9, 0.0], ("element",)),
    "sgd-nesterov": ("sgd", [0.9, 1.0], ("element",)),
    "adagrad": ("adagrad", [1e-8, 0.01], ("element",)),
    "rowwise-none": ("rowwise_adagrad", [1e-8, 0.0, 0.0], ("row",)),
    "rowwise-l2": ("rowwise_adagrad", [1e-8, 1.0, 0.0], ("row",)),
    "rowwise-decoupled-maxnorm": ("rowwise_adagrad", [1e-8, 2.0, 0.7], ("row",)),
    "adam": ("adam", [1e-8, 0.9, 0.999, 0.0, 0.0], ("element", "element")),
    "adamw-row-step": ("adam", [1e-8, 0.9, 0.999, 1.0, 1.0], ("element", "element", "row")),
    "partial-adam": ("partial_rowwise_adam", [1e-8, 0.9, 0.999, 0.0], ("element", "row")),
    "lamb": ("lamb", [1e-8, 0.9, 0.999, 0.0], ("element", "element")),
    "partial-lamb-row-step": ("partial_rowwise_lamb", [1e-8, 0.9, 0.999, 1.0], ("element", "row", "row")),
    "lars": ("lars_sgd", [0.9, 0.02], ("element",)),
}


def slots_for(
    kinds: tuple[str, ...], rows: int, dim: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    made = [
        torch.rand(rows, dim, dtype=dtype) if k == "element" else torch.rand(rows, dtype=dtype) for k in kinds
    ]
    if len(kinds) == 3:  # the third slot counts a row's updates
        made[2] = torch.randint(0, 5, (rows,)).to(dtype)
    return made


def record(dims: list[int], lengths: list[int], rows: int, batch: int, dtype: torch.dtype = torch.float32):
    """A pooled record: one feature per dim, feature f reads table f."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(0, rows, (int(offsets[-1]),))
    grad = torch.randn(batch, sum(dims)).to(dtype)
    features = len(dims)
    starts = [f * batch for f in range(features)]
    places = [sum(dims[:f]) for f in range(features)]
    return (
        grad,
        ids,
        offsets,
        None,
        list(range(features)),
        starts,
        [batch] * features,
        places,
        [sum(dims)] * features,
    )


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_rule_on_the_fast_backend_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    rule, tail, kinds = RULES[name]
    dims, batch = [1, 3, 64, 257], 6
    (*given_record,) = record(dims, [2, 0, 5, 1, 1, 3] * 4, 9, batch)
    weights = [torch.randn(9, d).to(dtype) for d in dims]
    slots = [s for d in dims for s in slots_for(kinds, 9, d)]
    steps = [3, 1, 7, 2]
    rest = ([0, 1, 0, 0], rule, COMMON + tail, steps, [1, 2] * 4, [0, 5, 0, 0], [0, 0, 2, 0])
    copies = [w.clone() for w in weights], [s.clone() for s in slots]
    got = torch.ops.tilerec.update_rows_(weights, slots, *given_record, *rest)
    want = update_rows_reference_(*copies, *given_record, *rest)
    assert got.tolist() == want.tolist() == [0, -1, -1]
    for a, b in zip(slots, copies[1], strict=True):
        torch.testing.assert_close(a, b, rtol=3e-6, atol=1e-7)
    unit = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    for a, b in zip(weights, copies[0], strict=True):
        torch.testing.assert_close(a, b, rtol=unit, atol=1e-6)
        # Stochastic rounding draws the same bits, so only values next to a rounding threshold may differ.
        assert (a != b).float().mean() < (1.0 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("cuts", [[0, 16, 19], [0, 8, 16, 19], [0, 5, 12, 19]])
@pytest.mark.parametrize("reference", [True, False])
def test_a_row_cut_into_column_parts_equals_the_whole(name: str, cuts: list[int], reference: bool) -> None:
    """The same bits where the cuts lie on blocks of 8 columns; equal to rounding elsewhere."""
    rule, tail, kinds = RULES[name]
    rows, dim, hyper = 6, 19, COMMON + tail
    partials = rule_partials_reference if reference else torch.ops.tilerec.rule_partials
    apply_ = rule_apply_reference_ if reference else torch.ops.tilerec.rule_apply_
    whole = torch.randn(rows, dim)
    slots = slots_for(kinds, rows, dim)
    parts = [whole[:, a:b].clone() for a, b in itertools.pairwise(cuts)]
    part_slots = [
        [s[:, a:b].clone() if s.dim() == 2 else s.clone() for s in slots] for a, b in itertools.pairwise(cuts)
    ]
    rows_U = torch.tensor([0, 2, 5])
    grads = torch.randn(3, dim)
    ids = rows_U.repeat_interleave(1)
    update = update_rows_reference_ if reference else torch.ops.tilerec.update_rows_
    update(
        [whole],
        slots,
        grads,
        ids,
        None,
        None,
        [0],
        [0],
        [3],
        [0],
        [dim],
        [0],
        rule,
        hyper,
        [4],
        [1, 2],
        [0],
        [0],
    )

    scalars = torch.zeros(0, 3)
    for phase in range(make_rule(rule, hyper).phases):
        blocks: dict[int, Tensor] = {}
        for part, own, a, b in zip(parts, part_slots, cuts, cuts[1:], strict=False):
            sums = partials(
                part, own, rows_U, grads[:, a:b].contiguous(), scalars, phase, dim, True, a, rule, hyper, 4
            )
            for k in range(sums.shape[2]):
                blocks[a // 8 + k] = blocks.get(a // 8 + k, 0) + sums[:, :, k]
        total = torch.zeros_like(blocks[0])
        for k in sorted(blocks):
            total = total + blocks[k]
        scalars = torch.cat((scalars, total.T))
    for part, own, a, b in zip(parts, part_slots, cuts, cuts[1:], strict=False):
        apply_(part, own, rows_U, grads[:, a:b].contiguous(), scalars, dim, rule, hyper, 4, [1, 2], 0, a)
    got = torch.cat(parts, dim=1)
    if all(cut % 8 == 0 for cut in cuts[1:-1]):
        assert torch.equal(got, whole)
    torch.testing.assert_close(got, whole, rtol=2e-6, atol=2e-7)
    for k, slot in enumerate(slots):
        pieces = [own[k] for own in part_slots]
        if slot.dim() == 2:
            torch.testing.assert_close(torch.cat(pieces, dim=1), slot, rtol=2e-6, atol=2e-7)
        else:
            for piece in pieces:
                torch.testing.assert_close(piece, slot, rtol=2e-6, atol=2e-7)


@given(
    lengths=st.lists(st.integers(0, 5), min_size=4, max_size=4),
    mean=st.booleans(),
    weighted=st.booleans(),
    dim=st.sampled_from([1, 3, 16]),
)
def test_row_sums_equal_a_loop_over_occurrences(lengths, mean, weighted, dim) -> None:
    """Two features read one table; float64 loop as the oracle."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    ids = torch.randint(0, 4, (int(offsets[-1]),))
    weights = torch.rand(ids.numel()) if weighted else None
    grad = torch.randn(2, 2 * dim)
    args = (grad, ids, offsets, weights, 4, dim, [0, 2], [2, 2], [0, dim], [2 * dim] * 2, [int(mean), 0])
    want = torch.zeros(4, dim, dtype=torch.float64)
    for f in range(2):
        for b in range(2):
            begin, end = int(offsets[2 * f + b]), int(offsets[2 * f + b + 1])
            for p in range(begin, end):
                scale = (1 / (end - begin) if mean and f == 0 else 1.0) * (
                    float(weights[p]) if weighted else 1.0
                )
                want[ids[p]] += grad[b, f * dim : (f + 1) * dim].double() * scale
    for sums in (sum_row_gradients_reference, torch.ops.tilerec.sum_row_gradients):
        rows, grads = sums(*args)
        assert rows.tolist() == sorted(set(ids.tolist()))
        torch.testing.assert_close(grads.double(), want[rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_with_gradients_that_are_not_finite_are_left_alone_and_counted(bad: float) -> None:
    weights = [torch.ones(4, 3), torch.ones(5, 3)]
    slots = [torch.ones(4), torch.ones(5)]
    grad = torch.ones(4, 3)
    grad[2, 1] = bad
    result = torch.ops.tilerec.update_rows_(
        weights, slots, grad, torch.tensor([1, 2, 3, 4]), None, None, [0, 1], [0, 2], [2, 2], [0, 6], [3, 3], [0, 0],
        "rowwise_adagrad", [*COMMON, 0.0, 0.0, 0.0], [1, 1], [0] * 4, [0] * 2, [0] * 2,
    )  # fmt: skip
    assert result.tolist() == [1, 1, 3]
    assert torch.equal(weights[1][3], torch.ones(3))
    assert slots[1][3] == 1
    assert not torch.equal(weights[1][4], torch.ones(3))
    assert slots[1][4] == 2
    assert torch.equal(weights[0][[0, 3]], torch.ones(2, 3))


def test_the_loss_scale_is_divided_out_before_the_rule() -> None:
    outcomes = []
    for scale in (1.0, 1024.0):
        weight, slot = torch.ones(3, 8), torch.zeros(3)
        torch.ops.tilerec.update_rows_(
            [weight], [slot], scale * torch.arange(16.0).view(2, 8), torch.tensor([0, 2]), None, None, [0], [0], [2],
            [0], [8], [0], "rowwise_adagrad", [0.1, scale, 0.0, 0.0, 1e-8, 0.0, 0.0], [1], [0, 0], [0], [0],
        )  # fmt: skip
        outcomes.append((weight, slot))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_hit_very_often_is_summed_right(threads: int) -> None:
    torch.set_num_threads(threads)
    count = 100_000
    weight = torch.zeros(3, 4)
    grad = torch.full((count, 4), 2.0**-10)
    torch.ops.tilerec.update_rows_(
        [weight], [], grad, torch.ones(count, dtype=torch.int64), None, None, [0], [0], [count], [0], [4], [0], "sgd",
        [1.0, 1.0, 0.0, 0.0, 0.0, 0.0], [1], [0, 0], [0], [0],
    )  # fmt: skip
    assert torch.equal(weight[1], torch.full((4,), -count * 2.0**-10))
    assert weight[0].abs().sum() == weight[2].abs().sum() == 0


def test_thread_counts_give_the_same_bits() -> None:
    outcomes = []
    ids = (torch.rand(30_000) ** 3 * 500).long()
    grad = torch.randn(30_000, 16)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        weight, slot = torch.ones(500, 16), torch.zeros(500)
        torch.ops.tilerec.update_rows_(
            [weight], [slot], grad, ids, None, None, [0], [0], [ids.numel()], [0], [16], [0], "rowwise_adagrad",
            [*COMMON, 1e-8, 0.0, 0.0], [1], [0, 0], [0], [0],
        )  # fmt: skip
        outcomes.append((weight, slot))
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])


def test_nothing_to_do_changes_nothing() -> None:
    weight = torch.ones(3, 4)
    empty = torch.zeros(0, dtype=torch.int64)
    args = ([weight], [], torch.zeros(2, 4), empty, torch.zeros(3, dtype=torch.int64), None)
    rest = ("sgd", [*COMMON, 0.0, 0.0], [1], [0, 0], [0], [0])
    assert torch.ops.tilerec.update_rows_(*args, [0], [0], [2], [0], [4], [0], *rest).tolist() == [0, -1, -1]
    assert torch.ops.tilerec.update_rows_(*args, [], [], [], [], [], [], *rest).tolist() == [0, -1, -1]
    assert torch.equal(weight, torch.ones(3, 4))


def test_updates_pass_opcheck() -> None:
    grad, ids = torch.randn(2, 4), torch.tensor([1, 2])
    torch.library.opcheck(
        torch.ops.tilerec.update_rows_,
        (
            [torch.randn(3, 4)], [torch.zeros(3)], grad, ids, None, None, [0], [0], [2], [0], [4], [0],
            "rowwise_adagrad", [*COMMON, 1e-8, 0.0, 0.0], [1], [0, 0], [0], [0],
        ),
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.tilerec.rule_partials,
        (torch.randn(3, 4), [torch.zeros(3)], ids, grad, torch.zeros(0, 2), 0, 8, True, 4, "rowwise_adagrad",
         [*COMMON, 1e-8, 0.0, 0.0], 1),
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.tilerec.rule_apply_,
        (torch.randn(3, 4), [torch.zeros(3)], ids, grad, torch.ones(1, 2), 8, "rowwise_adagrad",
         [*COMMON, 1e-8, 0.0, 0.0], 1, [0, 0], 0, 4),
    )  # fmt: skip
