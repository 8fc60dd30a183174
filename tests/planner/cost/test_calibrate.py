"""Measuring a machine: every rank gets the same speeds, and a planner can use them."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.errors import FileError
from tilerec.planner.cost import calibrate as module
from tilerec.planner.cost import whole_steps
from tilerec.planner.cost.calibrate import calibrate, machine
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.spec.speeds import PER_WIDTH, SINGLE, Speeds
from tilerec.spec.topology import DDR_CAP, Topology
from tilerec.testing.virtual import run_virtual_ranks

SMALL = {
    "_FAR_BYTES": 2**20,
    "_NEAR_BYTES": 2**16,
    "_FLUSH_BYTES": 2**12,
    "_IDS": 480,
    "_REPEATS": 2,
    "_ROUNDS": 1,
    "_STEPS": 1,
    "_PASSES": 1,
    "WIDTHS": (16, 64),
}

FULL = {name: getattr(module, name) for name in SMALL} | {
    "_LONG": module._LONG,
    "_FRESH_BYTES": module._FRESH_BYTES,
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables and few repeats: tests read no times."""
    for name, value in SMALL.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(whole_steps, "SHAPES", whole_steps.SHAPES[:2])


def test_ranks_measure_together() -> None:
    first, second = run_virtual_ranks(2, lambda group: calibrate(group, machine(2)))
    assert first == second
    assert first.world_size == 2
    measured = first.speeds
    assert measured.origin.startswith("measured, 2 cpu ranks")
    assert all(rate >= 0 for name in PER_WIDTH for rate in getattr(measured, name))
    assert measured.fresh is not None
    assert measured.fresh > 0
    assert measured.hot_id is not None
    assert measured.hot_id > 0
    assert all(getattr(measured, name) >= 0 for name in SINGLE)
    assert all(rate > 0 for rate in (*measured.lookup_near, *measured.place))
    assert measured.link_in == measured.link_out > 0


def test_reads_of_rows_are_measured_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FILE_BYTES", 2**20)
    monkeypatch.setattr(module, "_FILE_ROWS", 256)
    first, second = run_virtual_ranks(2, lambda group: calibrate(group, machine(2), folder=str(tmp_path)))
    assert first == second
    assert 0 < first.speeds.file_row < 1
    assert Speeds.from_json(first.speeds.to_json()) == first.speeds
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_missing_is_an_error_before_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"Table 'of the measurement': got 'no such folder'"):
        run_virtual_ranks(2, lambda group: calibrate(group, machine(2), folder=str(tmp_path / "none")))


def test_a_rank_alone_has_no_links_to_measure() -> None:
    def run(group: Group) -> None:
        measured = calibrate(group, machine(1)).speeds
        assert measured is not None
        assert measured.row_sum == measured.replica == 0

    run_virtual_ranks(1, run)


@pytest.mark.parametrize(
    ("measure", "per_call", "rates"),
    [
        # An id costs 0.1 near and 0.4 far, its bag 0.5: bags of one id, and of ten.
        ("_lookup", (0.9, 0.6, 0.15, 0.45), {"lookup_bag": 0.5, "lookup_near": 0.1, "lookup_far": 0.4}),
        # An id costs 0.2, its bag 0.3, a row 0.6 near and 0.8 far.
        (
            "_update",
            (0.5, 0.23, 0.5 + 0.6, 0.5 + 0.8),
            {"update_id": 0.2, "update_bag": 0.3, "update_near": 0.6, "update_far": 0.8},
        ),
    ],
)
def test_rates_are_those_of_which_the_measured_calls_are_made(
    measure: str, per_call: tuple[float, ...], rates: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of nothing takes 2 s, each other one 2 s and so many for each of its 480 ids."""
    seconds = iter([2.0, *(2.0 + 480 * each for each in per_call)])
    monkeypatch.setattr(module._Bench, "_seconds", lambda *_, **__: next(seconds))

    def run(group: Group) -> dict[str, float]:
        found: dict[str, float] = getattr(module._Bench(group, torch.device("cpu"), machine(1)), measure)(16)
        return found

    assert run_virtual_ranks(1, run) == [pytest.approx(rates)]


def test_rows_are_placed_at_the_mean_of_writing_and_adding(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 2048 * 105
    seconds = iter([0.2 * rows, 0.4 * rows, 0.7 * rows])
    monkeypatch.setattr(module._Bench, "_seconds", lambda *_, **__: next(seconds))
    found = run_virtual_ranks(1, lambda group: module._Bench(group, torch.device("cpu"), machine(1))._place(16))
    assert found == [pytest.approx({"place": 0.3, "pick": 0.7})]


def test_a_machines_memory_is_shared_out() -> None:
    assert machine(4).memory_cap == machine(1).memory_cap // 4 > 0


# ---------------------------------------------------------------------------------------------------- what is measured


class Alone:
    """As much of a group as one rank's measurements use."""

    rank = 0

    def __init__(self, size: int = 1) -> None:
        self.size = size
        self.barriers = 0

    def barrier(self) -> None:
        self.barriers += 1


def bench(size: int = 1) -> Any:
    group: Any = Alone(size)
    return module._Bench(group, torch.device("cpu"), machine(size))


@dataclass
class Timed:
    """One call that was timed: its ops and their arguments, how often, and whether other data was in the caches."""

    repeats: int
    cold: bool
    ops: list[tuple[Any, ...]] = field(default_factory=list)


ONE, TEN = 1, 10
IDS: int = FULL["_IDS"]  # type: ignore[assignment]
OPS = ("pooled_lookup", "update_rows_", "place_rows_", "pick_rows_", "route_ids")


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Timed]:
    """Calls in place of their seconds: each is made once, and takes a second."""
    calls: list[Timed] = []

    def seconds(_: Any, work: Callable[[], object], repeats: int = module._REPEATS, *, cold: bool = False) -> float:
        calls.append(Timed(repeats, cold))
        work()
        return 1.0

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name, self.op = name, getattr(torch.ops.tilerec, name)

        def __call__(self, *arguments: Any) -> Any:
            if calls:
                calls[-1].ops.append((self.name, *arguments))
            return self.op(*arguments)

        def __getattr__(self, overload: str) -> Any:
            return getattr(self.op, overload)

    monkeypatch.setattr(module._Bench, "_seconds", seconds)
    monkeypatch.setattr(module, "_IDS", IDS)
    for name in OPS:
        monkeypatch.setattr(torch.ops.tilerec, name, Recorded(name))
    return calls


FAR_ROWS, NEAR_ROWS = 2**20 // 64, 2**16 // 64


def test_the_sizes_are_those_that_the_page_names() -> None:
    """docs/planner-cost.md: three passes, bags of 1 and of 10, a large table and a small one, about 20 seconds."""
    assert FULL["_PASSES"] == 3
    assert FULL["_LONG"] == 10
    assert FULL["WIDTHS"] == (16, 32, 64, 128, 256)
    mib = 2**20
    assert 64 * mib <= FULL["_FAR_BYTES"] <= 128 * mib  # much larger than caches
    assert mib // 2 <= FULL["_NEAR_BYTES"] <= 2 * mib  # fits the fastest
    assert 32 * mib <= FULL["_FLUSH_BYTES"] < 64 * mib
    assert 32 * mib < FULL["_FRESH_BYTES"] < 128 * mib
    assert 5 <= FULL["_REPEATS"] <= 20
    assert FULL["_IDS"] % (8 * 2 * 10) == 0  # whole bags of ten, and eight features of bags of two


def test_lookups_are_of_one_id_and_of_bags_of_one_and_ten_in_a_small_and_a_large_table(
    timed: list[Timed],
) -> None:
    bench()._lookup(16)
    found = []
    for call in timed:
        [(name, [table], sinks, ids, offsets, weights, *rest)] = call.ops
        assert (name, sinks.numel(), weights) == ("pooled_lookup", 0, None)
        length = int(offsets[1])
        count, bags = ids.numel(), offsets.numel() - 1
        assert offsets.tolist() == list(range(0, count + 1, length))
        assert rest == [[0], [0], [0], [bags, 0], torch.float32, "f@t"]
        assert table.shape[1] == 16
        assert bool((table == 1).all())  # memory that was never written is cached
        assert call.cold == (table.shape[0] == FAR_ROWS)
        if count > 1:  # anywhere in the table
            assert 0.95 * table.shape[0] < int(ids.max()) < table.shape[0]
            assert 0 <= int(ids.min()) < 0.05 * table.shape[0]
        found.append((table.shape[0], count, length))
    assert found == [
        (NEAR_ROWS, 1, ONE), (FAR_ROWS, IDS, ONE), (NEAR_ROWS, IDS, ONE), (NEAR_ROWS, IDS, TEN), (FAR_ROWS, IDS, TEN),
    ]  # fmt: skip


def test_updates_are_of_few_rows_in_bags_of_one_and_ten_and_of_different_rows(timed: list[Timed]) -> None:
    bench()._update(16)
    found = []
    for call in timed:
        [(name, [table], slots, grad, ids, offsets, weights, *rest)] = call.ops
        assert (name, slots, weights) == ("update_rows_", [], None)
        count = ids.numel()
        bags = count if offsets is None else offsets.numel() - 1
        if offsets is not None:
            assert offsets.tolist() == list(range(0, count + 1, TEN))
        assert grad.numel() == bags * 16
        assert not grad.any()
        tables, starts, sizes, grad_starts, strides, means, rule, hyper, steps, seeds, *offset = rest
        assert (tables, starts, sizes, grad_starts, strides) == ([0], [0], [bags], [0], [16])
        assert (means, rule, hyper[0], steps, seeds, offset) == ([0], "sgd", 0.0, [1], [0, 0], [[0], [0]])
        assert call.cold == (table.shape[0] == FAR_ROWS)
        assert bool((table == 1).all())  # a rate of zero: the same work, and the table as it was
        found.append((table.shape[0], count, bags, len(set(ids.tolist())) == count, int(ids.max())))
    assert [(rows, count, bags) for rows, count, bags, _, _ in found] == [
        (NEAR_ROWS, 1, 1), (NEAR_ROWS, IDS, IDS), (NEAR_ROWS, IDS, IDS // 10),
        (NEAR_ROWS, NEAR_ROWS, NEAR_ROWS), (FAR_ROWS, FAR_ROWS, FAR_ROWS),
    ]  # fmt: skip
    few, one, ten, near, far = found
    assert few[4] < 8
    assert one[4] == ten[4] == 15
    assert near[3]
    assert far[3]
    assert near[4] > 0.95 * NEAR_ROWS
    assert far[4] > 0.95 * FAR_ROWS


def test_of_a_table_with_fewer_rows_than_ids_each_is_updated_once(
    timed: list[Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_NEAR_BYTES", 100 * 64)
    bench()._update(16)
    assert sorted(timed[3].ops[0][4].tolist()) == list(range(100))


@pytest.mark.parametrize(("dim", "slots"), [(16, 105), (64, 27)])
def test_rows_are_written_once_then_added_then_picked(dim: int, slots: int, timed: list[Timed]) -> None:
    """An odd number of segments of 2048 rows: all that is read or written is 13 MiB."""
    bench()._place(dim)
    assert [[op[0] for op in call.ops] for call in timed] == [
        ["place_rows_"],
        ["place_rows_"],
        ["pick_rows_"],
    ]
    adds = [[0] * slots, [1] * slots]
    for call, add in itertools.zip_longest(timed, adds):
        out, rows, none, counts, widths, starts, places, strides, *last = call.ops[0][1:]
        if add is None:
            out, rows = rows, out
        assert out.shape == (2048, slots * dim)
        assert rows.numel() == out.numel()
        assert none.numel() == 0
        assert (counts, widths, starts) == ([2048] * slots, [dim] * slots, [-1] * slots)
        assert (places, strides) == (list(range(0, slots * dim, dim)), [slots * dim] * slots)
        assert last == ([] if add is None else [add])
        assert not call.cold


def test_ids_are_routed_for_whole_tables_and_tables_in_two_ranges(timed: list[Timed]) -> None:
    assert bench()._route() == 1.0 / IDS
    [(name, ids, offsets, keys, batches, cuts, ranges, wire, weighted, dtype, names)] = timed[0].ops
    assert (name, keys, batches) == ("route_ids", list(range(8)), [IDS // 16])
    assert (ids.dtype, ids.numel()) == (torch.int64, IDS)
    assert 0 <= int(ids.min()) < 100
    assert 9_900 < int(ids.max()) < 10_000
    assert offsets.tolist() == list(range(0, IDS + 1, 2))
    assert ranges == [1, 2] * 4
    assert cuts == [0, 10_000, 0, 5_000, 10_000] * 4
    assert wire == list(range(12))
    assert (weighted, dtype, names) == (False, torch.int32, ",".join(["f@t"] * 8))


def test_a_copy_is_of_sixteen_mebibytes(timed: list[Timed]) -> None:
    assert bench()._copy() == 1.0 / 2**24


@pytest.mark.parametrize(("size", "duplex"), [(2, True), (2, False), (3, False)])
def test_links_are_the_difference_of_a_large_and_a_small_exchange(
    size: int, duplex: bool, timed: list[Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of next to nothing takes 2 s, one of 4 MiB shared out among the ranks 5 s."""
    own = bench(size)
    sent: list[int] = []

    def all_to_all(name: str, output: Tensor, input: Tensor, outs: list[int], ins: list[int]) -> Any:
        assert outs == ins == [output.numel() // size] * size
        assert output.numel() == input.numel()
        sent.append(4 * outs[0])
        return SimpleNamespace(wait=lambda: None)

    own.group.all_to_all = all_to_all
    seconds = iter([2.0, 5.0])
    monkeypatch.setattr(
        module._Bench,
        "_seconds",
        lambda _, work, *a, **k: (work(), next(seconds))[1],  # type: ignore[misc]
    )
    found = own._links(dataclasses.replace(default_speeds(Topology(size, "cpu")), duplex=duplex))
    assert sent == [64, 4 * (2**20 // size)]
    both = 3.0 / (sent[1] * (size - 1)) / (1 if duplex else 2)
    assert found == pytest.approx({"call": 2.0, "link_in": both, "link_out": both})


def test_new_memory_is_the_median_of_three_and_none_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FRESH_BYTES", 2**20)
    clock(monkeypatch, [5.0, 2.0, 3.0])
    places = []
    real = module.flat_memory

    def recorded(shapes: Any, dtype: Any, device: Any) -> Any:
        made = real(shapes, dtype, device)
        places.append((made[0].data_ptr(), made[0].nbytes))
        return made

    monkeypatch.setattr(module, "flat_memory", recorded)
    own = bench()
    assert own._fresh() == 3.0 / 2**20
    assert len({place for place, _ in places}) == 3
    assert {size for _, size in places} == {2**20}
    assert own.group.barriers == 3


def test_every_second_id_that_is_searched_is_a_hot_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[torch.Tensor] = []
    own = bench()
    own._seconds = lambda work: (found.append(work()), 3.0)[1]
    assert own._hot_id() == 3.0 / module._IDS
    hot = found[0] >= 100 * module._HOT
    assert hot[::2].all()
    assert hot[1::2].float().mean() < 0.1


# ---------------------------------------------------------------------------------------------------- how it is timed


def clock(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> None:
    """A clock by which each measurement takes so long."""

    def ticks() -> Iterator[float]:
        for each in seconds:
            yield 100.0
            yield 100.0 + each

    turns = ticks()
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(turns)))


@pytest.mark.parametrize("cold", [False, True])
def test_a_time_is_the_second_least_after_a_call_that_is_not_timed(cold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, [4.0, 9.0, 1.0, 3.0, 7.0])
    own = bench()
    own.others = SimpleNamespace(mul_=lambda _: events.append("others"))
    own.group.barrier = lambda: events.append("barrier")
    events: list[str] = []
    assert own._seconds(lambda: events.append("work"), 5, cold=cold) == 3.0
    turn = ["others", "barrier", "work"] if cold else ["barrier", "work"]
    assert events == ["work", *turn * 5]


def test_a_time_is_taken_as_often_as_is_said_and_without_other_data(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, [float(k) for k in range(20)])
    own = bench()
    own.others = None  # left alone
    calls: list[int] = []
    assert own._seconds(lambda: calls.append(1)) == 1.0
    assert len(calls) == 1 + module._Bench._seconds.__defaults__[0]
    assert module._Bench._seconds.__defaults__ == (FULL["_REPEATS"],)


def test_other_data_fill_as_many_bytes_as_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FLUSH_BYTES", 4096)
    assert bench().others.nbytes == 4096


def test_speeds_are_the_median_of_passes_and_the_mean_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three passes of 2, 9 and 4 times a rank's number: 4 times the mean of 1, 2 and 3."""
    monkeypatch.setattr(module, "_PASSES", 3)
    names = [*SINGLE, *(f"{name} {dim}" for name in PER_WIDTH for dim in SMALL["WIDTHS"])]  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "_cache", lambda ranks, default: 1000 * ranks)
    monkeypatch.setattr(module._Bench, "_fresh", lambda self: 10.0 * self.group.rank)
    monkeypatch.setattr(module._Bench, "_hot_id", lambda self: 4.0 * self.group.rank)
    handed: list[tuple[Any, ...]] = []

    def fitted(*arguments: Any) -> Speeds:
        handed.append(arguments[4:])
        found: Speeds = arguments[2]
        return found

    monkeypatch.setattr(module, "fitted", fitted)

    def run(group: Group) -> Speeds:
        times = iter([2, 9, 4])
        own = module._Bench(group, torch.device("cpu"), Topology(3, "cpu"))
        place = {name: i for i, name in enumerate(names)}

        def once(_: Speeds) -> dict[str, float]:
            factor = next(times) * (1 + group.rank)
            return {name: factor * (1.0 + place[name]) for name in names}

        own._pass = once  # type: ignore[method-assign]
        return own.speeds()

    first, *others = run_virtual_ranks(3, run)
    assert others == [first, first]
    for name in SINGLE:
        assert getattr(first, name) == pytest.approx(8.0 * (1 + names.index(name)))
    for name in PER_WIDTH:
        wanted = [8.0 * (1 + names.index(f"{name} {dim}")) for dim in (16, 64)]
        assert getattr(first, name) == pytest.approx(wanted)
    assert (first.widths, first.cache, first.fresh, first.hot_id) == ((16, 64), 3000, 10.0, 4.0)
    assert first.origin == f"measured, 3 cpu ranks, torch {torch.__version__}"
    assert handed == [(SMALL["_ROUNDS"], SMALL["_STEPS"])] * 3


def test_what_is_not_measured_keeps_its_default(timed: list[Timed]) -> None:
    """Of a rank alone: links, networks and what whole steps show."""
    default = default_speeds(Topology(1, "cpu"))
    found = bench()._pass(default)
    kept = {name: found[name] for name in SINGLE if name not in ("route", "copy")}
    assert kept == {name: getattr(default, name) for name in kept}
    assert found.keys() == {*SINGLE, *(f"{name} {dim}" for name in PER_WIDTH for dim in (16, 64))}
    assert (found["route"], found["copy"]) == (1.0 / IDS, 1.0 / 2**24)


def test_rates_are_never_below_zero_where_measurements_are_uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing takes longer than a call of nothing: the least that a rate may be."""
    monkeypatch.setattr(module._Bench, "_seconds", lambda *_, **__: 1.0)
    lookup, update = bench()._lookup(16), bench()._update(16)
    tiny = 1e-9 / 480
    assert lookup == pytest.approx({"lookup_bag": 0.0, "lookup_near": 1e-10, "lookup_far": 1e-10}, rel=1e-6)
    assert tiny < 1e-10
    assert update == pytest.approx(
        {"update_id": 1e-10, "update_bag": 0.0, "update_near": 1e-10, "update_far": 1e-10}, rel=1e-6
    )


# ---------------------------------------------------------------------------------------------------- the machine


@pytest.mark.parametrize(
    ("texts", "ranks", "wanted"),
    [
        (("512K", "16M"), 4, 2**19 + 2**22),
        (("2M\n", "3072K\n"), 1, 2**21 + 3 * 2**20),
        (("1000", "64K"), 3, 1000 + 2**16 // 3),
        (("512K", None), 2, 77),
        ((None, "16M"), 2, 77),
    ],
)
def test_a_ranks_cache_is_its_cores_own_and_its_part_of_what_cores_share(
    texts: tuple[str | None, ...], ranks: int, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for level, text in zip((2, 3), texts, strict=True):
        if text is not None:
            (tmp_path / f"index{level}").write_text(text)
    monkeypatch.setattr(module, "_CACHE", str(tmp_path / "index{}"))
    assert module._cache(ranks, 77) == wanted


def test_a_machines_memory_is_what_the_system_says_or_the_default_for_each_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1001}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    found = machine(4)
    assert (found.ddr_cap, found.hbm_cap, found.world_size) == (1001 * 1024, 0, 4)
    assert found.compute_device == "cpu"

    def silent(_: str) -> int:
        raise OSError

    monkeypatch.setattr(os, "sysconf", silent)
    assert machine(4).ddr_cap == DDR_CAP


def test_gpus_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}.__getitem__)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (111, 222))
    found = machine(2, "cuda")
    assert (found.hbm_cap, found.ddr_cap, found.compute_device) == (222, 2_048_000, "cuda")
