"""Enumeration: against a plain loop over all arrangements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tilerec.planner.search.exact import enumerate_all, ways_of
from tilerec.planner.search.instance import Instance, evaluate, fits
from tilerec.planner.search.relaxed import Relaxed

FAR = 1 << 61
TWO_TABLES = (11, 14, 23, 27, 30, 34)  # seeds


def by_hand(instance: Instance) -> int:
    relaxed = Relaxed(instance)
    ways = [ways_of(relaxed, t, 1000) for t in range(instance.tables)]
    best = FAR
    for pick in product(*(range(len(w.option)) for w in ways if w is not None)):
        option = np.array([w.option[i] for w, i in zip(ways, pick, strict=True) if w is not None])
        found = evaluate(instance, option, [w.places[i] for w, i in zip(ways, pick, strict=True) if w is not None])
        if found.cost < best and fits(instance, found.memory):
            best = found.cost
    return best


@pytest.mark.parametrize("seed", TWO_TABLES)
@pytest.mark.parametrize("reached", [False, True])
def test_the_optimum_is_that_of_a_plain_loop(seed: int, reached: bool, small_instance: Callable[..., Instance]) -> None:
    instance = small_instance(seed)
    if reached:  # much work at home, that ranks bear unlike parts of
        reach = np.random.default_rng(seed).integers(0, 1000, instance.reach.shape)
        instance = replace(instance, reach=reach, home=instance.home * 20)
    found = enumerate_all(Relaxed(instance), FAR, 10**7)
    assert found is not None
    assert found.complete
    assert found.cost == by_hand(instance)


def test_nothing_below_the_cost_that_is_known_is_an_answer(small_instance: Callable[..., Instance]) -> None:
    relaxed = Relaxed(small_instance(5))
    first = enumerate_all(relaxed, FAR, 10**7)
    assert first is not None
    again = enumerate_all(relaxed, first.cost, 10**7)
    assert again is not None
    assert again.complete
    assert again.option is None


def test_a_budget_that_runs_out_is_told(small_instance: Callable[..., Instance]) -> None:
    found = enumerate_all(Relaxed(small_instance(5)), FAR, 20)
    assert found is not None
    assert not found.complete


def test_more_ways_than_allowed_are_not_tried(small_instance: Callable[..., Instance]) -> None:
    assert enumerate_all(Relaxed(small_instance(5)), FAR, 10**7, ways_at_most=2) is None
