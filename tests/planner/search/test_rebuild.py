"""Taking tables out and putting them back: never worse, within caps, and other options where those pay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tilerec.planner.search.instance import Instance, evaluate, fits
from tilerec.planner.search.pack import PackingOrder, pack
from tilerec.planner.search.rebuild import Dice, _Rebuild, rebuild
from tilerec.planner.search.relaxed import Relaxed, least
from tilerec.planner.search.uneven_rows import flow
from tilerec.planner.search.work import Work


def test_a_rebuilt_plan_is_never_worse_and_within_caps(small_instance: Callable[..., Instance]) -> None:
    better = 0
    for seed in range(40):
        instance = small_instance(seed)
        relaxed = Relaxed(instance)
        found = pack(relaxed, least(relaxed.totals, relaxed.memory).option, PackingOrder.BOTH, Work(10**10))
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


def test_loads_stay_true_while_tables_go_out_and_come_back(small_instance: Callable[..., Instance]) -> None:
    repeated = 0
    for seed in range(40):
        instance = small_instance(seed)
        relaxed = Relaxed(instance)
        # The option with the most pieces: some share a rank or a host.
        on_host = (instance.width > 1) & (instance.width < instance.ranks)
        pieces = np.where(relaxed.usable, instance.pieces + 100 * on_host, 0)
        found = pack(relaxed, pieces.argmax(1), PackingOrder.BOTH, Work(10**10))
        if found is None:
            continue
        repeated += any(len(set(where)) < len(where) for where in found.places)
        search = _Rebuild(relaxed, relaxed.usable, found, 1, False)
        state = search.state
        link = state.mean[instance.host_of][:, state.shared]
        assert np.allclose(state.load[:, state.shared], link, rtol=1e-12, atol=1.0), seed
        for t in range(instance.tables):
            state.take_out([t])
            if not search._put_back(t):
                break
        else:
            now = evaluate(instance, state.option, state.places)
            # `evaluate` rounds up for slow ranks, and once more for hosts; the slowest rank's home counts for all.
            assert np.abs(state.load.max(0) + state.alike - now.stage).max() <= 1e-9 * now.stage.max() + 20 or (
                np.any(instance.slow != 1000)
            )
            assert (instance.cap - now.memory).tolist() == state.room.tolist()
    assert repeated


def lumps_and_water() -> Instance:
    """Two hosts of two ranks; lumps of 60 and 20 on single ranks, and two tables whose rows a host's ranks share."""
    size = [60, 60, 20, 20, 50, 50]
    width = np.array([[1], [1], [1], [1], [2], [2]])
    cost = np.array(size)[:, None, None] * 1000
    return Instance(
        list("abcdef"),
        width,
        np.ones((6, 1), np.int64),
        cost,
        np.zeros_like(cost),
        np.zeros((6, 1, 1), np.int64),
        np.full((4, 1), 1),
        np.array([0, 0, 1, 1]),
        divisible=width > 1,
    )


def test_tables_that_pour_over_a_host_count_where_it_has_room() -> None:
    instance = lumps_and_water()
    relaxed = Relaxed(instance)
    start = pack(relaxed, np.zeros(6, np.int64), PackingOrder.TIME, Work(10**10))
    assert start is not None
    found = rebuild(relaxed, relaxed.usable, start, 300, 1, True)
    assert found.memory.tolist() == evaluate(instance, found.option, found.places).memory.tolist()
    poured = flow(instance, evaluate(instance, found.option, found.places), 300, Work(10**10))
    # A lump of each kind and one of the tables on each host; evenly split, no arrangement is below 100.
    assert 90_000 <= poured.cost <= 90_200
    even = rebuild(relaxed, relaxed.usable, start, 300, 1)
    assert evaluate(instance, even.option, even.places).cost == 100_000


def test_what_pours_is_never_taken_for_more_than_it_is_evenly_split(
    small_instance: Callable[..., Instance],
) -> None:
    less = 0
    for seed in range(60):
        instance = small_instance(seed)
        on_host = (instance.width > 1) & (instance.width < instance.ranks) & (instance.pieces == 1)
        instance = replace(instance, divisible=on_host)
        relaxed = Relaxed(instance)
        option = np.where(relaxed.usable, instance.pieces + 100 * on_host, 0).argmax(1)
        found = pack(relaxed, option, PackingOrder.BOTH, Work(10**10))
        if found is None:
            continue
        poured, even = (
            _Rebuild(relaxed, relaxed.usable, found, 1, fractional).state.objective() for fractional in (True, False)
        )
        assert poured <= even * (1 + 1e-12) + 1
        less += poured < even - 1
    assert less > 3


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
    start = pack(relaxed, np.zeros(4, np.int64), PackingOrder.TIME, Work(10**10))
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
