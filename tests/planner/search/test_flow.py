"""Rows of all tables poured at once: to where ranks bear least, within caps, never for the worse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tilerec.planner.search.flow import flow
from tilerec.planner.search.instance import SHARE, Instance, evaluate, fits
from tilerec.planner.search.pack import Rule, pack
from tilerec.planner.search.relaxed import Relaxed, least
from tilerec.planner.search.work import Work


def chain(lumps: list[int], cap: int = 10**9) -> Instance:
    """A lump on each of some ranks of one host, and between each two neighbours a table of 40 on each, divisible."""
    ranks = len(lumps)
    cost = np.array([*lumps, *[40_000] * (ranks - 1)])[:, None, None]
    tables = len(cost)
    return Instance(
        [f"t{i}" for i in range(tables)],
        np.ones((tables, 1), np.int64),
        np.array([1] * ranks + [2] * (ranks - 1))[:, None],
        cost,
        np.zeros_like(cost),
        np.array([0] * ranks + [1000] * (ranks - 1))[:, None, None],
        np.full((ranks, 1), cap),
        np.zeros(ranks, np.int64),
        divisible=np.array([False] * ranks + [True] * (ranks - 1))[:, None],
    )


def places(ranks: int) -> list[tuple[int, ...]]:
    return [*((r,) for r in range(ranks)), *((r, r + 1) for r in range(ranks - 1))]


def test_rows_flow_from_table_to_table_until_ranks_are_level() -> None:
    # The last rank has no lump and at most the 80 of its table: (60 + 20 + 20 + 160) / 3 are left for each other.
    instance = chain([60_000, 20_000, 20_000, 0])
    even = evaluate(instance, np.zeros(7, np.int64), places(4))
    assert even.cost == 100_000
    found = flow(instance, even, 300, Work(10**10))
    assert 86_667 <= found.cost <= 86_900
    assert all(int(shares.sum()) == SHARE for shares in found.rows.values())
    assert found.cost == evaluate(instance, found.option, found.places, found.rows).cost


def test_memory_stops_the_flow() -> None:
    free = flow(
        chain([60_000, 0]), evaluate(chain([60_000, 0]), np.zeros(3, np.int64), places(2)), 200, Work(10**10)
    )
    assert int(free.memory.max()) > 1500
    tight = chain([60_000, 0], 1300)
    found = flow(tight, evaluate(tight, np.zeros(3, np.int64), places(2)), 200, Work(10**10))
    assert fits(tight, found.memory)
    assert free.cost < found.cost < 100_000


def test_more_rounds_are_no_worse_than_what_was_found_and_level_plans_stay() -> None:
    instance = chain([10_000, 10_000])
    even = evaluate(instance, np.zeros(3, np.int64), places(2))
    assert flow(instance, even, 100, Work(10**10)) is even
    nothing = replace(instance, divisible=np.zeros_like(instance.divisible))
    assert flow(nothing, even, 100, Work(10**10)) is even


def test_of_random_plans_none_gets_dearer_or_leaves_a_cap(small_instance: Callable[..., Instance]) -> None:
    better = 0
    for seed in range(60):
        instance = small_instance(seed)
        divisible = (instance.pieces > 1) & (instance.width == 1)
        instance = replace(instance, divisible=divisible)
        relaxed = Relaxed(instance)
        option = np.where(divisible.any(1), divisible.argmax(1), least(relaxed.totals, relaxed.memory).option)
        packed = pack(relaxed, option, Rule.BOTH, Work(10**10))
        if packed is None:
            continue
        before = evaluate(instance, packed.option, packed.places)
        after = flow(instance, before, 90, Work(10**10))
        assert fits(instance, after.memory)
        assert after.cost <= before.cost
        assert after.cost == evaluate(instance, after.option, after.places, after.rows).cost
        better += after.cost < before.cost
    assert better > 5
