"""For few tables, no plan that differs in one table is cheaper by its price."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.planner.plan_requests import plan_request, table
from tilerec.planner import decision as decision_module
from tilerec.planner import price_walk
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.decision import Decision, decide
from tilerec.planner.plan_price import PlanPrice, priced
from tilerec.planner.price_walk import walk_downhill
from tilerec.planner.search.exact import ways_of
from tilerec.planner.search.instance import Instance, Solution, evaluate, fits
from tilerec.planner.search.relaxed import Relaxed
from tilerec.spec.topology import Topology

# Half of the samples' sums cross between hosts of one and of three ranks: the search underestimates them.
UNEVEN = Topology(
    4, "cuda", hosts=[[0], [1, 2, 3]], hbm_mem_bw=900 * 2**30 / 1000, intra_host_bw=20 * 2**30 / 1000,
    inter_host_bw=2**30 / 1000, nic="device",
)  # fmt: skip


def without_walk(monkeypatch: pytest.MonkeyPatch) -> Decision:
    """Return the decision of the search alone."""
    with monkeypatch.context() as patch:
        patch.setattr(decision_module, "walk_downhill", lambda _, solution, price, __: (solution, price))
        return decided()


def decided() -> Decision:
    return decide(
        plan_request(
            [table("a", 8_577, 64), table("b", 69_997, 256)],
            UNEVEN,
            batch_size=64,
            constraints={
                "a": ParameterConstraints(pooling_factors=[10.0]),
                "b": ParameterConstraints(pooling_factors=[1.0], batch_sizes=[8], num_poolings=[1.0]),
            },
        )
    )


def price_in(given: Decision) -> Callable[[Solution], PlanPrice]:
    return lambda solution: priced(given.request, replace(given, solution=solution).shardings())


def test_a_plan_of_the_search_that_its_price_does_not_confirm_is_improved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, after = without_walk(monkeypatch), decided()
    assert before.priced is not None
    assert after.priced is not None
    assert after.priced.cost_ps < before.priced.cost_ps * 0.9
    assert after.bound <= after.priced.cost_ps
    assert after.priced.cost_ps == price_in(after)(after.solution).cost_ps


def test_at_its_end_no_way_of_the_last_table_is_cheaper() -> None:
    found = decided()
    assert found.priced is not None
    instance, price = found.instance, price_in(found)
    work = [instance.cost[t, found.option(t)].sum() for t in range(2)]
    last = work.index(min(work))
    ways = ways_of(Relaxed(instance), last, 400)
    assert ways is not None
    for o, places in zip(ways.option.tolist(), ways.places, strict=True):
        option, placed = found.solution.option.copy(), list(found.solution.places)
        option[last], placed[last] = o, places
        other = evaluate(instance, option, placed)
        if fits(instance, other.memory):
            assert price(other).cost_ps >= found.priced.cost_ps


def test_the_number_of_prices_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    start, prices = without_walk(monkeypatch), []
    assert start.priced is not None

    def price(solution: Solution) -> PlanPrice:
        prices.append(solution)
        return price_in(start)(solution)

    monkeypatch.setattr(price_walk, "MOST_PRICED_TABLES", 10)
    walk_downhill(start.instance, start.solution, start.priced, price)
    assert len(prices) == 5
    monkeypatch.setattr(price_walk, "MOST_PIECES", 7)
    assert walk_downhill(start.instance, start.solution, start.priced, price) == (
        start.solution,
        start.priced,
    )
    assert len(prices) == 5


def test_solutions_beyond_a_cap_are_not_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    start = without_walk(monkeypatch)
    assert start.priced is not None
    full: Instance = replace(start.instance, cap=start.solution.memory)

    def price(solution: Solution) -> PlanPrice:
        assert fits(full, solution.memory)
        return price_in(start)(solution)

    walk_downhill(full, start.solution, start.priced, price)
