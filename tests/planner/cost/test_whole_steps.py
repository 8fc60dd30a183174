"""What steps cost beside ids and rows is found from the steps' times, whatever it is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tilerec.comms.group import Group
from tilerec.planner.cost import whole_steps as module
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.cost.whole_steps import FITTED, SHAPES, StepShape, fitted
from tilerec.planner.cost.workload import Reads
from tilerec.spec.speeds import PER_WIDTH, Speeds
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

TOPOLOGY = Topology(2, "cpu")
ALONE = default_speeds(TOPOLOGY)
TRUE = {"step": 1e-3, "part": 2e-5, "call": 5e-4, "replica": 1e-4, "row_sum": 2e-4}


class Pair:
    """As much of a group as a fit asks for, where nothing is timed."""

    size = 2


def fit(monkeypatch: pytest.MonkeyPatch, seconds: Any) -> Speeds:
    """From steps that take so long."""
    monkeypatch.setattr(module, "_timed", lambda *_: np.array([seconds(shape) for shape in SHAPES]))
    group: Any = Pair()
    return fitted(group, TOPOLOGY, ALONE, torch.device("cpu"), 1, 1)


def priced(speeds: Speeds, load: float) -> Any:
    def seconds(shape: Any) -> float:
        work, counts = shape.work(TOPOLOGY, speeds), shape.counts(TOPOLOGY, speeds)
        return load * work + sum(TRUE[name] * count for name, count in zip(FITTED, counts, strict=True))

    return seconds


def test_steps_that_follow_the_model_give_its_constants_back(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fit(monkeypatch, priced(ALONE, 1.5))

    assert {name: getattr(found, name) for name in FITTED} == pytest.approx(TRUE, rel=1e-6)
    for name in PER_WIDTH:
        assert getattr(found, name) == pytest.approx([1.5 * rate for rate in getattr(ALONE, name)], rel=1e-6)
    assert found.copy == pytest.approx(1.5 * ALONE.copy)
    assert found.cache == ALONE.cache


def test_the_cache_is_what_steps_show_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(ALONE, cache=ALONE.cache >> 3)
    assert fit(monkeypatch, priced(small, 1.0)).cache == small.cache


def test_no_constant_is_below_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    # Steps of many tables that take no longer than those of one: no room for a cost per part.
    found = fit(monkeypatch, lambda _: 2e-3)

    assert all(getattr(found, name) >= 0 for name in FITTED)
    assert all(rate > 0 for rate in found.lookup_far)


def test_shapes_run_and_all_ranks_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    small = tuple(replace(s, tables=1 + len(s.kinds) // 2, rows=50, bags=4) for s in SHAPES[::2])
    monkeypatch.setattr(module, "SHAPES", small)

    def run(group: Group) -> Speeds:
        return fitted(group, TOPOLOGY, ALONE, torch.device("cpu"), 1, 2)

    first, second = run_virtual_ranks(2, run)
    assert first == second
    assert first.call > 0 or first.step > 0


# ---------------------------------------------------------------------------------------------------- shapes

MIXED = StepShape(("rows", "whole", "columns", "copies"), 4, 60, 8, 3, 5, module._ROWWISE)


def test_shapes_are_those_that_the_page_names() -> None:
    """docs/planner-cost.md: 14 models, 1 to 12 tables a rank, 16 to 128 columns, 1 to 10 ids per bag, all kinds."""
    assert len(SHAPES) == 14
    assert (min(s.tables for s in SHAPES), max(s.tables for s in SHAPES)) == (1, 12)
    assert {s.columns for s in SHAPES} == {16, 32, 64, 128}
    assert (min(s.ids_per_bag for s in SHAPES), max(s.ids_per_bag for s in SHAPES)) == (1, 10)
    alone = {s.kinds[0] for s in SHAPES if len(s.kinds) == 1}
    assert alone == {kind for s in SHAPES for kind in s.kinds} == {"whole", "rows", "columns", "copies"}
    # Rules that learn nothing: tables stay as they are, however often a step runs.
    assert all(s.rule.hyper()[0] == 0.0 for s in SHAPES)


def test_a_shape_has_its_tables_for_each_rank_and_column_blocks_for_each() -> None:
    works = MIXED.works(3)
    assert [w.name for w in works] == [f"t{t}" for t in range(12)]
    assert [w.dim for w in works] == [8, 8, 24, 8] * 3
    assert {w.rows for w in works} == {60}
    assert all(w.optimizer is module._ROWWISE for w in works)
    assert all(list(w.reads) == [Reads(5, 3)] for w in works)


def test_whole_tables_of_a_shape_go_to_the_ranks_in_turn_and_the_others_to_all() -> None:
    topology = Topology(3, "cpu")
    owners = [[tile.owners for tile in tiling.tiles()] for tiling in MIXED.tilings(topology)]
    split, copies = [(0,), (1,), (2,)], [(0, 1, 2)]
    assert owners == [
        kind for turn in range(3) for kind in (split, [(turn,)], split, copies)
    ]  # rows, whole, columns, copies
    assert [len(tiling.blocks) for tiling in MIXED.tilings(topology)] == [1, 1, 3, 1] * 3


@pytest.mark.parametrize(
    ("kinds", "wanted"),
    [
        # step, part: those a home addresses and those that owners read for homes, call, replica, row sum
        (("whole",), [1, 2 + 2, 4, 0, 0]),
        (("rows",), [1, 4 + 2 * 2, 4, 0, 0]),
        (("columns",), [1, 4 + 2 * 2, 5, 0, 2]),  # each rank holds a block of both tables
        (("copies",), [1, 2 + 2, 4, 2, 0]),  # each rank reads its own: counts, ids, gradients, header
    ],
)
def test_a_step_has_as_many_of_each_constant_as_it_has_parts_and_collectives(
    kinds: tuple[str, ...], wanted: list[float]
) -> None:
    """One table for each of two ranks."""
    shape = StepShape(kinds, 1, 1000, 32, 1, 64, module._ROWWISE)
    assert shape.counts(TOPOLOGY, ALONE) == pytest.approx(wanted)


def test_work_has_no_constants_of_steps_in_it() -> None:
    work = MIXED.work(TOPOLOGY, ALONE)
    constants = dict.fromkeys((*FITTED, "call_peer"), 7.0)
    assert MIXED.work(TOPOLOGY, replace(ALONE, **constants)) == work > 0  # type: ignore[arg-type]
    doubled = {name: 2 * getattr(ALONE, name) for name in module._WORK}
    rates = {name: tuple(2 * rate for rate in getattr(ALONE, name)) for name in PER_WIDTH}
    assert MIXED.work(TOPOLOGY, replace(ALONE, **doubled, **rates)) == pytest.approx(2 * work)  # type: ignore[arg-type]


def test_a_steps_batches_are_of_the_shape_and_take_turns() -> None:
    seen: list[Any] = []

    class Recorder:
        def __call__(self, batch: Any) -> Any:
            seen.append(batch)
            return self

        def values(self) -> Any:
            return self

        def backward(self, grad: Any) -> None:
            assert grad.shape == (5, 8 + 8 + 24 + 8)
            assert bool((grad == 1).all())

    shape = replace(MIXED, tables=4, rows=1000, bags=5)
    works = shape.works(1)
    works[2] = replace(works[2], dim=24)
    step, other = (module._ShapeStep(shape, works, Recorder(), rank, torch.device("cpu")) for rank in (0, 1))
    for _ in range(7):
        step()
    assert [batch.keys() for batch in seen] == [["t0", "t1", "t2", "t3"]] * 7
    assert all(batch.lengths().tolist() == [3] * 20 for batch in seen)
    ids = [batch.values() for batch in seen]
    assert all(batch.numel() == 60 and int(batch.min()) >= 0 and 900 < int(batch.max()) < 1000 for batch in ids)
    assert len({tuple(batch.tolist()) for batch in ids}) == 3
    assert all(torch.equal(ids[k], ids[k + 3]) for k in range(4))
    other()
    assert not torch.equal(seen[-1].values(), seen[0].values())


# ---------------------------------------------------------------------------------------------------- times and fits


def test_a_shapes_time_is_the_least_of_rounds_medians_of_the_slower_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two shapes, two rounds of three steps; another rank takes longer at some of them."""
    mine = [[[4.0, 1.0, 2.0], [9.0, 9.0, 8.0]], [[1.0, 1.0, 1.0], [5.0, 7.0, 3.0]]]  # by shape and round
    theirs = [[1.0, 3.0, 1.0, 9.0, 1.0, 1.0], [6.0, 2.0, 2.0, 2.0, 2.0, 9.0]]  # by shape
    order = [each for turn in range(2) for shape in mine for each in shape[turn]]
    now = iter([100.0 + extra for each in order for extra in (0.0, each)])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    events: list[str] = []

    class Ranks(Pair):
        def barrier(self) -> None:
            events.append("barrier")

        def split(self, name: str) -> Any:
            return SimpleNamespace(close=lambda: events.append("closed " + name))

        def all_gather_object(self, own: list[list[float]]) -> list[list[list[float]]]:
            assert own == [[*first, *second] for first, second in mine]
            return [own, theirs]

    shapes: Any = [SimpleNamespace(ready=lambda *_, name=name: lambda: events.append(name)) for name in ("a", "b")]
    group: Any = Ranks()
    found = module._timed(group, TOPOLOGY, torch.device("cpu"), shapes, 2, 3)
    # a: medians of (4, 3, 2) and (9, 9, 8); b: of (6, 2, 2) and (5, 7, 9).
    assert found.tolist() == [3.0, 2.0]
    turn = [event for name in "ab" for event in [name] * 3 + ["barrier", name] * 3]
    assert events == [*turn * 2, "barrier", "closed calibrate", "closed calibrate, ids"]


def fit_of(amounts: list[list[float]], taken: list[float]) -> tuple[float, Speeds]:
    return module._fit(ALONE, np.array(amounts), np.array(taken))


@pytest.mark.parametrize(("times", "load"), [(0.1, 0.5), (0.6, 0.6), (3.9, 3.9), (50.0, 4.0)])
def test_a_load_is_believed_between_a_half_and_four(times: float, load: float) -> None:
    none = [0.0] * 5
    error, found = fit_of([[1.0, *none], [2.0, *none]], [times, 2 * times])
    assert found.copy == pytest.approx(load * ALONE.copy)
    assert found.lookup_far == pytest.approx([load * rate for rate in ALONE.lookup_far])
    assert found.call_peer == ALONE.call_peer  # not work
    assert [getattr(found, name) for name in FITTED] == none
    assert error == pytest.approx(2 * (load / times - 1) ** 2)


def test_constants_are_solved_for_where_a_shape_has_them() -> None:
    _, found = fit_of([[1.0, 1.0, 0, 0, 0, 0], [2.0, 1.0, 0, 0, 0, 0], [2.0, 1.0, 4.0, 0, 0, 0]], [3.0, 5.0, 9.0])
    assert [found.step, found.part, found.call] == pytest.approx([1.0, 1.0, 0.0], abs=1e-9)
    assert found.copy == pytest.approx(2 * ALONE.copy)


def test_least_squares_leave_out_what_comes_out_below_zero() -> None:
    """x + y = 1 and x + 3 y = 1 give y = 0; x + 2 y = 1 and 4 x + y = 1 are met; -y would meet the third."""
    assert module._least_squares(np.array([[1.0, 1.0], [1.0, 3.0]])) == pytest.approx([1.0, 0.0], abs=1e-9)
    assert module._least_squares(np.array([[1.0, 2.0], [4.0, 1.0]])) == pytest.approx([1 / 7, 3 / 7])
    # Met by x = 2, y = -1, so y is left out: the least of (x - 1)^2 + (2 x - 1)^2 is at x = 3 / 5.
    assert module._least_squares(np.array([[1.0, 1.0], [2.0, 3.0]])) == pytest.approx([0.6, 0.0])
    assert module._least_squares(np.array([[1.0, 1.0], [3.0, 2.0]])) == pytest.approx([0.0, 0.6])


def test_caches_down_to_a_sixty_fourth_are_tried_and_the_least_error_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []

    def fit_one(own: Speeds, amounts: Any, taken: Any) -> tuple[float, Speeds]:
        tried.append(own.cache)
        assert amounts.shape == (len(SHAPES), 1 + len(FITTED))
        return abs(own.cache - 3000.0), own

    monkeypatch.setattr(module, "_fit", fit_one)
    monkeypatch.setattr(module, "_timed", lambda *given: np.ones(len(given[3])))
    group: Any = Pair()
    found = fitted(group, TOPOLOGY, replace(ALONE, cache=64 * 128), torch.device("cpu"), 1, 1)
    assert tried == [64 * 128 >> k for k in range(7)]
    assert found.cache == 2048


def test_a_rank_alone_times_whole_tables_only(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def timed(*arguments: Any) -> Any:
        given.extend(arguments[3])
        assert arguments[4:] == (2, 5)
        return np.ones(len(arguments[3]))

    monkeypatch.setattr(module, "_timed", timed)
    group: Any = SimpleNamespace(size=1)
    fitted(group, Topology(1, "cpu"), ALONE, torch.device("cpu"), 2, 5)
    assert given == [shape for shape in SHAPES if shape.kinds == ("whole",)]
    assert len(given) == 4
