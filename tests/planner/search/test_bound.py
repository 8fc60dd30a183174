"""Averages: what all ranks together have to do, over their number."""

from __future__ import annotations

import numpy as np

from tilerec.planner.search.bound import averages, kinds_of
from tilerec.planner.search.instance import Instance
from tilerec.planner.search.relaxed import Relaxed


def one_stage(cost: list[int], ranks: int) -> Instance:
    times = np.array(cost)[:, None, None]
    ones = np.ones((len(cost), 1), np.int64)
    names = [f"t{i}" for i in range(len(cost))]
    cap = np.full((ranks, 1), 1)
    return Instance(names, ones, ones, times, times * 0, times * 0, cap, np.zeros(ranks, np.int64))


def test_averages_are_totals_over_ranks() -> None:
    relaxed = Relaxed(one_stage([1000, 8, 8], 4))
    assert averages(relaxed, np.zeros(3, np.int64)).tolist() == [254]
    assert kinds_of(relaxed)[0].bound(relaxed) == 254
