"""Drawn by hypothesis: tilings of any shape, tables, batches and hosts that no table of cases would list.

`make parity` (TILEREC_NIGHTLY=1) draws ten times as many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parity.harness import (
    OPTIMIZERS,
    TILINGS,
    Case,
    Hosts,
    TableCase,
    adds_over_rows,
    assemble,
    batches,
    build,
    check,
    compare,
    run_unsharded,
    run_virtual,
    table_wise,
)
from tilerec.errors import InputError
from tilerec.spec.table import DataType
from tilerec.spec.tile import Tiling

MORE = 10 if os.environ.get("TILEREC_NIGHTLY") == "1" else 1
DIMS = (1, 3, 8, 20, 257)
FLOATS = (DataType.FP32, DataType.FP16, DataType.BF16)
ROUNDED = ("sgd", "sgd_momentum", "adagrad", "rowwise_adagrad", "adam", "adamw", "partial_rowwise_adam")
"""Rules whose row sums, if any, are of squared gradients: whole numbers stay exact in any order."""

Draw = Callable[[st.SearchStrategy[Any]], Any]


def cuts(draw: Draw, size: int, most: int) -> list[int]:
    """0, up to `most` places between, `size`."""
    inner = draw(st.lists(st.integers(0, size), max_size=most))
    return sorted({0, size, *inner})


def draw_tiling(draw: Draw, rows: int, dim: int, size: int, *, aligned: bool) -> Tiling:
    """Any cover: column blocks, each with row cuts of its own (the same for all if `aligned`), owners, replicas."""
    owners = st.lists(st.integers(0, size - 1), min_size=1, max_size=2, unique=True).map(sorted).map(tuple)
    shared = cuts(draw, rows, 3)
    tiles = []
    for c0, c1 in pairwise(cuts(draw, dim, 2)):
        above: tuple[int, ...] = ()
        for r0, r1 in pairwise(shared if aligned else cuts(draw, rows, 3)):
            own = draw(owners)
            if aligned and own == above:  # they would merge, and then the blocks' cuts differ
                own = ((own[0] + 1) % size,)
            above = own
            tiles.append((r0, r1, c0, c1, own))
    return Tiling.of("t", rows, dim, tiles)


def draw_hosts(draw: Draw, size: int) -> Hosts:
    host_of = [draw(st.integers(0, 1)) for _ in range(size)]
    hosts = [tuple(r for r in range(size) if host_of[r] == h) for h in (0, 1)]
    return tuple(host for host in hosts if host)


@st.composite
def cases(
    draw: Draw,
    *,
    sizes: tuple[int, ...] = (1, 2, 3, 4),
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS),
    exact: bool = False,
    forms: tuple[str, ...] = ("sum", "mean", "weighted", "weighted_mean", "sequence"),
    types: tuple[DataType, ...] = (DataType.FP32,),
    dims: tuple[int, ...] = DIMS,
) -> Case:
    """One to three tables over four features: shared tables, features that several tables read, idle features."""
    size = draw(st.sampled_from(sizes))
    form = draw(st.sampled_from(forms))
    spec = OPTIMIZERS[draw(st.sampled_from(optimizers))]
    hosts = draw_hosts(draw, size)
    tables, tilings = [], {}
    for i in range(draw(st.integers(1, 3))):
        rows, dim = draw(st.integers(1, 20)), draw(st.sampled_from(dims))
        features = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True))
        mean = form.endswith("mean") and draw(st.booleans())
        tables.append(TableCase(f"t{i}", rows, dim, tuple(features), draw(st.sampled_from(types)), mean))
        # Which row sums may be added over columns is another test's claim.
        aligned = adds_over_rows(spec) or draw(st.booleans())
        tilings[f"t{i}"] = draw_tiling(draw, rows, dim, size, aligned=aligned)
    return Case(
        tuple(tables), tilings, hosts, spec, tuple(draw(st.integers(0, 4)) for _ in range(size)),
        pooled=form != "sequence", weighted=form.startswith("weighted"), variable=draw(st.booleans()), exact=exact,
        fan_in={"t0": draw(st.sampled_from([1.0, 2.0]))}, mean_length=draw(st.sampled_from([0.8, 1.0, 3.0])),
        seed=draw(st.integers(0, 99)),
    )  # fmt: skip


@settings(max_examples=30 * MORE)
@given(cases())
def test_any_tiling_equals_unsharded(case: Case) -> None:
    check(case, run_virtual(case))


@settings(max_examples=10 * MORE)
@given(cases(types=(DataType.FP64,)))
def test_any_tiling_of_float64_tables_equals_unsharded(case: Case) -> None:
    check(case, run_virtual(case))


@settings(max_examples=15 * MORE)
@given(cases(sizes=(1, 2, 4), optimizers=ROUNDED, forms=("sum",), types=FLOATS, dims=(1, 3, 8)))
def test_where_sums_are_exact_every_tiling_rounds_to_the_same_bits(case: Case) -> None:
    """Gradients are small whole numbers, so no sum rounds; stochastic rounding draws by place, not by tile."""
    case = replace(case, linear=True)
    figures = compare(case, run_virtual(case), run_unsharded(case))
    assert all(figures.same.values()), figures
    assert figures.outputs <= 2**-7  # partial sums add in another order, then are rounded to the tables' type


@settings(max_examples=10 * MORE)
@given(cases(optimizers=("sgd", "adagrad", "rowwise_adagrad", "adam"), types=FLOATS))
def test_tables_of_mixed_types_stay_within_a_rounding_step_of_unsharded(case: Case) -> None:
    """Sums run in fp32 on both sides, so where they round alike bits agree, and else neighbours do."""
    assert case.optimizer is not None
    case = replace(case, optimizer=replace(case.optimizer, stochastic_rounding=False))
    figures = compare(case, run_virtual(case), run_unsharded(case))
    assert max(figures.outputs, figures.weights, figures.sample_weights, figures.state) <= 2**-6, figures


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "none"])
@settings(max_examples=3 * MORE)
@given(data=st.data())
def test_exact_mode_has_the_same_bits_under_any_tiling(optimizer: str, data: st.DataObject) -> None:
    """At a fixed W: against every table on one rank."""
    case = data.draw(cases(sizes=(2, 3, 4), optimizers=(optimizer,), exact=True))
    one_rank = {t.name: table_wise(t.rows, t.dim, case.hosts, i) for i, t in enumerate(case.tables)}
    plain = replace(case, tilings=one_rank)
    got, want = run_virtual(case), run_virtual(plain)
    for mine, theirs in zip(got, want, strict=True):
        for step, step_want in zip(mine.outputs, theirs.outputs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(step, step_want, strict=True))
    whole, whole_want = assemble(case, got), assemble(plain, want)
    assert whole.keys() == whole_want.keys()
    assert [name for name in whole if not torch.equal(whole[name], whole_want[name])] == []
    check(case, got)


@settings(max_examples=10 * MORE)
@given(cases(forms=("sum", "weighted", "sequence"), optimizers=("none", "sgd", "rowwise_adagrad")))
def test_frozen_tables_stay_and_have_no_state(case: Case) -> None:
    """All tables are frozen where sample weights still want gradients, else the first."""
    case = replace(case, frozen=tuple(t.name for t in case.tables) if case.weighted else ("t0",))
    if not case.weighted and len(case.tables) == 1:
        return  # nothing to differentiate
    ranks = run_virtual(case)
    check(case, ranks)
    before = build(case).state_dict()
    for name in case.frozen:
        for record in ranks:
            for held in record.held[name]:
                (full,) = [value for key, value in before.items() if key.endswith(f".{name}.weight")]
                r0, r1, c0, c1, _ = held.tile
                assert torch.equal(held.weight, full[r0:r1, c0:c1])
                assert held.state == {}
                assert held.grad is None


@pytest.mark.filterwarnings("ignore:.*ids of this batch lay outside their tables:UserWarning")
@pytest.mark.parametrize("tiling", ["data_parallel", "row_wise", "column_wise", "grid", "two_copies"])
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_bad_ids_clamp_as_in_the_unsharded_module(tiling: str, pooled: bool) -> None:
    tables = (TableCase("t0", 9, 4, ("a", "b")), TableCase("t1", 6, 8, ("c", "a")))  # "a": two sizes
    hosts = ((0, 1), (2,))
    case = Case(
        tables, {t.name: TILINGS[tiling](t.rows, t.dim, hosts, i) for i, t in enumerate(tables)}, hosts,
        OPTIMIZERS["sgd"], (4, 0, 3), pooled=pooled, on_bad_id="clamp", bad_ids=True,
    )  # fmt: skip
    ranks, whole = run_virtual(case), run_unsharded(case)
    check(case, ranks, whole)
    assert sum(record.clamped for record in ranks) == whole.clamped > 0


def test_bad_ids_raise_on_every_rank_and_name_the_feature() -> None:
    tables = (TableCase("t0", 9, 4, ("a",)),)
    case = Case(tables, {"t0": TILINGS["row_wise"](9, 4, ((0, 1),), 0)}, ((0, 1),), None, (4, 4), bad_ids=True)
    assert all(batch.values().numel() for rank in (0, 1) for batch in batches(case, rank))
    with pytest.raises(InputError, match="'a'"):
        run_virtual(case)
