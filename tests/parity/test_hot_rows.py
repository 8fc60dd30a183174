"""Tables with a copy of some rows on every rank equal the unsharded module, and copies equal their rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.parity.harness import (
    FORMS,
    OPTIMIZERS,
    TILINGS,
    Case,
    Record,
    assemble,
    check,
    compare,
    run_unsharded,
    run_virtual,
    tabled,
    with_type,
)
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.table import DataType

ATTACHED = [name for name in OPTIMIZERS if name != "none"]


def hot(case: Case) -> Case:
    """The case with every third row of its tables on every rank; "t1" has one such row."""
    tilings = {}
    for i, t in enumerate(case.tables):
        ids = np.arange(i, t.rows, 3) if t.name != "t1" else np.array([t.rows - 1])
        tilings[t.name] = case.tilings[t.name].with_hot(t.name, HotRows(ids), case.world_size)
    return replace(case, tilings=tilings)


def without_copies(case: Case, ranks: list[Record]) -> list[Record]:
    """The records of the ranks without their copies, which equal the rows."""
    rows = {t.name: t.rows for t in case.tables}
    bare = [
        replace(
            record,
            held={name: [h for h in held if h.tile.r0 < rows[name]] for name, held in record.held.items()},
        )
        for record in ranks
    ]
    whole = assemble(case, bare)
    found = 0
    for record in ranks:
        for name, several in record.held.items():
            head = case.tilings[name].head
            for held in several:
                if held.tile.r0 < rows[name]:
                    continue
                assert head is not None
                found += 1
                ids = torch.from_numpy(head.hot.ids.copy())
                for slot, value in {"weight": held.weight, **held.state}.items():
                    want = whole[f"{name}.{slot}"]
                    assert torch.equal(value, want[ids] if want.dim() else want), (name, slot)
    heads = sum(tiling.head is not None for tiling in case.tilings.values())
    assert found == case.world_size * heads
    return bare


MARKS = [
    # Of two ranks, "some_replicas" has rows on every rank, beside which there are no hot rows.
    (
        tiling,
        FORMS[(i + j) % len(FORMS)],
        optimizer,
        ["4" if tiling == "some_replicas" else "2", "4", "2+2"][(i + j // 3) % 3],
    )
    for i, tiling in enumerate(name for name in TILINGS if name != "staggered")
    for j, optimizer in enumerate(ATTACHED)
    if (i + j) % 2 == 0
]


@pytest.mark.parametrize("marks", MARKS, ids="-".join)
def test_a_table_with_hot_rows_equals_unsharded(marks: tuple[str, str, str, str]) -> None:
    case = hot(replace(tabled(*marks), distinct=False))
    check(case, without_copies(case, run_virtual(case)))


@pytest.mark.parametrize("world", ["1", "2", "4"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tiling", ["table_wise", "row_wise", "column_wise", "grid", "data_parallel"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_in_exact_mode_bits_are_those_of_the_unsharded_module(
    tiling: str, form: str, world: str, optimizer: str
) -> None:
    """Bits of the same ranks without hot rows; these equal the unsharded module's where `keeps_order` is True."""
    plain = replace(tabled(tiling, form, optimizer, world), exact=True)
    case = hot(plain)
    got, want = without_copies(case, run_virtual(case)), run_virtual(plain)
    for one, other in zip(got, want, strict=True):
        for a, b in zip(itertools.chain(*one.outputs), itertools.chain(*other.outputs), strict=True):
            assert torch.equal(a, b)
    mine, theirs = assemble(case, got), assemble(plain, want)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name
    check(case, got)


@pytest.mark.parametrize("form", ["sum", "sequence"])
@pytest.mark.parametrize("tiling", ["row_wise", "table_wise", "grid"])
def test_hot_rows_equal_unsharded_where_repeated_ids_travel_once(tiling: str, form: str) -> None:
    case = hot(replace(tabled(tiling, form, "rowwise_adagrad", "4"), distinct=True, mean_length=0.8))
    check(case, without_copies(case, run_virtual(case)))


def test_stochastic_rounding_does_not_depend_on_hot_rows() -> None:
    spec = replace(OPTIMIZERS["sgd"], stochastic_rounding=True)  # type: ignore[arg-type]
    plain = replace(with_type(tabled("row_wise", "sequence", "sgd", "4"), DataType.BF16), optimizer=spec, exact=True)
    case = hot(plain)
    mine, theirs = (assemble(case, without_copies(case, run_virtual(case))), assemble(plain, run_virtual(plain)))
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


@pytest.mark.filterwarnings("ignore:.*ids of this batch lay outside their tables:UserWarning")
def test_clamped_ids_of_tables_of_two_sizes_have_their_own_hot_rows() -> None:
    case = hot(replace(tabled("row_wise", "sum", "sgd", "2"), on_bad_id="clamp", bad_ids=True, distinct=False))
    ranks = without_copies(case, run_virtual(case))
    assert compare(case, ranks, run_unsharded(case)).outputs <= 4e-6
