"""Every tiling equals the unsharded module, on ranks that are threads: tables of cases, and their product.

The covering subset meets every pair (tiling, form), (tiling, optimizer), (tiling, world), (form, optimizer), … at least
once. `make parity` (TILEREC_NIGHTLY=1) runs the whole product.

Bits are equal, and asserted to be (`harness.keeps_order`), where no sum is reordered: tiles with one owner, every id
sent, bags or rows kept whole, no mean, W a power of two, and no column split under a rule that adds over rows.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest

from tests.parity.harness import (
    FORMS,
    OPTIMIZERS,
    TILINGS,
    WORLDS,
    Case,
    TableCase,
    adds_over_rows,
    aligned,
    check,
    keeps_order,
    run_virtual,
    staggered,
    tabled,
    with_type,
)
from tilerec.errors import ConfigError
from tilerec.spec.table import DataType

NIGHTLY = os.environ.get("TILEREC_NIGHTLY") == "1"

Marks = tuple[str, str, str, str]


def covering() -> list[Marks]:
    """Every tiling with every optimizer once; forms and worlds dealt so that all pairs of marks occur."""
    forms, worlds = FORMS, list(WORLDS)
    return [
        (tiling, forms[(i + j) % len(forms)], optimizer, worlds[(i + j + j // 4) % len(worlds)])
        for i, tiling in enumerate(TILINGS)
        for j, optimizer in enumerate(OPTIMIZERS)
    ]


def test_the_subset_covers_every_pair() -> None:
    axes = (list(TILINGS), list(FORMS), list(OPTIMIZERS), list(WORLDS))
    chosen = covering()
    for one, other in itertools.combinations(range(4), 2):
        met = {(marks[one], marks[other]) for marks in chosen}
        assert met == set(itertools.product(axes[one], axes[other])), (one, other)


@pytest.mark.parametrize("marks", covering(), ids="-".join)
def test_sharded_equals_unsharded(marks: Marks) -> None:
    case = replace(tabled(*marks), distinct=False)
    check(case, run_virtual(case))


FLOAT64 = [
    (tiling, FORMS[i % 5], list(OPTIMIZERS)[(5 * i + 2) % len(OPTIMIZERS)], world)
    for i, (tiling, world) in enumerate(zip(TILINGS, itertools.cycle(["4", "2+2", "3"]), strict=False))
]


@pytest.mark.parametrize("marks", FLOAT64, ids="-".join)
def test_float64_tables_equal_unsharded_to_1e12(marks: Marks) -> None:
    case = with_type(tabled(*marks), DataType.FP64)
    check(case, run_virtual(case))


@pytest.mark.parametrize("tiling", ["data_parallel", "row_wise", "grid", "two_copies"])
def test_float64_weighted_sums_equal_unsharded_to_1e12(tiling: str) -> None:
    case = with_type(tabled(tiling, "weighted", "adagrad", "2+2"), DataType.FP64)
    check(case, run_virtual(case))


def test_bits_are_equal_in_many_of_the_cases() -> None:
    """`keeps_order` claims something: of most tilings there are cases in which it demands equal bits."""
    demanding = {
        marks[0]
        for marks in covering()
        for case in [replace(tabled(*marks), distinct=False)]
        if case.world_size > 1 and any(keeps_order(case, table) for table in case.tables)
    }
    assert demanding >= {
        "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid", "uneven", "two_tiles",
        "staggered", "mixed",
    }  # fmt: skip


@pytest.mark.parametrize("optimizer", [name for name, spec in OPTIMIZERS.items() if adds_over_rows(spec)])
def test_rules_that_add_over_rows_refuse_column_blocks_cut_at_different_rows(optimizer: str) -> None:
    tables = (TableCase("t0", 9, 8, ("a",)),)
    tiling = staggered(9, 8, WORLDS["2"], 0)
    assert not aligned(tiling)
    case = Case(tables, {"t0": tiling}, WORLDS["2"], OPTIMIZERS[optimizer], (2, 2))
    with pytest.raises(ConfigError, match="cut all column blocks at the same rows"):
        run_virtual(case)


@pytest.mark.parametrize("form", ["sum", "sequence"])
@pytest.mark.parametrize("empty", [(0, 0, 0), (0, 3, 0)], ids=["no sample at all", "one rank has samples"])
def test_ranks_without_samples_join_every_step(form: str, empty: tuple[int, ...]) -> None:
    for tiling in ("data_parallel", "row_wise", "column_wise", "grid", "two_tiles"):
        case = replace(tabled(tiling, form, "sgd", "3"), batch_sizes=empty)
        check(case, run_virtual(case))


@pytest.mark.parametrize("tiling", ["row_wise", "grid", "two_copies", "mixed"])
def test_two_hosts_of_eight_ranks_equal_unsharded(tiling: str) -> None:
    hosts = (tuple(range(8)), tuple(range(8, 16)))
    tables = (TableCase("t0", 40, 24, ("a", "b")), TableCase("t1", 5, 3, ("c", "a")))
    case = Case(
        tables, {t.name: TILINGS[tiling](t.rows, t.dim, hosts, i) for i, t in enumerate(tables)}, hosts,
        OPTIMIZERS["rowwise_adagrad"], (2, 0, 1, 3) * 4, steps=2,
    )  # fmt: skip
    check(case, run_virtual(case))


@pytest.mark.nightly
@pytest.mark.skipif(not NIGHTLY, reason="the whole product takes minutes: make parity")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("tiling", TILINGS)
def test_the_whole_product_equals_unsharded(tiling: str, optimizer: str) -> None:
    for form, world in itertools.product(FORMS, WORLDS):
        case = tabled(tiling, form, optimizer, world)
        try:
            check(case, run_virtual(case))
        except AssertionError as error:
            raise AssertionError(f"{tiling}-{form}-{optimizer}-{world}: {error}") from error


@pytest.mark.nightly
@pytest.mark.skipif(not NIGHTLY, reason="the whole product takes minutes: make parity")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("tiling", TILINGS)
def test_the_whole_product_equals_unsharded_to_1e12_in_float64(tiling: str, optimizer: str) -> None:
    for form, world in itertools.product(FORMS, WORLDS):
        case = with_type(tabled(tiling, form, optimizer, world), DataType.FP64)
        try:
            check(case, run_virtual(case))
        except AssertionError as error:
            raise AssertionError(f"{tiling}-{form}-{optimizer}-{world}: {error}") from error
