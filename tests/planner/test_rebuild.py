"""Taking tables out and putting them back: never worse, within caps, and other options where those pay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilerec.planner.instance import Instance, evaluate, fits
from tilerec.planner.pack import Rule, pack
from tilerec.planner.rebuild import Dice, rebuild
from tilerec.planner.relaxed import Relaxed, least


def test_a_rebuilt_plan_is_never_worse_and_within_caps(small_instance: Callable[..., Instance]) -> None:
    better = 0
    for seed in range(40):
        instance = small_instance(seed)
        relaxed = Relaxed(instance)
        found = pack(relaxed, least(relaxed.totals, relaxed.memory).option, Rule.BOTH)
        if found is None:
            continue
        before = int(evaluate(instance, found.option, found.places).stage.sum())
        after = rebuild(relaxed, relaxed.usable, found, 60)
        now = evaluate(instance, after.option, after.places)
        # Loads are floats there: a few ps of rounding.
        assert int(now.stage.sum()) <= before + 10
        assert fits(instance, now.memory)
        assert now.memory.tolist() == after.memory.tolist()
        assert relaxed.usable[np.arange(instance.tables), after.option].all()
        if instance.allowed is not None:
            single = instance.width[np.arange(instance.tables), after.option] == 1
            for t in np.flatnonzero(single).tolist():
                assert instance.allowed[t, list(after.places[t])].all()
        better += int(now.stage.sum()) < before
    assert better > 5


def test_a_large_piece_is_cut_where_that_is_cheaper() -> None:
    # One table of 100 on one rank, or two pieces of 55; three small ones.
    cost = np.array([[100, 55], [20, 20], [20, 20], [20, 20]])[:, :, None]
    instance = Instance(
        list("abcd"),
        np.ones((4, 2), np.int64),
        np.tile(np.array([1, 2]), (4, 1)),
        cost,
        np.zeros_like(cost),
        np.zeros((4, 2, 1), np.int64),
        np.full((2, 1), 1),
        np.zeros(2, np.int64),
    )
    relaxed = Relaxed(instance)
    start = pack(relaxed, np.zeros(4, np.int64), Rule.TIME)
    assert start is not None
    found = rebuild(relaxed, relaxed.usable, start, 200)
    assert found.option[0] == 1
    assert evaluate(instance, found.option, found.places).cost == 95


def test_the_dice_fall_alike_everywhere_and_within_range() -> None:
    dice = Dice(1)
    rolls = [dice.below(6) for _ in range(2000)]
    assert rolls[:8] == [Dice(1).below(6), *rolls[1:8]]
    assert sorted(set(rolls)) == list(range(6))
    assert max(np.bincount(rolls)) < 420
