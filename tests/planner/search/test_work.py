"""Work: parts of it are spent from the whole, and a search that has little ends with less, not later."""

from __future__ import annotations

from collections.abc import Callable

from tilerec.planner.search.instance import Instance, Status, fits
from tilerec.planner.search.solve import FEW_UNITS as UNITS
from tilerec.planner.search.solve import solve
from tilerec.planner.search.work import Work


def test_what_a_part_spends_is_gone_from_the_whole() -> None:
    whole = Work(100)
    part = whole.part(30)
    part.spend(20)
    assert not part.over
    part.spend(20)
    assert (part.left, whole.left, part.over, whole.over) == (-10, 60, True, False)
    assert whole.part(1000).left == 60


def test_no_search_takes_much_more_than_its_work(planted_instance: Callable[..., Instance]) -> None:
    for tables, ranks in ((12, 4), (40, 8), (300, 64)):
        instance = planted_instance(tables, ranks, 0.9, 0)
        spent = Work(10 * UNITS)
        solve(instance, work=spent)
        assert 10 * UNITS - spent.left <= UNITS * 11 // 10


def test_the_first_plan_that_fits_is_enough_where_no_effort_is_asked_for(
    planted_instance: Callable[..., Instance],
) -> None:
    instance = planted_instance(40, 8, 0.9, 1)
    little, much = Work(UNITS), Work(UNITS)
    first = solve(instance, effort=0, work=little)
    best = solve(instance, work=much)
    assert first.status is best.status is Status.FOUND
    assert fits(instance, first.memory)
    assert first.bound <= best.cost <= first.cost
    assert UNITS - little.left < (UNITS - much.left) // 2
