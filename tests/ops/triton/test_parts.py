"""Row sums given out, and rules in phases, by Triton's kernels, against their references."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.ops.triton.gates import Gate, compiled
from tests.ops.triton.interpreter import quick
from tests.ops.triton.test_update import ELEMENT, RULES, pooled, single, slots_for
from tests.ops.triton.update_kernels import (
    rule_apply_to_tables_,
    rule_partials_of_tables,
    sum_row_gradients_of_tables,
)
from tests.ops.update_ops import (
    rule_apply_to_tables_reference_,
    rule_partials_of_tables_reference,
    sum_row_gradients_of_tables_reference,
)
from tilerec.errors import InputError
from tilerec.ops.runtime.triton import library
from tilerec.ops.update.rules import make_rule
from tilerec.ops.update.triton import phased_update as module

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels run on the GPU here: see tests/cuda")
PHASED = [name for name, (rule, hyper, _) in RULES.items() if make_rule(rule, hyper).phases]


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def parts_of(name: str, offsets: list[int], widths: list[int], dtype: torch.dtype) -> dict[str, Any]:
    """One part per width, each with 4 of 6 rows; the second has none where there are three."""
    _, _, kinds = RULES[name]
    counts = [4, 0, 4][: len(widths)] if len(widths) > 2 else [4] * len(widths)
    return {
        "weights": [torch.randn(6, w).to(dtype) for w in widths],
        "slots": [s for w in widths for s in slots_for(kinds, 6, w)],
        "rows": [torch.randperm(6)[:n].sort().values for n in counts],
        "grads": [torch.randn(n, w) for n, w in zip(counts, widths, strict=True)],
        "offsets": offsets,
    }


NO_ROOTS = ("sgd", "sgd-momentum", "sgd-nesterov-scaled")


def same(got: Tensor, want: Tensor, name: str) -> None:
    """The same bits, but where a square root is taken: `torch.sqrt` on the CPU need not round it correctly."""
    rtol = 0.0 if name in NO_ROOTS else {torch.float32: 2e-6, torch.bfloat16: 2**-7}[got.dtype]
    torch.testing.assert_close(got, want, rtol=rtol, atol=0 if name in NO_ROOTS else 1e-7, equal_nan=True)


def scalars_for(parts: dict[str, Any], sums: int) -> list[Tensor]:
    """Sums so far; each part's lie apart, in one tensor of all rows."""
    counts = [r.numel() for r in parts["rows"]]
    return list((torch.rand(sums, sum(counts)) + 0.5).split(counts, dim=1))


@pytest.mark.parametrize("name", PHASED)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("offsets", "widths"), [([0, 8, 24], [8, 16, 5]), ([5, 3], [6, 30]), ([0], [1])], ids=str)
def test_partial_sums_are_the_references(name: str, exact: bool, offsets: list[int], widths: list[int]) -> None:
    rule, hyper, _ = RULES[name]
    parts = parts_of(name, offsets, widths, torch.float32)
    made = make_rule(rule, hyper)
    dims, steps = [37] * len(widths), [3, 5, 2][: len(widths)]
    for phase in range(made.phases):
        scalars = scalars_for(parts, sum(made.sums(p) for p in range(phase)))
        finite = phase == 0
        if finite:
            parts["grads"][0][1, 0] = torch.nan if name == "lamb" else torch.inf
        got, want = (
            function(
                parts["weights"], parts["slots"], parts["rows"], parts["grads"], scalars, phase, dims, exact, finite,
                offsets, rule, hyper, steps,
            )
            for function in (rule_partials_of_tables, rule_partials_of_tables_reference)
        )  # fmt: skip
        # Sums of squares and products: nothing that a CPU could round otherwise.
        same(got, want, "sgd" if phase == 0 and name != "lamb" else name)
        parts["grads"][0][1, 0] = 1.0


def test_parts_beyond_a_grids_second_axis_are_further_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of which part a row is told to be missing."""
    monkeypatch.setattr(module, "GRID_Y", 1)
    rule, hyper, _ = RULES["lars"]
    parts = parts_of("lars", [0] * 3, [8, 5, 3], torch.float32)
    scalars = scalars_for(parts, 2)
    about = (rule, hyper, [1, 2, 3])
    results = []
    for function in (rule_apply_to_tables_, rule_apply_to_tables_reference_):
        weights, slots = [w.clone() for w in parts["weights"]], [s.clone() for s in parts["slots"]]
        function(
            weights,
            slots,
            parts["rows"],
            parts["grads"],
            scalars,
            [37] * 3,
            *about,
            [0] * 6,
            [0] * 3,
            [0] * 3,
        )
        results.append((*weights, *slots))
    for got, want in zip(*results, strict=True):
        same(got, want, "lars")
    parts["rows"][2][1] = 6
    with pytest.raises(InputError, match=r"id 6 of feature number 2 \(position 1\) is outside \[0, 6\)"):
        rule_partials_of_tables(
            parts["weights"], parts["slots"], parts["rows"], parts["grads"], [s[:0] for s in scalars], 0, [37] * 3,
            False, True, [0] * 3, *about,
        )  # fmt: skip


@pytest.mark.parametrize("name", list(RULES)[1:])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_written_as_by_the_reference(name: str, dtype: torch.dtype) -> None:
    rule, hyper, _ = RULES[name]
    offsets, widths = [8, 3], [16, 5]
    parts = parts_of(name, offsets, widths, dtype)
    made = make_rule(rule, hyper)
    scalars = scalars_for(parts, sum(made.sums(p) for p in range(made.phases)))
    names = [torch.arange(6) + 2**33, torch.empty(0, dtype=torch.int64)]
    results = []
    for function in (rule_apply_to_tables_, rule_apply_to_tables_reference_):
        weights, slots = [w.clone() for w in parts["weights"]], [s.clone() for s in parts["slots"]]
        function(
            weights, slots, parts["rows"], parts["grads"], scalars, [37, 37], rule, hyper, [3, 5], [1, 2, 3, 4], [7, 0],
            offsets, names,
        )  # fmt: skip
        results.append((*weights, *slots))
    for got, want in zip(*results, strict=True):
        same(got, want, name)


def test_parts_of_several_types_and_strided_rows() -> None:
    rule, hyper, kinds = RULES["lars"]
    types = [torch.bfloat16, torch.float32, torch.bfloat16]
    weights = [torch.randn(6, 4).to(t) for t in types]
    slots = [s for _ in types for s in slots_for(kinds, 6, 4)]
    rows = [torch.arange(6)[::2], torch.arange(3).to(torch.int32), torch.arange(6)[1::2]]
    grads = [torch.randn(3, 8)[:, ::2] for _ in types]
    scalars = [torch.rand(3, 2).T + 0.1 for _ in types]
    results = []
    for function in (rule_apply_to_tables_, rule_apply_to_tables_reference_):
        own, own_slots = [w.clone() for w in weights], [s.clone() for s in slots]
        function(own, own_slots, rows, grads, scalars, [4] * 3, rule, hyper, [1] * 3, [1] * 6, [0] * 3, [0] * 3)
        results.append((*own, *own_slots))
    for got, want in zip(*results, strict=True):
        same(got, want, "lars")


@pytest.mark.parametrize("function", [rule_partials_of_tables, rule_apply_to_tables_])
def test_rows_that_are_not_there_are_told_and_not_touched(function: Any) -> None:
    rule, hyper, _ = RULES["rowwise-none"]
    weight, slots = torch.zeros(3, 4), [torch.zeros(3)]
    rows, grads = [torch.tensor([0, 3])], [torch.ones(2, 4)]
    if function is rule_partials_of_tables:
        rest: list[Any] = [[torch.zeros(0, 2)], 0, [4], False, False, [0], rule, hyper, [1]]
    else:
        rest = [[torch.ones(1, 2)], [4], rule, hyper, [1], [1, 2], [0], [0]]
    with pytest.raises(InputError, match=r"id 3 of feature number 0 \(position 1\) is outside \[0, 3\)"):
        function([weight], slots, rows, grads, *rest)


@pytest.mark.parametrize("name", PHASED)
def test_a_row_cut_at_blocks_of_8_has_the_same_sums_however_it_is_cut(name: str) -> None:
    rule, hyper, kinds = RULES[name]
    weight, grads, rows = torch.randn(5, 40), torch.randn(3, 40), torch.tensor([0, 2, 4])
    slots = slots_for(kinds, 5, 40)
    sums = []
    for cuts in ([0, 40], [0, 8, 32, 40]):
        blocks = []
        for a, b in itertools.pairwise(cuts):
            own = [s[:, a:b].contiguous() if s.dim() == 2 else s for s in slots]
            flat = rule_partials_of_tables(
                [weight[:, a:b].contiguous()], own, [rows], [grads[:, a:b]], [torch.zeros(0, 3)], 0, [40], True, False,
                [a], rule, hyper, [2],
            )  # fmt: skip
            blocks.append(flat.view(3, -1, (b - a) // 8))
        sums.append(torch.cat(blocks, dim=2))
    assert torch.equal(sums[0], sums[1])


@pytest.mark.parametrize("known", [True, False], ids=["rows known", "rows not known"])
@pytest.mark.parametrize("weighted", [False, True])
def test_row_sums_are_those_of_the_reference(known: bool, weighted: bool) -> None:
    dims = [4, 3, 9]
    record = pooled(dims, [2, 0, 5, 1, 3, 3, 0, 0, 0], 6, 3, weighted=weighted, means=[1, 0, 0])
    rows = [6, 6, 6] if known else [0, 0, 0]
    got = sum_row_gradients_of_tables(*record[:4], rows, dims, *record[4:])
    want = sum_row_gradients_of_tables_reference(*record[:4], rows, dims, *record[4:])
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[2], want[2])
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)


def test_row_sums_of_long_runs_and_of_nothing() -> None:
    ids = torch.cat((torch.full((300,), 7), torch.tensor([2, 9])))
    grad = torch.randint(-9, 9, (302, 2)).float()
    grad_, ids_, *rest = single(ids[torch.randperm(302)], grad)
    got = sum_row_gradients_of_tables(grad_, ids_, *rest[:2], [0], [2], *rest[2:])
    want = sum_row_gradients_of_tables_reference(grad_, ids_, *rest[:2], [0], [2], *rest[2:])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    rows_U, grads, counts = sum_row_gradients_of_tables(
        torch.zeros(0, 2),
        torch.zeros(0, dtype=torch.int64),
        None,
        None,
        [0],
        [2],
        [0],
        [0],
        [0],
        [0],
        [2],
        [0],
    )
    assert rows_U.numel() == grads.numel() == 0
    assert counts.tolist() == [0]


def test_ids_as_large_as_they_come_go_to_the_reference() -> None:
    grad, ids, *rest = single(torch.tensor([2**62, 5, 2**62]), torch.ones(3, 2))
    rows_U, grads, _ = sum_row_gradients_of_tables(grad, ids, *rest[:2], [0], [2], *rest[2:])
    assert rows_U.tolist() == [5, 2**62]
    assert grads.tolist() == [1, 1, 2, 2]


def test_bad_ids_of_row_sums_are_told_with_the_references_words() -> None:
    grad = torch.ones(3, 2)
    for ids, rows in ((torch.tensor([1, -4, 0]), 0), (torch.tensor([1, 2, 3]), 3)):
        words = []
        for function in (sum_row_gradients_of_tables, sum_row_gradients_of_tables_reference):
            with pytest.raises(InputError) as error:
                function(grad, ids, None, None, [rows], [2], [0], [0], [3], [0], [2], [0])
            words.append(str(error.value))
        assert words[0] == words[1]


def test_slots_of_every_kind_are_among_the_rules() -> None:
    assert {ELEMENT, "row"} == {kind for _, _, kinds in RULES.values() for kind in kinds}


def apply_gate(columns: int, warps: int) -> Gate:
    kinds = {"KIND0": 2, "KIND1": 0, "KIND2": 0}
    flags = {"MODE": 0, "WD": False, "ROW_STEP": False, "GRAD_SCALED": False, "ROUND": 0, "NAMED": False}
    rule = {"APPLY": "tilerec.ops.update.triton.rules:row_wise_adagrad_apply", "SUMS": 1}
    numbers = ("rows", "names", "meta", "paces", "report")
    values = ("grads", "scalars", "weights", "slot0", "slot1", "slot2")
    by_value = ("grad_scale", *(f"h{i}" for i in range(1, 7)))
    signature = {
        **dict.fromkeys(numbers, "*i64"),
        **dict.fromkeys(values, "*fp32"),
        **dict.fromkeys(by_value, "fp32"),
    }
    return Gate(
        f"{warps}", "tilerec.ops.update.triton.phased_update:apply_to_parts", signature,
        {**rule, **kinds, **flags, "ROWS": 1, "COLUMNS": columns},
        options={"num_warps": warps, "enable_fp_fusion": False},
    )  # fmt: skip


def test_of_several_warps_none_writes_a_rows_slot_before_all_have_read_it() -> None:
    """The interpreter has no warps; what the compiler makes has one barrier more where there are two."""
    one, two = compiled([apply_gate(512, 1), apply_gate(1024, 2)]).values()
    assert two.count("bar.sync") == one.count("bar.sync") + 1
