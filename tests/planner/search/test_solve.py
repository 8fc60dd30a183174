"""The search: the optimum where all can be tried, caps that hold, answers that do not depend on order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tilerec.planner.search.bound import kinds_of
from tilerec.planner.search.boxes import Boxes, Choice
from tilerec.planner.search.exact import enumerate_all
from tilerec.planner.search.instance import Instance, Solution, Status, evaluate, fits
from tilerec.planner.search.pack import Packing
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.solve import _Search, solve
from tilerec.planner.search.work import Work

FAR = 1 << 61


def check(instance: Instance, found: Solution) -> None:
    """The solution is what it says it is."""
    again = evaluate(instance, found.option, found.places, found.rows)
    assert again.cost == found.cost
    assert fits(instance, found.memory)
    assert found.bound <= found.cost
    for t, (o, places) in enumerate(zip(found.option.tolist(), found.places, strict=True)):
        width, pieces = int(instance.width[t, o]), int(instance.pieces[t, o])
        assert width > 0
        if instance.everywhere(width):
            assert places == ()
            continue
        assert len(places) == pieces
        bins = instance.ranks if width == 1 else int((instance.host_sizes == width).sum())
        if instance.allowed is None:
            assert len(set(places)) == min(pieces, bins)
        elif width == 1:
            assert instance.allowed[t, list(places)].all()


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_small_instances_are_solved_to_the_optimum_and_the_bound_is_not_above_it(
    first: int, small_instance: Callable[..., Instance]
) -> None:
    for seed in range(first, first + 20):
        instance = small_instance(seed)
        relaxed = Relaxed(instance)
        best = enumerate_all(relaxed, FAR, 10**7)
        assert best is not None
        assert best.complete
        found = solve(instance)
        if best.option is None:
            assert found.status is Status.NONE_EXISTS
            continue
        check(instance, found)
        assert found.cost == found.bound == best.cost, seed
        # The certificate alone, without the enumeration.
        assert Boxes(relaxed, kinds_of(relaxed), relaxed.memory).search(2 * best.cost, Work(10**8)) <= best.cost, seed


@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_uneven_rows_are_never_worse_and_the_bound_stays_below(
    seed: int, small_instance: Callable[..., Instance]
) -> None:
    even, uneven = solve(small_instance(seed)), solve(small_instance(seed, divisible=True))
    if even.status is not Status.FOUND:
        return
    check(small_instance(seed, divisible=True), uneven)
    assert uneven.cost <= even.cost


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_memory_that_is_nearly_full_is_no_obstacle(
    seed: int, splits: bool, planted_instance: Callable[..., Instance]
) -> None:
    instance = planted_instance(26, 8, 0.97, seed, splits)
    found = solve(instance)
    assert found.status is Status.FOUND
    check(instance, found)


def middling(seed: int = 0, slow: bool = False) -> Instance:
    """60 tables on 16 ranks of 4 hosts."""
    rng = np.random.default_rng(seed)
    tables, ranks = 60, 16
    weight = np.exp(rng.normal(0, 1.5, (tables, 1, 3))) * rng.uniform(0.5, 1.5, (tables, 1, 3)) * 1e7
    width = np.array([ranks, 1, 1, 1, ranks, 4, 4])
    pieces = np.array([1, 1, 2, 4, 1, 1, 2])
    part = 1 / np.maximum(width * pieces, 1) * np.array([2.0, 1, 1.05, 1.1, 1.5, 1.2, 1.25])
    cost = (weight * part[None, :, None]).astype(np.int64)
    memory = np.exp(rng.normal(0, 1, (tables, 1))) * 1e9 / (width * pieces)
    memory[:, 0] *= ranks
    total = memory[:, 1].sum()
    divisible = np.zeros((tables, 7), np.bool_)
    divisible[:, 4] = slow
    speed = np.full((ranks, 3), 1000)
    if slow:
        speed[:4] = 1400
    return Instance(
        [f"t{i:03d}" for i in rng.permutation(tables)],
        np.tile(width, (tables, 1)),
        np.tile(pieces, (tables, 1)),
        cost,
        (weight * 0.01 * np.ones((1, 7, 1))).astype(np.int64),
        memory.astype(np.int64)[:, :, None],
        np.full((ranks, 1), int(total / ranks / 0.8)),
        np.arange(ranks) // 4,
        shared=np.array([False, True, False]),
        slow=speed,
        divisible=divisible,
    )


@pytest.mark.parametrize("seed", range(2))
def test_plans_of_a_cluster_are_close_to_the_bound(seed: int) -> None:
    instance = middling(seed)
    found = solve(instance)
    assert found.status is Status.FOUND
    check(instance, found)
    assert found.gap < 0.12


def test_a_slow_host_gets_less_work() -> None:
    instance = middling(1, slow=True)
    found = solve(instance)
    check(instance, found)
    assert found.gap < 0.1
    option = found.option
    work = evaluate(replace(instance, slow=np.full_like(instance.slow, 1000)), option, found.places, found.rows).load
    slow_host, others = work[:4, [0, 2]].sum(), work[4:, [0, 2]].sum() / 3
    assert slow_host < 0.9 * others


def test_the_order_of_tables_does_not_matter_nor_what_was_solved_before() -> None:
    instance = middling(2)
    order = np.random.default_rng(0).permutation(instance.tables)
    one, other = solve(instance), solve(instance.take(order))
    assert one.cost == other.cost
    assert one.option[order].tolist() == other.option.tolist()
    assert [one.places[t] for t in order] == list(other.places)


def test_exchanges_end_no_earlier_where_a_charge_is_paid() -> None:
    rng = np.random.default_rng(2)
    one, cost = np.ones((60, 1), np.int64), rng.integers(100_000, 200_000, (60, 1, 3))
    instance = Instance(
        [f"t{t:02d}" for t in range(60)],
        one,
        one,
        cost,
        np.zeros_like(cost),
        np.zeros((60, 1, 1), np.int64),
        np.ones((8, 1), np.int64),
        np.zeros(8, np.int64),
    )
    charged = replace(instance, uses=np.ones((60, 1, 1), np.bool_), charge=np.array([10**7]))
    assert solve(charged).cost <= solve(instance).cost + 10**7


def test_smaller_pieces_are_tried_before_a_search_gives_up() -> None:
    # 12 tables of 6 bytes on 8 ranks of 10: whole ones do not fit, halves do. Packing whole ones takes all the work.
    pieces = np.tile(np.array([1, 2]), (12, 1))
    cost = np.tile(np.array([100, 60]), (12, 1))[:, :, None]
    instance = Instance(
        [f"t{t:02d}" for t in range(12)],
        np.ones((12, 2), np.int64),
        pieces,
        cost,
        np.zeros_like(cost),
        6 // pieces[:, :, None],
        np.full((8, 1), 10),
        np.zeros(8, np.int64),
    )
    found = solve(instance, work=Work(1))
    assert found.status is Status.FOUND
    assert fits(instance, found.memory)


def test_rows_are_poured_where_that_is_expected_to_be_better_however_dear_even_ones_are() -> None:
    # A lump of 50 on one of two ranks, 10 on the other, and rows over both: 90 if they are even, 70 if poured.
    width, cost = np.array([[1], [1], [2]]), np.array([50_000, 10_000, 40_000])[:, None, None]
    instance = Instance(
        ["a", "b", "c"],
        width,
        np.ones((3, 1), np.int64),
        cost,
        np.zeros_like(cost),
        np.zeros_like(cost),
        np.ones((2, 1), np.int64),
        np.zeros(2, np.int64),
        divisible=width == 2,
    )
    option, places = np.zeros(3, np.int64), [(0,), (1,), ()]
    search = _Search(instance, 1, None)
    search.best = replace(evaluate(instance, option, places), cost=72_000)
    packing = Packing(option, places, np.zeros((2, 1), np.int64))
    assert search._offer(packing, 70_000) < 70_500
    assert search.cost < 70_500


@pytest.mark.parametrize(("large", "average", "in_vain"), [
    (True, 1000, True), (True, 976, True), (True, 975, False), (True, 1001, False), (False, 1000, False),
])  # fmt: skip
def test_coarser_options_of_large_searches_are_packed_if_they_may_gain(
    large: bool, average: int, in_vain: bool
) -> None:
    """The best plan costs 100 more than the average of its options; coarser ones have to save a quarter of that."""
    search = _Search(middling(), 1, None)
    search.large, search.average = large, 1000
    search.best = replace(solve(search.instance, work=Work(1)), cost=1100)
    assert search._in_vain(Choice(np.zeros(0, np.int64), average, average)) == in_vain


def test_a_fixed_charge_turns_a_decision() -> None:
    width, pieces = np.array([[1, 2]] * 4), np.ones((4, 2), np.int64)
    cost = np.array([[[100], [60]]] * 4)
    uses = np.zeros((4, 2, 1), np.bool_)
    uses[:, 0] = True

    def cost_with(charge: int) -> Solution:
        return solve(
            Instance(
                ["a", "b", "c", "d"],
                width,
                pieces,
                cost,
                np.zeros_like(cost),
                np.zeros((4, 2, 1), np.int64),
                np.full((2, 1), 1),
                np.zeros(2, np.int64),
                uses=uses,
                charge=np.array([charge]),
            )
        )

    assert cost_with(30).option.tolist() == [0] * 4  # 200 + 30
    assert cost_with(50).option.tolist() == [1] * 4  # 240


def test_what_cannot_be_is_proved_and_what_was_not_found_is_not_called_impossible(
    planted_instance: Callable[..., Instance],
) -> None:
    instance = planted_instance(26, 8, 0.97, 0)
    short = solve(replace(instance, cap=instance.cap * 9 // 10))
    assert short.status is Status.NONE_EXISTS
    assert short.proof is not None
    held = int((instance.memory[:, :, 0] * instance.pieces).min(1).sum())
    assert short.proof.short == held - int((instance.cap * 9 // 10).sum())
    # Nine tables of 0.6 on eight ranks: no plan, and no proof by sums.
    memory = np.full((9, 1, 1), 6)
    whole = np.ones((9, 1), np.int64)
    packed = solve(
        Instance(
            [str(i) for i in range(9)],
            whole,
            whole,
            memory,
            np.zeros_like(memory),
            memory,
            np.full((8, 1), 10),
            np.zeros(8, np.int64),
        )
    )
    assert packed.status is Status.NONE_FOUND
    assert packed.proof is None


def test_one_rank_and_no_tables_are_plans_too() -> None:
    one = solve(
        Instance(
            ["a"],
            np.array([[1]]),
            np.array([[1]]),
            np.array([[[5, 6]]]),
            np.array([[[1, 0]]]),
            np.array([[[3]]]),
            np.array([[3]]),
            np.zeros(1, np.int64),
        )
    )
    assert (one.status, one.cost, one.bound, one.places) == (Status.FOUND, 12, 12, ((0,),))
    none = solve(
        Instance(
            [],
            np.zeros((0, 1), np.int64),
            np.zeros((0, 1), np.int64),
            np.zeros((0, 1, 2), np.int64),
            np.zeros((0, 1, 2), np.int64),
            np.zeros((0, 1, 1), np.int64),
            np.full((2, 1), 3),
            np.zeros(2, np.int64),
        )
    )
    assert (none.status, none.cost, none.places) == (Status.FOUND, 0, ())


def test_one_table_whole_instead_of_split_may_move_all_others() -> None:
    # 9 split is the cheapest on average, 1 alone split the best: no exchange, and no few tables taken out, lead there.
    whole = np.array([20, 150, 110, 20, 70, 30, 80, 20, 70, 110, 80, 60, 30, 30]) * 1000
    everywhere = np.array([10, 34, 30, 10, 40, 20, 34, 10, 20, 13, 80, 20, 10, 20]) * 1000
    cost = np.stack([whole, everywhere], 1)[:, :, None]
    instance = Instance(
        [f"t{i:02d}" for i in range(14)],
        np.tile(np.array([1, 8]), (14, 1)),
        np.ones((14, 2), np.int64),
        cost,
        np.zeros_like(cost),
        np.zeros_like(cost),
        np.full((8, 1), 1),
        np.zeros(8, np.int64),
    )
    option = np.eye(14, dtype=np.int64)[1]
    lpt = [(5,), (), (1,), (4,), (4,), (7,), (0,), (7,), (5,), (2,), (3,), (6,), (6,), (7,)]
    found = solve(instance)
    check(instance, found)
    assert found.cost <= evaluate(instance, option, lpt).cost
