"""The update op: rows summed once, rules applied once, phases that equal the whole row."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.update_ops import (
    rule_apply_,
    rule_apply_reference_,
    rule_apply_to_tables_reference_,
    rule_partials,
    rule_partials_of_tables_reference,
    rule_partials_reference,
    sum_row_gradients,
    sum_row_gradients_of_tables_reference,
    sum_row_gradients_reference,
    update_rows_reference_,
)
from tilerec.errors import ConfigError, InputError
from tilerec.ops import backends  # noqa: F401
from tilerec.ops.update.rules import make_rule

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


def slots_for(kinds: tuple[str, ...], rows: int, dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    made = [torch.rand(rows, dim, dtype=dtype) if k == "element" else torch.rand(rows, dtype=dtype) for k in kinds]
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
    partials = rule_partials_reference if reference else rule_partials
    apply_ = rule_apply_reference_ if reference else rule_apply_
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
            sums = partials(part, own, rows_U, grads[:, a:b].contiguous(), scalars, phase, dim, True, a, rule, hyper, 4)
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
                scale = (1 / (end - begin) if mean and f == 0 else 1.0) * (float(weights[p]) if weighted else 1.0)
                want[ids[p]] += grad[b, f * dim : (f + 1) * dim].double() * scale
    for sums in (sum_row_gradients_reference, sum_row_gradients):
        rows, grads = sums(*args)
        assert rows.tolist() == sorted(set(ids.tolist()))
        torch.testing.assert_close(grads.double(), want[rows], rtol=1e-5, atol=1e-6)


def test_a_gradient_inside_of_a_larger_storage_is_read_where_it_begins() -> None:
    storage = torch.arange(18.0).view(6, 3)
    args = (torch.tensor([2, 0]), None, None, 4, 3, [0], [2], [0], [3], [0])
    for sums in (sum_row_gradients_reference, sum_row_gradients):
        rows, grads = sums(storage[3:5], *args)
        assert rows.tolist() == [0, 2]
        assert torch.equal(grads, storage[[4, 3]])


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


ops = torch.ops.tilerec
BOTH = pytest.mark.parametrize("reference", [True, False])


def good_record(**changed: object) -> dict[str, object]:
    """Two features, two bags each, of tables of 5 rows: ids (1 2 | 3) and (4 | 0 1), dims 3 and 2."""
    record: dict[str, object] = {
        "weights": [torch.ones(5, 3), torch.ones(5, 2)], "slots": [torch.zeros(5), torch.zeros(5)],
        "grad": torch.ones(2, 5), "ids": torch.tensor([1, 2, 3, 4, 0, 1]), "offsets": torch.tensor([0, 2, 3, 4, 6]),
        "sample_weights": None, "tables": [0, 1], "starts": [0, 2], "bags": [2, 2], "grad_starts": [0, 3],
        "grad_strides": [5, 5], "means": [0, 1], "rule": "rowwise_adagrad",
        "hyper": [0.1, 1.0, 0.0, 0.0, 1e-8, 0.0, 0.0], "steps": [1, 1], "seeds": [0] * 4, "row_offsets": [0, 0],
        "column_offsets": [0, 0],
    }  # fmt: skip
    assert changed.keys() <= record.keys()
    return record | changed


LIES: dict[str, tuple[dict[str, object], str]] = {
    "weights of another length": ({"sample_weights": torch.ones(5)}, r"sample_weights have shape \[5\], the ids \[6\]"),
    "weights too many": ({"sample_weights": torch.ones(7)}, r"sample_weights have shape \[7\], the ids \[6\]"),
    "weights in two dimensions": ({"sample_weights": torch.ones(6, 1)}, r"sample_weights have shape \[6, 1\]"),
    "ids in two dimensions": ({"ids": torch.ones(6, 1, dtype=torch.int64)}, r"ids have shape \[6, 1\]"),
    "ids that are no integers": ({"ids": torch.ones(6)}, r"ids have .* type torch.float32; expected a flat list of"),
    "offsets in two dimensions": ({"offsets": torch.zeros(5, 2, dtype=torch.int64)}, r"offsets have shape \[5, 2\]"),
    "offsets too few": ({"offsets": torch.tensor([0, 2, 3, 4])}, r"feature number 1 has bags \[2, 4\), .* 4 offsets"),
    "offsets that are none": ({"offsets": torch.zeros(0, dtype=torch.int64)}, r"there are 0 offsets; expected 3"),
    "offsets that fall": ({"offsets": torch.tensor([0, 2, 1, 4, 6])}, r"feature number 0: offsets\[2\] is 1"),
    "offsets below 0": ({"offsets": torch.tensor([-1, 2, 3, 4, 6])}, r"offsets\[0\] is -1; .* \[0, 6\]"),
    "offsets behind the ids": ({"offsets": torch.tensor([0, 2, 3, 4, 7])}, r"feature number 1: offsets\[4\] is 7"),
    "offsets whose differences wrap": (
        {"offsets": torch.tensor([0, 2**63 - 1, -2, 0, 6]), "bags": [3, 1], "starts": [0, 3], "grad": torch.ones(3, 5)},
        rf"offsets\[1\] is {2**63 - 1}",
    ),
    "gradient too short": ({"grad": torch.ones(9)}, r"feature number 1 reads elements \[3, 10\) of a gradient of 9"),
    "gradient behind its end": ({"grad_starts": [0, 4]}, r"feature number 1 reads elements \[4, 11\)"),
    "gradient before its begin": ({"grad_starts": [-1, 3]}, r"feature number 0 reads elements \[-1, 7\)"),
    "stride past the gradient": ({"grad_strides": [8, 5]}, r"feature number 0 reads elements \[0, 11\)"),
    "stride before the gradient": ({"grad_strides": [-1, 5]}, r"feature number 0 reads elements \[-1, 3\)"),
    "stride that wraps": ({"grad_strides": [2**63 - 1, 5], "grad_starts": [2**62, 3]}, r"feature number 0 reads elem"),
    "no such table": ({"tables": [0, 2]}, r"feature number 1 reads table number 2; expected \[0, 2\)"),
    "table below 0": ({"tables": [0, -1]}, r"feature number 1 reads table number -1; expected \[0, 2\)"),
    "bags below 0": ({"bags": [2, -1]}, r"feature number 1 has -1 bags"),
    "first bag below 0": ({"starts": [-1, 2]}, r"feature number 0 has 2 bags from bag -1 on"),
    "first bag that wraps": ({"starts": [2**63 - 1, 2]}, r"feature number 0 has bags"),
    "ids too few": (
        {"offsets": None, "starts": [0, 5], "bags": [2, 2]}, r"feature number 1 reads ids \[5, 7\) of 6",
    ),
    "lists of other lengths": ({"means": [0]}, r"means has 1 entries for 2 features"),
    "starts too many": ({"starts": [0, 2, 4]}, r"starts has 3 entries for 2 features"),
    "lists that even out": ({"starts": [0, 2, 4], "bags": [2]}, r"starts has 3 entries for 2 features"),
    "slots too few": ({"slots": [torch.zeros(5)]}, r"got 1 slots for 2 tables; expected 1 per table"),
    "slot too short": ({"slots": [torch.zeros(5), torch.zeros(4)]}, r"slot 0 of table number 1 .* has shape \[4\]"),
    "steps too few": ({"steps": [1]}, r"a list of 1 numbers for 2 tables; expected 1 per table"),
    "seeds too few": ({"seeds": [0, 0]}, r"a list of 2 numbers for 2 tables; expected 2 per table"),
    "column below 0": ({"column_offsets": [0, -1]}, r"column offset -1 of table number 1 is outside"),
    "column too far": ({"column_offsets": [0, 2**34]}, r"column offset 17179869184 of table number 1 is outside"),
    "table of one dimension": (
        {"weights": [torch.ones(5, 3), torch.ones(5)]}, r"weight of table number 1 has shape \[5\]; expected \[rows,",
    ),
    "table of three dimensions": ({"weights": [torch.ones(5, 3), torch.ones(5, 1, 2)]}, r"has shape \[5, 1, 2\]"),
    "table without rows": (
        {"weights": [torch.ones(5, 3), torch.ones(0, 2)], "slots": [torch.zeros(5), torch.zeros(0)]},
        r"id 4 of feature number 1 .* outside \[0, 0\) of table number 1",
    ),
    "id behind the table": ({"ids": torch.tensor([1, 2, 3, 4, 5, 1])}, r"id 5 of feature number 1 \(position 4\)"),
    "id below 0": ({"ids": torch.tensor([1, 2, -3, 4, 0, 1])}, r"id -3 of feature number 0 \(position 2\)"),
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("lie", LIES)
def test_a_record_that_lies_is_refused_and_changes_nothing(lie: str, reference: bool) -> None:
    changed, message = LIES[lie]
    record = good_record(**changed)
    before = [x.clone() for x in (*record["weights"], *record["slots"])]  # type: ignore[misc]
    update = update_rows_reference_ if reference else ops.update_rows_
    with pytest.raises(InputError, match=message):
        update(*record.values())
    for now, then in zip((*record["weights"], *record["slots"]), before, strict=True):  # type: ignore[misc]
        assert torch.equal(now, then)


OF_A_SUM = {
    "ids", "offsets", "sample_weights", "grad", "starts", "bags", "grad_starts", "grad_strides", "means",
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("lie", [lie for lie, (changed, _) in LIES.items() if changed.keys() <= OF_A_SUM])
def test_row_sums_of_a_record_that_lies_are_refused(lie: str, reference: bool) -> None:
    record = good_record(**LIES[lie][0])
    sums = sum_row_gradients_reference if reference else sum_row_gradients
    first = [record[name] for name in ("grad", "ids", "offsets", "sample_weights")]
    rest = [record[name] for name in ("starts", "bags", "grad_starts", "grad_strides", "means")]
    for rows in (5, 0) if lie != "id behind the table" else (5,):
        with pytest.raises(InputError, match="sum_row_gradients: "):
            sums(*first, rows, 3, *rest)


@BOTH
def test_tables_below_zero_and_the_largest_id_are_refused(reference: bool) -> None:
    sums = sum_row_gradients_reference if reference else sum_row_gradients
    record = (torch.ones(1, 2), torch.tensor([2**63 - 1]), None, None)
    place = ([0], [1], [0], [2], [0])
    for rows, dim in ((-1, 2), (3, -1)):
        with pytest.raises(InputError, match=f"a table of {rows} rows of {dim} columns"):
            sums(*record, rows, dim, *place)
    for rows in (0, 3):
        with pytest.raises(InputError, match=f"id {2**63 - 1} of feature number 0"):
            sums(*record, rows, 2, *place)


@BOTH
def test_the_record_that_tells_the_truth_is_served(reference: bool) -> None:
    """The one the lies are made from."""
    record = good_record()
    update = update_rows_reference_ if reference else ops.update_rows_
    assert update(*record.values()).tolist() == [0, -1, -1]
    # g 1 per column: s = mean(g^2) = 1, w = 1 - 0.1. Row 0, 1 of table 1 are in a bag of two: g 0.5, s 0.25, step 0.1.
    torch.testing.assert_close(record["slots"][0], torch.tensor([0.0, 1, 1, 1, 0]))  # type: ignore[index]
    torch.testing.assert_close(record["slots"][1], torch.tensor([0.25, 0.25, 0, 0, 1]))  # type: ignore[index]
    torch.testing.assert_close(record["weights"][0][:, 0], torch.tensor([1, 0.9, 0.9, 0.9, 1]))  # type: ignore[index]


@BOTH
def test_unknown_rules_and_wrong_numbers_for_a_rule_are_refused(reference: bool) -> None:
    update = update_rows_reference_ if reference else ops.update_rows_
    with pytest.raises(ConfigError, match="row rule 'adagard' is unknown; expected one of "):
        update(*good_record(rule="adagard").values())
    with pytest.raises(ConfigError, match="got 4 numbers; expected 7: lr, grad_scale, "):
        update(*good_record(hyper=COMMON).values())


@BOTH
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dim", [1, 3, 8, 257])
def test_every_rule_takes_a_step_of_no_rows(name: str, dim: int, reference: bool) -> None:
    rule, tail, kinds = RULES[name]
    weight, slots = torch.ones(4, dim), slots_for(kinds, 4, dim)
    before = [x.clone() for x in (weight, *slots)]
    none, hyper = torch.zeros(0, dtype=torch.int64), COMMON + tail
    update = update_rows_reference_ if reference else ops.update_rows_
    partials = rule_partials_reference if reference else rule_partials
    apply_ = rule_apply_reference_ if reference else rule_apply_
    rest = (rule, hyper, [1], [0, 0], [0], [0])
    for bags, offsets in (
        (3, torch.zeros(4, dtype=torch.int64)),
        (0, torch.zeros(1, dtype=torch.int64)),
        (0, None),
    ):
        record = (torch.ones(bags, dim), none, offsets, None, [0], [0], [bags], [0], [dim], [0])
        assert update([weight], slots, *record, *rest).tolist() == [0, -1, -1]
    scalars, made = torch.zeros(0, 0), make_rule(rule, hyper)
    for phase in range(made.phases):
        for exact, blocks in ((True, (dim + 3 + 7) // 8), (False, 1)):
            sums = partials(weight, slots, none, torch.ones(0, dim), scalars, phase, dim, exact, 3, rule, hyper, 1)
            assert sums.shape == (0, made.sums(phase), blocks)
        scalars = torch.zeros(scalars.shape[0] + made.sums(phase), 0)
    apply_(weight, slots, none, torch.ones(0, dim), scalars, dim, rule, hyper, 1, [0, 0], 0, 3)
    for now, then in zip((weight, *slots), before, strict=True):
        assert torch.equal(now, then)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_features_and_no_tables_are_nothing_to_do(dtype: torch.dtype, reference: bool) -> None:
    update = update_rows_reference_ if reference else ops.update_rows_
    sums = sum_row_gradients_reference if reference else sum_row_gradients
    none = torch.zeros(0, dtype=torch.int64)
    record = (torch.ones(3, 0, dtype=dtype), none, torch.zeros(1, dtype=torch.int64), None)
    hyper = [*COMMON, 0.0, 0.0]
    assert update([], [], *record, *[[]] * 6, "sgd", hyper, [], [], [], []).tolist() == [0, -1, -1]
    weight = torch.ones(2, 3)
    assert update([weight], [], *record, *[[]] * 6, "sgd", hyper, [1], [0, 0], [0], [0]).tolist() == [
        0,
        -1,
        -1,
    ]
    assert torch.equal(weight, torch.ones(2, 3))
    for rows in (2, 0):
        rows_U, grads_UD = sums(*record, rows, 3, *[[]] * 5)
        assert rows_U.shape == (0,)
        assert grads_UD.shape == (0, 3)


@BOTH
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_dense_gradients_keep_infinities_and_nans(dtype: torch.dtype, rows: int, reference: bool) -> None:
    """The rule "store": whoever looks for an overflow, such as a loss scaler, must find it."""
    update = update_rows_reference_ if reference else ops.update_rows_
    dense = torch.zeros(rows + 2, 5, dtype=dtype)
    grad = torch.ones(2 * rows, 5, dtype=dtype)
    grad[0, 1], grad[rows - 1, 4], grad[2 * rows - 1, 3] = math.inf, math.nan, -math.inf
    ids = torch.arange(rows).repeat(2)
    record = (grad, ids, None, None, [0], [0], [2 * rows], [0], [5], [0])
    assert update([dense], [], *record, "store", [], [0], [0, 0], [0], [0]).tolist() == [0, -1, -1]
    want = torch.zeros(rows + 2, 5, dtype=dtype)
    want[:rows] = grad[:rows] + grad[rows:]
    assert want.isnan().any()
    assert want.isinf().any()
    torch.testing.assert_close(dense, want, equal_nan=True, rtol=0, atol=0)


@BOTH
def test_a_dense_gradient_that_overflows_its_type_is_infinite(reference: bool) -> None:
    update = update_rows_reference_ if reference else ops.update_rows_
    dense = torch.zeros(2, 3, dtype=torch.float16)
    record = (
        torch.full((2, 3), 6e4, dtype=torch.float16),
        torch.tensor([1, 1]),
        None,
        None,
        [0],
        [0],
        [2],
        [0],
        [3],
        [0],
    )
    assert update([dense], [], *record, "store", [], [0], [0, 0], [0], [0]).tolist() == [0, -1, -1]
    assert dense.tolist() == [[0.0] * 3, [math.inf] * 3]


PHASES: dict[str, tuple[dict[str, object], str]] = {
    "scalars too few": ({"scalars": torch.zeros(0, 2)}, r"scalars have shape \[0, 2\]; expected \[1, 2\]"),
    "scalars too short": ({"scalars": torch.zeros(1, 1)}, r"scalars have shape \[1, 1\]; expected \[1, 2\]"),
    "gradients too short": (
        {"grads": torch.zeros(1, 3)},
        r"gradients have shape \[1, 3\]; expected \[2, 3\]",
    ),
    "gradients too narrow": (
        {"grads": torch.zeros(2, 2)},
        r"gradients have shape \[2, 2\]; expected \[2, 3\]",
    ),
    "rows in two dimensions": ({"rows": torch.zeros(2, 1, dtype=torch.int64)}, r"rows have shape \[2, 1\]"),
    "row behind the part": (
        {"rows": torch.tensor([1, 4])},
        r"id 4 of feature number 0 \(position 1\) .* \[0, 4\)",
    ),
    "row below 0": ({"rows": torch.tensor([-1, 1])}, r"id -1 of feature number 0"),
    "column below 0": ({"column_offset": -8}, r"column offset -8 of table number 0"),
    "slots too few": ({"slots": [torch.zeros(4, 3)]}, r"got 1 slots for 1 tables; expected 2"),
    "slot too narrow": (
        {"slots": [torch.zeros(4, 2), torch.zeros(4)]},
        r"slot 0 of table number 0 .* \[4, 2\]",
    ),
}


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lie", PHASES)
def test_a_phase_of_arrays_that_do_not_fit_is_refused(lie: str, dtype: torch.dtype, reference: bool) -> None:
    rule, hyper = "partial_rowwise_adam", [*COMMON, 1e-8, 0.9, 0.99, 0.0]
    args: dict[str, object] = {
        "weight": torch.ones(4, 3, dtype=dtype), "slots": [torch.zeros(4, 3), torch.zeros(4)],
        "rows": torch.tensor([1, 3]), "grads": torch.ones(2, 3), "scalars": torch.ones(1, 2), "column_offset": 0,
    } | PHASES[lie][0]  # fmt: skip
    weight, slots, rows, grads, scalars, column = args.values()
    apply_ = rule_apply_reference_ if reference else rule_apply_
    with pytest.raises(InputError, match=PHASES[lie][1]):
        apply_(weight, slots, rows, grads, scalars, 3, rule, hyper, 1, [0, 0], 0, column)
    if lie in ("scalars too few", "scalars too short"):
        scalars = torch.zeros(1, 1)  # the first phase has no scalars before it
    else:
        scalars = torch.zeros(0, 2)
    partials = rule_partials_reference if reference else rule_partials
    with pytest.raises(InputError, match="rule_partials: "):
        partials(weight, slots, rows, grads, scalars, 0, 3, True, column, rule, hyper, 1)


@BOTH
@pytest.mark.parametrize(("rule", "tail", "phases"), [("sgd", [0.0, 0.0], 0), ("rowwise_adagrad", [0.0, 0.0, 0.0], 1)])
def test_a_phase_that_a_rule_has_not_is_refused(rule: str, tail: list[float], phases: int, reference: bool) -> None:
    partials = rule_partials_reference if reference else rule_partials
    slots = [torch.zeros(4)] * phases
    for phase in (-1, phases):
        with pytest.raises(InputError, match=f"phase {phase} of rule '{rule}', which has {phases}"):
            partials(
                torch.ones(4, 3), slots, torch.tensor([1]), torch.ones(1, 3), torch.zeros(max(phase, 0), 1), phase, 3,
                True, 0, rule, COMMON + tail, 1,
            )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- several tables

SUMS = {True: sum_row_gradients_of_tables_reference, False: torch.ops.tilerec.sum_row_gradients_of_tables}
PARTIALS = {True: rule_partials_of_tables_reference, False: torch.ops.tilerec.rule_partials_of_tables}
APPLY = {True: rule_apply_to_tables_reference_, False: torch.ops.tilerec.rule_apply_to_tables_}


@BOTH
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_row_sums_of_several_tables_are_those_of_each_alone(dtype: torch.dtype, known: bool, reference: bool) -> None:
    """Features of three tables in a mixed order, a table without features, one without ids, widths 1 to 257."""
    dims, tables, batch = [3, 64, 8, 257, 1], [3, 0, 4, 0, 3, 1], 40
    widths = [dims[t] for t in tables]
    lengths = torch.randint(0, 4, (len(tables), batch))
    lengths[-1] = 0  # table 1 gets no ids, table 2 has no feature
    grad, ids, offsets = record(widths, lengths.view(-1).tolist(), 9, batch, dtype)[:3]
    starts, places = (
        [f * batch for f in range(len(tables))],
        [sum(widths[:f]) for f in range(len(tables))],
    )
    layout = [starts, [batch] * len(tables), places, [sum(widths)] * len(tables), [0, 1, 0, 0, 1, 0]]
    rows, grads, counts = SUMS[reference](grad, ids, offsets, None, [9 if known else 0] * 5, dims, tables, *layout)
    assert counts.shape == (5,)
    assert counts[1] == counts[2] == 0
    assert grads.shape == ((counts * torch.tensor(dims)).sum(),)
    blocks = grads.split((counts * torch.tensor(dims)).tolist())
    for t, (rows_U, block) in enumerate(zip(rows.split(counts.tolist()), blocks, strict=True)):
        own = [[values[f] for f in range(len(tables)) if tables[f] == t] for values in layout]
        want_rows, want = sum_row_gradients(grad, ids, offsets, None, 9, dims[t], *own)
        assert torch.equal(rows_U, want_rows)
        if reference:  # occurrences of a mean are divided, not multiplied by the inverse
            torch.testing.assert_close(block.view(-1, dims[t]), want, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(block.view(-1, dims[t]), want)


def parts_of(name: str, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Weights, slots and gradients of parts of 4 widths, of rows (0, 2, 5, 8), none, (3), 600 rows."""
    _, _, kinds = RULES[name]
    widths, sizes, counts = [8, 5, 64, 16], [9, 4, 5, 600], [4, 0, 1, 600]
    weights = [torch.randn(n, d).to(dtype) for n, d in zip(sizes, widths, strict=True)]
    slots = [s for n, d in zip(sizes, widths, strict=True) for s in slots_for(kinds, n, d)]
    return weights, slots, [torch.randn(n, d) for n, d in zip(counts, widths, strict=True)]


ROWS_OF_PARTS = [
    torch.tensor([0, 2, 5, 8]), torch.zeros(0, dtype=torch.int64), torch.tensor([3]), torch.arange(600),
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", RULES)
def test_several_parts_in_one_call_are_each_of_them_alone(
    name: str, exact: bool, threads: int, reference: bool
) -> None:
    """The same bits; sums of earlier phases lie one table after the other, as views of one tensor."""
    torch.set_num_threads(threads)
    rule, tail, kinds = RULES[name]
    hyper, made = COMMON + tail, make_rule(rule, COMMON + tail)
    weights, slots, grads = parts_of(name, torch.bfloat16 if name == "lamb" else torch.float32)
    each = len(kinds)
    own_slots = [slots[t * each : (t + 1) * each] for t in range(4)]
    columns, dims, steps = [16, 3, 0, 8], [64, 8, 64, 24], [1, 2, 3, 4]
    counts = [rows.numel() for rows in ROWS_OF_PARTS]
    scalars = torch.zeros(0, sum(counts))
    one = rule_partials_reference if reference else rule_partials
    for phase in range(made.phases):
        before = scalars.split(counts, dim=1)
        flat = PARTIALS[reference](
            weights,
            slots,
            ROWS_OF_PARTS,
            grads,
            before,
            phase,
            dims,
            exact,
            False,
            columns,
            rule,
            hyper,
            steps,
        )
        want = [
            one(
                weights[t], own_slots[t], ROWS_OF_PARTS[t], grads[t], before[t].contiguous(), phase, dims[t], exact,
                columns[t], rule, hyper, steps[t],
            )
            for t in range(4)
        ]  # fmt: skip
        assert torch.equal(flat, torch.cat([part.reshape(-1) for part in want]))
        scalars = torch.cat((scalars, torch.rand(made.sums(phase), sum(counts))))
    copies = [w.clone() for w in weights], [s.clone() for s in slots]
    seeds, row_offsets = [1, 2, 3, 4, 5, 6, 7, 8], [0, 5, 0, 9]
    last = scalars.split(counts, dim=1)
    APPLY[reference](weights, slots, ROWS_OF_PARTS, grads, last, dims, rule, hyper, steps, seeds, row_offsets, columns)
    apply_one = rule_apply_reference_ if reference else rule_apply_
    for t in range(4):
        apply_one(
            copies[0][t], copies[1][t * each : (t + 1) * each], ROWS_OF_PARTS[t], grads[t], last[t].contiguous(),
            dims[t], rule, hyper, steps[t], seeds[2 * t : 2 * t + 2], row_offsets[t], columns[t],
        )  # fmt: skip
    for got, alone in zip((*weights, *slots), (*copies[0], *copies[1]), strict=True):
        assert torch.equal(got, alone)


@BOTH
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_phase_tells_which_rows_are_finite_beside_their_sums(
    dtype: torch.dtype, exact: bool, reference: bool
) -> None:
    """Parts of 16 columns from column 8 on, and of 3; LAMB has two sums."""
    rule, hyper = "lamb", COMMON + RULES["lamb"][1]
    weights = [torch.randn(4, 16, dtype=dtype), torch.randn(4, 3, dtype=dtype)]
    slots = [s for w in weights for s in slots_for(("element", "element"), 4, w.shape[1], dtype)]
    grads = [torch.ones(3, 16, dtype=dtype), torch.ones(2, 3, dtype=dtype)]
    grads[0][1, 15], grads[1][0, 0], grads[0][2, 3] = math.nan, -math.inf, torch.finfo(dtype).max
    rows = [torch.tensor([0, 1, 3]), torch.tensor([2, 3])]
    none = [torch.zeros(0, r.numel(), dtype=dtype) for r in rows]
    args = (weights, slots, rows, grads, none, 0, [24, 3], exact)
    rest = ([8, 0], rule, hyper, [1, 1])
    flagged = PARTIALS[reference](*args, True, *rest)
    plain = PARTIALS[reference](*args, False, *rest)
    blocks = [2, 1] if exact else [1, 1]
    with_flag = flagged.split([3 * 3 * blocks[0], 2 * 3 * blocks[1]])
    without = plain.split([3 * 2 * blocks[0], 2 * 2 * blocks[1]])
    for t, finite in enumerate(([1.0, 0.0, 1.0], [0.0, 1.0])):
        got = with_flag[t].view(len(finite), 3, blocks[t])
        want = without[t].view(len(finite), 2, blocks[t])
        torch.testing.assert_close(got[:, :2], want, rtol=0, atol=0, equal_nan=True)
        assert got[:, 2].tolist() == [[value] * blocks[t] for value in finite]


@BOTH
@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"rows": ROWS_OF_PARTS[:3]}, "3 rows for 4 tables; expected one per table"),
        ({"grads": []}, "0 gradients for 4 tables"),
        ({"dims": [64] * 5}, "5 dims for 4 tables|a list of 5 numbers for 4 tables"),
        (
            {"scalars": [torch.zeros(1, n) for n in (4, 0, 2, 600)]},
            r"expected \[1, 1\]: .* \(table number 2\)",
        ),
        (
            {"rows": [*ROWS_OF_PARTS[:2], torch.tensor([5]), ROWS_OF_PARTS[3]]},
            r"id 5 of feature number 2 \(position 0\) is outside \[0, 5\) of table number 2",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_their_number(
    lie: dict[str, list[Tensor]], words: str, reference: bool
) -> None:
    weights, slots, grads = parts_of("rowwise-l2")
    before = [w.clone() for w in weights]
    told = {"rows": ROWS_OF_PARTS, "grads": grads, "scalars": [torch.ones(1, n) for n in (4, 0, 1, 600)]}
    rows, grads, scalars, dims = (told | {"dims": [64] * 4} | lie).values()
    with pytest.raises(InputError, match=words):
        APPLY[reference](
            weights, slots, rows, grads, scalars, dims, "rowwise_adagrad", COMMON + RULES["rowwise-l2"][1], [1] * 4,
            [0] * 8, [0] * 4, [0] * 4,
        )  # fmt: skip
    assert all(torch.equal(now, then) for now, then in zip(weights, before, strict=True))


def test_ops_of_several_tables_pass_opcheck() -> None:
    grads, rows = [torch.randn(2, 4), torch.randn(1, 3)], [torch.tensor([1, 2]), torch.tensor([0])]
    weights, slots = [torch.randn(3, 4), torch.randn(2, 3)], [torch.zeros(3), torch.zeros(2)]
    hyper = [*COMMON, 1e-8, 0.0, 0.0]
    torch.library.opcheck(
        torch.ops.tilerec.rule_partials_of_tables,
        (weights, slots, rows, grads, [torch.zeros(0, 2), torch.zeros(0, 1)], 0, [8, 3], True, True, [4, 0],
         "rowwise_adagrad", hyper, [1, 1]),
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.tilerec.rule_apply_to_tables_,
        (weights, slots, rows, grads, [torch.ones(1, 2), torch.ones(1, 1)], [8, 3], "rowwise_adagrad", hyper, [1, 1],
         [0] * 4, [0, 0], [4, 0]),
    )  # fmt: skip
    torch.library.opcheck(
        torch.ops.tilerec.sum_row_gradients_of_tables,
        (torch.randn(2, 7), torch.tensor([1, 1, 0, 2]), torch.arange(5), None, [3, 0], [4, 3], [0, 1], [0, 2], [2, 2],
         [0, 4], [7, 7], [0, 0]),
    )  # fmt: skip
