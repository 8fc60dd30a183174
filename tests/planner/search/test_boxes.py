"""The certificate: never above the optimum, exact where it can be, and close where pieces are large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tilerec.planner.search.bound import kinds_of
from tilerec.planner.search.boxes import Boxes
from tilerec.planner.search.exact import enumerate_all
from tilerec.planner.search.instance import SHARE, Instance, evaluate
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.solve import solve
from tilerec.planner.search.uneven_rows import flow
from tilerec.planner.search.work import Work

FAR = 1 << 61


def bound_of(instance: Instance, upper: int) -> int:
    relaxed = Relaxed(instance)
    return Boxes(relaxed, kinds_of(relaxed), relaxed.memory).search(upper, Work(10**8))


def one_stage(cost: list[list[int]], width: list[int], pieces: list[int], ranks: int) -> Instance:
    times = np.array(cost)[:, :, None]
    tables = len(cost)
    return Instance(
        [f"t{i}" for i in range(tables)],
        np.tile(np.array(width), (tables, 1)),
        np.tile(np.array(pieces), (tables, 1)),
        times,
        np.zeros_like(times),
        np.zeros((tables, len(width), 1), np.int64),
        np.full((ranks, 1), 1),
        np.zeros(ranks, np.int64),
    )


def test_the_bound_is_never_above_the_optimum(small_instance: Callable[..., Instance]) -> None:
    for seed in range(200, 240):  # 0 to 199: test_search.py
        instance = small_instance(seed)
        best = enumerate_all(Relaxed(instance), FAR, 10**7)
        assert best is not None
        assert best.complete
        if best.option is not None:
            assert bound_of(instance, 2 * best.cost) <= best.cost, seed


def test_one_large_piece_is_a_bound() -> None:
    instance = one_stage([[1000], [8], [8]], [1], [1], 4)
    assert kinds_of(Relaxed(instance))[0].bound(Relaxed(instance)) == 254
    assert 999 <= bound_of(instance, 2000) <= 1000


def test_what_all_ranks_bear_comes_on_top_of_a_piece() -> None:
    # One table of 300 on one of 2 ranks; twenty of 10 everywhere or 30 on one rank. With t of the twenty on single
    # ranks the average is 350 + 5 t, and the rank of the large one bears 300 + (20 - t) * 10: t = 10, 400.
    instance = one_stage([[300, 0]] + [[30, 10]] * 20, [1, 2], [1, 1], 2)
    width = instance.width.copy()
    width[0, 1] = 0
    instance = replace(instance, width=width)
    assert kinds_of(Relaxed(instance))[0].bound(Relaxed(instance)) == 350
    assert 395 <= bound_of(instance, 800) <= 400


def test_what_some_ranks_do_not_bear_at_home_is_not_on_top_of_a_piece() -> None:
    # 100 at home on the first of two ranks alone: the piece of 100 lies on the other.
    instance = one_stage([[100]], [1], [1], 2)
    instance = replace(instance, home=np.full((1, 1, 1), 100), reach=np.array([[1000], [0]]))
    assert bound_of(instance, 300) == 100


def test_charges_that_no_plan_avoids_are_in_the_bound(small_instance: Callable[..., Instance]) -> None:
    instance = small_instance(4)
    charged = replace(instance, uses=np.ones_like(instance.uses), charge=np.array([1000, 500]))
    free = replace(instance, uses=np.zeros_like(instance.uses), charge=np.array([1000, 500]))
    assert bound_of(charged, FAR) == bound_of(free, FAR - 1500) + 1500


def test_no_uneven_split_is_below_the_bound_whatever_its_parts_pay_in_any_case(
    small_instance: Callable[..., Instance],
) -> None:
    """Plans whose rows were poured, and plans with random shares, some of them without rows."""
    draw = np.random.default_rng(0)
    for seed in range(0, 200, 4):
        instance = small_instance(seed, divisible=True)
        part = draw.uniform(0, 1, instance.cost.shape) * instance.divisible[:, :, None]
        instance = replace(instance, fixed=(instance.cost * part).astype(np.int64))
        relaxed = Relaxed(instance)
        best = enumerate_all(relaxed, FAR, 10**7)
        assert best is not None
        if best.option is None:
            continue
        bound = bound_of(instance, 2 * best.cost)
        split = np.flatnonzero(instance.divisible[np.arange(instance.tables), best.option])
        for _ in range(8):
            rows = {}
            for t in split.tolist():
                edges = np.sort(draw.integers(0, SHARE + 1, instance.ranks - 1))
                rows[t] = np.diff(np.concatenate([[0], edges, [SHARE]]))
            assert bound <= evaluate(instance, best.option, best.places, rows).cost, seed
        even = evaluate(instance, best.option, best.places)
        assert bound <= flow(instance, even, 120, Work(10**10)).cost <= best.cost, seed


def test_options_that_no_good_plan_has_do_not_lower_floors() -> None:
    # 300 on one of 4 ranks; and 150 on each, or 700 on one, which is above the limit of the bound: so all ranks
    # bear 150, and one of them 300 more.
    instance = one_stage([[300, 0], [700, 150]], [1, 4], [1, 1], 4)
    width = instance.width.copy()
    width[0, 1] = 0
    instance = replace(instance, width=width)
    assert 449 <= bound_of(instance, 600) <= 450


def test_pieces_that_are_largest_in_different_stages_add_up() -> None:
    # 100 in one stage and nothing in the other, and the other way round, on 4 ranks: 200, wherever they lie.
    instance = one_stage([[100], [100]], [1], [1], 4)
    cost = np.zeros((2, 1, 2), np.int64)
    cost[0, 0, 0] = cost[1, 0, 1] = 100
    two = {
        "shared": np.zeros(2, np.bool_),
        "slow": np.full((4, 2), 1000),
        "reach": np.full((4, 2), 1000),
        "base_cost": np.zeros((4, 2), np.int64),
        "phase": np.arange(2),
    }
    instance = replace(instance, cost=cost, home=np.zeros_like(cost), fixed=np.zeros_like(cost), **two)
    assert bound_of(instance, 400) == 200


def test_a_search_that_goes_on_never_loses_what_it_had(small_instance: Callable[..., Instance]) -> None:
    for seed in range(0, 40, 5):
        relaxed = Relaxed(small_instance(seed))
        boxes = Boxes(relaxed, kinds_of(relaxed), relaxed.memory)
        before = 0
        for dives in (True, False, False):
            now = boxes.search(1 << 40, Work(10**6), dives)
            assert now >= before
            before = now
        assert [c.expected for c in boxes.found] == sorted(c.expected for c in boxes.found)


def test_of_a_phase_the_longest_stage_counts_and_no_plan_is_below_its_bound(
    small_instance: Callable[..., Instance],
) -> None:
    several = 0
    for seed in range(0, 200, 5):
        instance = small_instance(seed)
        instance = replace(instance, phase=np.arange(instance.stages) // 2)
        best = enumerate_all(Relaxed(instance), FAR, 10**7)
        assert best is not None
        if best.option is None:
            continue
        several += len(instance.twins)
        found = evaluate(instance, best.option, best.places)
        charge = found.cost - int(instance.longest(found.stage).sum())
        assert best.cost == found.cost <= int(found.stage.sum()) + charge
        assert bound_of(instance, 2 * best.cost) <= best.cost, seed
        solved = solve(instance)
        assert best.cost <= solved.cost <= best.cost * 1.02, seed
        assert solved.bound <= solved.cost
    assert several > 20
