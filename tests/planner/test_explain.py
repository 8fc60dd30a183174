"""Why a table is cut as it is."""

from __future__ import annotations

import pytest

from tests.planner.asked import asked
from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.decision import decide
from tilerec.planner.explain import explain
from tilerec.planner.infeasible import PlannerError
from tilerec.planner.planner import make_plan
from tilerec.spec.plan import ParameterSharding, ShardingPlan
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

ROWS = {f"t{i}": 500 * 3**i for i in range(8)}


@pytest.mark.parametrize("topology", [Topology(4), Topology(8, local_world_size=4)], ids=str)
def test_the_chosen_way_costs_what_the_plan_costs(topology: Topology) -> None:
    request = asked(ROWS, topology, batch_size=4096)
    cost = decide(request).solution.cost
    for name in ROWS:
        found = explain(request, name)
        assert found.table == f"ebc.{name}"
        assert found.chosen.chosen
        assert found.chosen.step_ps == found.step_ps == cost
        assert len({way.option for way in found.considered}) == len(found.considered) > 4


def test_no_way_that_fits_is_much_better_than_the_plan() -> None:
    request = asked(ROWS, Topology(4), batch_size=4096)
    decision = decide(request)
    for name in ROWS:
        best = min(way.step_ps for way in explain(request, name).considered if way.allowed and not way.short)
        assert best >= decision.solution.bound


def test_ways_that_constraints_rule_out_are_shown_as_such() -> None:
    limits = {
        "t5": ParameterConstraints(["row_wise"], min_partition=64),
        "t6": ParameterConstraints(max_ranks=1),
    }
    request = asked(ROWS, Topology(4), limits)
    t5 = explain(request, "ebc.t5")
    assert {way.option for way in t5.considered if way.allowed} == {"rows x 2", "rows x 3", "rows over 4 ranks"}
    assert "whole" in {way.option for way in t5.considered if not way.allowed}
    assert "not allowed by its constraints" in str(t5)
    t6 = explain(request, "t6")
    assert [way.option for way in t6.considered if way.allowed] == ["whole"]
    assert "whole is all that its constraints allow" in str(t6)


def test_ways_that_do_not_fit_say_by_how_much() -> None:
    request = asked({"a": 400_000, "b": 100}, Topology(4, hbm_cap=64 * 2**20))
    found = explain(request, "a")
    whole = next(way for way in found.considered if way.option == "whole")
    assert whole.short > 30 * 2**20
    assert "does not fit: " in str(found)


def test_tables_with_others_and_with_uneven_rows_are_noted() -> None:
    limits = {"t1": ParameterConstraints(with_table="t0")}
    assert "It lies with 't0'" in str(explain(asked(ROWS, Topology(4), limits), "t1"))


def test_what_cannot_be_explained_is_refused() -> None:
    pin = {"t0": ParameterConstraints(sharding=ParameterSharding("row_wise"))}
    with pytest.raises(ConfigError, match=r"Table 'ebc.t0' was given by hand"):
        explain(asked(ROWS, Topology(2), pin), "t0")
    with pytest.raises(ConfigError, match=r"There is no table 'x'; there are \['ebc.t0'"):
        explain(asked(ROWS, Topology(2)), "x")
    with pytest.raises(PlannerError):
        explain(asked(ROWS, Topology(2, hbm_cap=2**20)), "t0")


@pytest.mark.parametrize("others", [{}, {"b": 100_000}])
def test_rows_over_more_ranks_than_there_are_rows_are_explained_too(others: dict[str, int]) -> None:
    limits = {"a": ParameterConstraints(["row_wise"]), "b": ParameterConstraints(["row_wise"])}
    limits = {name: limits[name] for name in ("a", *others)}
    found = explain(asked({"a": 1, **others}, Topology(4), limits), "a")
    assert found.chosen.chosen
    assert found.chosen.option == "rows over 4 ranks"
    assert "Ways that its constraints rule out were not considered." in str(found)


def test_an_explanation_knows_its_plan() -> None:
    request = asked({"a": 1000, "b": 100_000}, Topology(2))
    plan = make_plan(request)
    found = explain(request, "a")
    assert found.is_in(plan)
    tiling = Tiling.of("a", 1000, 64, [(0, 999, 0, 64, 0), (999, 1000, 0, 64, 1)])
    assert not found.is_in(plan.replaced("ebc", "a", ParameterSharding("explicit", tiling=tiling)))
    assert not found.is_in(ShardingPlan({}))
