"""Uneven row splits: like water, on ranks that bear little."""

from __future__ import annotations

import numpy as np

from tilerec.planner.search.instance import SHARE, Instance, evaluate
from tilerec.planner.search.level import level
from tilerec.planner.search.work import Work


def lump_and_water(cap: int = 10**9, slow: int = 1000) -> Instance:
    """A lump of 60 on one of 4 ranks, and a table that 4 ranks bear 40 each of, divisible."""
    cost = np.array([60_000, 40_000])[:, None, None]
    speed = np.full((4, 1), 1000)
    speed[3] = slow
    return Instance(
        ["lump", "water"],
        np.array([[1], [4]]),
        np.ones((2, 1), np.int64),
        cost,
        np.zeros_like(cost),
        np.array([0, 1000])[:, None, None],
        np.full((4, 1), cap),
        np.zeros(4, np.int64),
        slow=speed,
        divisible=np.array([[False], [True]]),
    )


def test_water_fills_up_to_one_height() -> None:
    instance = lump_and_water()
    even = evaluate(instance, np.zeros(2, np.int64), [(0,), ()])
    assert even.cost == 100_000
    found = level(instance, even, 8, Work(10**10))
    assert 60_000 <= found.cost <= 60_100
    assert int(found.rows[1].sum()) == SHARE
    assert found.rows[1][0] < SHARE // 1000


def test_a_slow_rank_gets_fewer_rows() -> None:
    instance = lump_and_water(slow=2000)
    found = level(instance, evaluate(instance, np.zeros(2, np.int64), [(0,), ()]), 8, Work(10**10))
    # 160 over ranks 1 and 2 at full speed and rank 3 at half: 64 each in time.
    assert 60_000 <= found.cost <= 64_200
    assert abs(int(found.rows[1][3]) * 2 - int(found.rows[1][1])) < SHARE // 500


def test_memory_limits_a_share() -> None:
    instance = lump_and_water(cap=1200)
    found = level(instance, evaluate(instance, np.zeros(2, np.int64), [(0,), ()]), 8, Work(10**10))
    assert int(found.memory.max()) <= 1200
    assert found.cost < 100_000


def test_what_is_level_already_stays() -> None:
    instance = lump_and_water()
    even = evaluate(instance.take(np.array([1])), np.zeros(1, np.int64), [()])
    assert level(instance.take(np.array([1])), even, 8, Work(10**10)) is even
