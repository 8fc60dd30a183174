"""What is said to be impossible, or above what a plan can cost, against every arrangement there is.

Arrangements are all options, all places, and for divisible options all shares in sixths.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest

from tilerec.planner.search.instance import SHARE, Instance, Ints, Solution, Status, evaluate, fits
from tilerec.planner.search.solve import solve
from tilerec.planner.search.work import Work

SIXTHS = 6


def tight_instance(seed: int, divisible: bool) -> Instance:
    """1 to 3 tables on 2 or 3 ranks, with about as much memory as they need, in one tier or two."""
    rng = np.random.default_rng(seed)
    tables, ranks, tiers = int(rng.integers(1, 4)), int(rng.integers(2, 4)), int(rng.integers(1, 3))
    host_of = np.array([[0] * ranks, [0] * (ranks - 1) + [1]][int(rng.integers(2))])
    # Width, pieces, the part that a piece is, and whether its rows may be uneven.
    kinds = [(1, 1, 1.0, False), (1, 2, 0.5, True), (1, ranks + 1, 1.0 / (ranks + 1), False)]
    kinds += [(ranks, 1, 1.0, False), (ranks, 1, 1.0 / ranks, True)]
    if host_of.max() and ranks == 3:
        kinds.append((2, 1, 0.5, True))
    count = len(kinds)
    there = rng.random((tables, count)) < 0.5
    there[np.arange(tables), rng.integers(0, count, tables)] = True
    part = np.array([kind[2] for kind in kinds])
    bulk = np.exp(rng.normal(0, 0.7, (tables, 1, tiers))) * 1000
    memory = (bulk * part[None, :, None] * rng.uniform(0.9, 1.1, (tables, count, tiers))).astype(np.int64)
    cost = (rng.uniform(100, 2000, (tables, 1, 2)) * part[None, :, None]).astype(np.int64)
    width = np.where(there, [kind[0] for kind in kinds], 0)
    pieces = np.tile([kind[1] for kind in kinds], (tables, 1))
    least = np.where(there[:, :, None], memory * (width * pieces)[:, :, None], 1 << 40).min(1).sum(0)
    cap = least[None] / ranks * rng.uniform(0.85, 1.6, (ranks, tiers)) + rng.integers(0, 400)
    host_cap = None
    if rng.random() < 0.3:
        host_cap = (least * rng.uniform(0.5, 1.2, (int(host_of.max()) + 1, tiers))).astype(np.int64)
    uneven = np.tile([kind[3] for kind in kinds], (tables, 1))
    return Instance(
        [f"t{i}" for i in range(tables)],
        width,
        pieces,
        cost,
        rng.integers(0, 50, cost.shape),
        memory,
        cap.astype(np.int64),
        host_of,
        uses=rng.random((tables, count, 1)) < 0.3,
        charge=rng.integers(0, 300, 1),
        shared=np.array([False, True]),
        host_cap=host_cap,
        base_memory=rng.integers(0, 60, (ranks, tiers)),
        allowed=(rng.random((tables, ranks)) < 0.8) | (np.arange(ranks) == 0) if rng.random() < 0.3 else None,
        divisible=uneven if divisible else np.zeros_like(uneven),
        fixed=cost * uneven[:, :, None] * int(rng.integers(0, 2)) // 3,
    )


def ways(instance: Instance, t: int) -> Iterator[tuple[int, tuple[int, ...], Ints | None]]:
    """All options, places and shares of a table."""
    for o in np.flatnonzero(instance.width[t] > 0).tolist():
        width, pieces = int(instance.width[t, o]), int(instance.pieces[t, o])
        bins = [np.array([r]) for r in range(instance.ranks)] if width == 1 else list(instance.host_ranks)
        numbers = [b for b in range(len(bins)) if len(bins[b]) == width]
        if instance.everywhere(width):
            bins, numbers = [np.arange(instance.ranks)], [0]
        elif instance.allowed is not None:
            numbers = [b for b in numbers if instance.allowed[t, bins[b]].all()]
        if not numbers:
            continue
        repeat, once = divmod(pieces, len(numbers))
        for more in combinations(numbers, once):
            places = () if instance.everywhere(width) else tuple(sorted([*numbers * repeat, *more]))
            yield o, places, None
            parts = width if width > 1 else len(places)
            if (instance.divisible[t, o] and parts > 1 and repeat == 0) or (instance.divisible[t, o] and width > 1):
                for cut in product(range(SIXTHS + 1), repeat=parts - 1):
                    if sum(cut) <= SIXTHS:
                        shares = np.array([SHARE * part // SIXTHS for part in cut], np.int64)
                        yield o, places, np.append(shares, SHARE - shares.sum())


def arrangements(instance: Instance) -> Iterator[Solution]:
    """Every one that is within all caps."""
    for picks in product(*(list(ways(instance, t)) for t in range(instance.tables))):
        option = np.array([o for o, _, _ in picks], np.int64)
        rows = {t: shares for t, (_, _, shares) in enumerate(picks) if shares is not None}
        found = evaluate(instance, option, [places for _, places, _ in picks], rows)
        if fits(instance, found.memory):
            yield found


def number_of_ways(instance: Instance) -> int:
    return int(np.prod([sum(1 for _ in ways(instance, t)) for t in range(instance.tables)]))


@pytest.mark.parametrize("divisible", [False, True])
def test_nothing_that_there_is_is_called_impossible_and_no_plan_is_below_the_bound(divisible: bool) -> None:
    proved = by_trying = planned = 0
    for seed in range(120):
        instance = tight_instance(seed, divisible)
        if number_of_ways(instance) > 150:
            continue
        found = solve(instance, work=Work(10**8))
        least = min((plan.cost for plan in arrangements(instance)), default=None)
        if found.status is Status.NONE_EXISTS:
            assert least is None, seed
            assert found.proof is not None
            proved += 1
            if found.proof.tier < 0:
                by_trying += 1
        elif found.status is Status.FOUND:
            planned += 1
            assert fits(instance, found.memory)
            assert least is None or found.bound <= least, seed
            if not divisible:
                assert least == found.cost == found.bound, seed
        else:
            assert divisible, "all was tried, so it is known"
    assert proved > 3
    assert planned > 5
    assert divisible or by_trying > 2
