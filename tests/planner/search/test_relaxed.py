"""The relaxation: prices, options that cannot be used, and proofs by memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tilerec.planner.search.instance import Instance
from tilerec.planner.search.relaxed import Relaxed, Resource, least


def test_a_price_finds_the_best_bound_of_one_resource() -> None:
    # Two tables: dear and small, or cheap and large. Room for one large one.
    totals = np.array([[100, 10], [60, 10]])
    used = np.array([[0, 4], [0, 4]])
    dual = least(totals, [Resource(used, 5)])
    # The best plan costs 70; sharing the room as if it were sand, 10 + 60 - 50 / 4.
    assert 57 <= dual.value <= 58
    assert dual.prices[0] > 0
    assert int(used[[0, 1], dual.option].sum()) <= 5


def test_no_price_is_paid_for_what_is_not_scarce() -> None:
    dual = least(np.array([[5, 3]]), [Resource(np.array([[1, 2]]), 100)])
    assert (dual.value, dual.prices, dual.option.tolist()) == (3, (0,), [1])


def test_a_resource_that_cannot_suffice_is_named() -> None:
    totals = np.array([[5, 3], [5, 3]])
    plenty, scarce = Resource(np.ones((2, 2), np.int64), 2), Resource(np.full((2, 2), 7), 13)
    assert least(totals, [plenty, scarce]).short == 1


def test_two_resources_give_a_bound_that_no_choice_is_below() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        totals = rng.integers(1, 1000, (4, 3))
        resources = [Resource(rng.integers(0, 50, (4, 3)), int(rng.integers(60, 150))) for _ in range(2)]
        dual = least(totals, resources)
        grid = np.stack(np.meshgrid(*[range(3)] * 4, indexing="ij"), -1).reshape(-1, 4)
        rows = np.arange(4)
        inside = np.ones(len(grid), np.bool_)
        for r in resources:
            inside &= np.array([r.used[rows, g].sum() for g in grid]) <= r.limit
        costs = np.array([totals[rows, g].sum() for g in grid])
        if inside.any():
            assert dual.value <= costs[inside].min()


def test_a_piece_larger_than_every_rank_makes_its_option_unusable(
    small_instance: Callable[..., Instance],
) -> None:
    instance = small_instance(1)
    relaxed = Relaxed(instance)
    memory = instance.memory.copy()
    memory[0, 1] = 2**50
    assert relaxed.usable[0, 1]
    assert not Relaxed(replace(instance, memory=memory, least_memory=None)).usable[0, 1]


def test_uneven_rows_do_not_help_where_even_ones_are_larger_than_every_rank(
    small_instance: Callable[..., Instance],
) -> None:
    instance = small_instance(1, divisible=True)
    assert instance.divisible.any()
    # Of two shares one is half of the table or more.
    huge = replace(instance, memory=np.where(instance.divisible[:, :, None], 2**50, instance.memory))
    assert not (Relaxed(huge).usable & instance.divisible).any()


def test_a_proof_of_no_plan_names_the_table_or_the_tier_and_the_bytes(
    small_instance: Callable[..., Instance],
) -> None:
    instance = small_instance(1)
    assert Relaxed(instance).impossible() is None
    memory = instance.memory.copy()
    memory[0] = 2**50
    proof = Relaxed(replace(instance, memory=memory, least_memory=None)).impossible()
    assert proof is not None
    assert proof.table == "t0"
    assert proof.short == 2**50 - int(instance.cap.max(0)[proof.tier])
    full = Relaxed(replace(instance, base_memory=instance.cap + 3)).impossible()
    assert full is not None
    assert (full.table, full.short) == (None, 3)


def test_work_on_slow_ranks_counts_as_on_quick_ones(small_instance: Callable[..., Instance]) -> None:
    instance = small_instance(3)
    slow = np.full_like(instance.slow, 1000)
    even = Relaxed(replace(instance, slow=slow))
    slow[0] = 2000
    uneven = Relaxed(replace(instance, slow=slow))
    share = (instance.ranks - 0.5) / instance.ranks
    home = instance.ranks * instance.home  # what every rank does takes each of them as long
    assert np.allclose((uneven.stage_totals - home) * share, even.stage_totals - home, rtol=2e-3, atol=2)


def test_work_at_home_counts_by_the_mean_reach_and_all_ranks_bear_the_least(
    small_instance: Callable[..., Instance],
) -> None:
    instance = small_instance(3)
    even = Relaxed(instance)
    reach = np.full_like(instance.reach, 1000)
    reach[0] = 200
    uneven = Relaxed(replace(instance, reach=reach))
    part = (instance.ranks - 0.8) / instance.ranks
    home = instance.ranks * instance.home
    assert np.allclose(uneven.stage_totals - (even.stage_totals - home), home * part, rtol=2e-3, atol=2)
    assert np.array_equal(uneven.least_home, instance.home // 5)
