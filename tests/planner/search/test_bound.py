"""Averages: what all ranks together have to do, over their number."""

from __future__ import annotations

from dataclasses import replace

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


def test_a_bound_has_the_charges_that_no_plan_avoids_also_of_nine() -> None:
    instance = one_stage([1000, 8, 8], 4)
    uses = np.zeros((3, 1, 9), np.bool_)
    uses[0, 0, :5], uses[1, 0, 4:8] = True, True
    instance = replace(instance, uses=uses, charge=10 ** np.arange(9))
    relaxed = Relaxed(instance)
    sets = kinds_of(relaxed)
    assert [kinds.charge for kinds in sets] == [11_111_111]  # each table has one option, so the ninth is never paid
    assert sets[0].bound(relaxed) == 254 + 11_111_111
