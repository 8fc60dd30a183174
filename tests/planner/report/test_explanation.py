"""Why a table is cut as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.planner.plan_requests import plan_request, table
from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.ways import MIN_PARTITION
from tilerec.planner.cost.workload import Skew
from tilerec.planner.decision import decide
from tilerec.planner.make_plan import make_plan
from tilerec.planner.planner_error import PlannerError
from tilerec.planner.report.explanation import Explainer, explain
from tilerec.planner.request import PlanRequest
from tilerec.planner.table_limits import limits_of_tables
from tilerec.spec.plan import ParameterSharding, ShardingPlan, ShardingType
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

ROWS = {f"t{i}": 500 * 3**i for i in range(8)}


@pytest.mark.parametrize("topology", [Topology(4), Topology(8, local_world_size=4)], ids=str)
def test_the_chosen_way_costs_what_the_plan_costs(topology: Topology) -> None:
    request = plan_request(ROWS, topology, batch_size=4096)
    cost = decide(request).priced.cost_ps
    explainer = Explainer(request)
    for name in ROWS:
        found = explainer.explanation(f"ebc.{name}")
        assert found.table == f"ebc.{name}"
        assert found.chosen.chosen
        assert found.chosen.step_ps == found.step_ps == cost
        assert len({way.option for way in found.considered}) == len(found.considered) > 4


@pytest.mark.parametrize("hosts", [[[0, 1, 2], [3]], [[0, 1], [2, 3]]])
def test_a_way_takes_at_home_what_the_report_says_on_hosts_of_any_size(hosts: list[list[int]]) -> None:
    request = plan_request(ROWS, Topology(4, "cpu", hosts=hosts), batch_size=4096)
    entries = {entry.name: entry for entry in make_plan(request).report.tables}
    explainer = Explainer(request)
    for name in ROWS:
        assert explainer.explanation(f"ebc.{name}").chosen.home_ps == sum(entries[name].home_ps)


def test_no_way_that_fits_is_much_better_than_the_plan() -> None:
    request = plan_request(ROWS, Topology(4), batch_size=4096)
    decision, explainer = decide(request), Explainer(request)
    for name in ROWS:
        considered = explainer.explanation(f"ebc.{name}").considered
        best = min(way.step_ps for way in considered if way.allowed and not way.short)
        assert best >= decision.bound


def reasons(request: PlanRequest, name: str) -> dict[str, str]:
    """What rules each way out; "" for open ways."""
    return {way.option: way.ruled_out for way in explain(request, name).considered}


def test_a_type_that_the_constraints_leave_out_rules_ways_out() -> None:
    limits = {"t5": ParameterConstraints(["row_wise"], min_partition=64)}
    found = reasons(plan_request(ROWS, Topology(4), limits), "t5")
    assert {option for option, why in found.items() if not why} == {
        "rows x 2",
        "rows x 3",
        "rows over 4 ranks",
    }
    assert found["whole"] == found["copies over 4 ranks"] == "its sharding_types are row_wise"
    limits = {"t5": ParameterConstraints(forbidden_types=["row_wise"])}
    found = reasons(plan_request(ROWS, Topology(4), limits), "t5")
    assert found["rows x 2"] == "its forbidden_types are row_wise"
    assert not found["whole"]
    limits = {"t5": ParameterConstraints(["row_wise", "table_wise"], forbidden_types=["row_wise"])}
    found = reasons(plan_request(ROWS, Topology(4), limits), "t5")
    assert found["rows x 2"] == "its forbidden_types are row_wise"
    assert found["copies over 4 ranks"] == "its sharding_types are row_wise, table_wise"


def test_narrow_column_tiles_are_ruled_out_by_min_partition_and_not_by_constraints() -> None:
    narrow = [table("a", dim=16), table("b", dim=64)]
    found = reasons(plan_request(narrow, Topology(4)), "a")
    for pieces in (2, 4):
        assert found[f"columns x {pieces}"] == (
            f"column tiles of {16 // pieces} are narrower than min_partition, {MIN_PARTITION} columns by default"
        )
    text = str(explain(plan_request(narrow, Topology(4)), "a"))
    assert "constraints" not in text
    # With a smaller least width the same ways are open; with a larger one the reason names it.
    free = {"a": ParameterConstraints(min_partition=8)}
    found = reasons(plan_request(narrow, Topology(4), free), "a")
    assert found["columns x 2"] == ""
    assert found["columns x 4"] == "column tiles of 4 are narrower than min_partition, 8 columns"
    free = {"a": ParameterConstraints(min_partition=8, sharding_types=["column_wise"])}
    assert decide(plan_request(narrow, Topology(4), free)).found


@pytest.mark.parametrize(
    ("kind", "topology", "simpler", "option", "most"),
    [
        ("column_wise", Topology(4), "table_wise", "columns x 2", 4),
        ("table_column_wise", Topology(8, local_world_size=4), "table_wise", "columns x 2", 4),
        ("grid_shard", Topology(6, local_world_size=2), "table_row_wise", "grid x 2 over 2 ranks", 3),
    ],
)
def test_a_type_that_no_column_split_is_wide_enough_for_comes_down_to_a_simpler_one(
    kind: str, topology: Topology, simpler: str, option: str, most: int
) -> None:
    limits = {"a": ParameterConstraints([kind])}
    request = plan_request([table("a", dim=16), table("b", dim=64)], topology, limits)
    why = reasons(request, "a")[option]
    assert why.startswith(
        f"{kind} reduces to {simpler} here: no split of its 16 columns into 2 to {most} even tiles leaves "
        f"{MIN_PARTITION} columns by default in each"
    )
    assert limits_of_tables(request, {})["ebc.a"].types == (ShardingType(simpler),)
    assert reasons(request, "a")["copies over " + str(topology.world_size) + " ranks"] == (
        f"its sharding_types are {kind}"
    )


def test_ranks_and_hosts_rule_out_ways_that_take_more() -> None:
    topology = Topology(8, local_world_size=4)
    found = reasons(plan_request(ROWS, topology, {"t6": ParameterConstraints(ranks="0-2")}), "t6")
    assert found["rows over 8 ranks"] == "it takes all 8 ranks, but the table may only use ranks 0-2"
    assert found["rows over 4 ranks"] == "it takes all 4 ranks of a host, but the table may only use ranks 0-2"
    assert found["rows x 2"] == ""
    found = reasons(plan_request(ROWS, topology, {"t6": ParameterConstraints(hosts=[1])}), "t6")
    assert found["copies over 8 ranks"] == "it takes all 8 ranks, but the table may only use ranks 4-7"
    assert found["rows over 4 ranks"] == ""


def test_max_ranks_rules_out_ways_on_more_ranks() -> None:
    found = explain(plan_request(ROWS, Topology(4), {"t6": ParameterConstraints(max_ranks=1)}), "t6")
    assert {way.option for way in found.considered if way.allowed} == {"whole"}
    why = {way.option: way.ruled_out for way in found.considered}
    assert why["columns x 2"] == "it takes 2 ranks, and max_ranks is 1"
    assert why["copies over 4 ranks"] == "it takes 4 ranks, and max_ranks is 1"
    assert "whole is the only allowed option; every other one is ruled out." in str(found)


def test_several_restrictions_are_all_named() -> None:
    limits = {"a": ParameterConstraints(["table_wise"], max_ranks=1)}
    found = reasons(plan_request([table("a", dim=32)], Topology(2), limits), "a")
    assert found["columns x 2"] == (
        "its sharding_types are table_wise; column tiles of 16 are narrower than min_partition, 32 columns by default; "
        "it takes 2 ranks, and max_ranks is 1"
    )


def test_a_table_that_lies_with_another_obeys_its_restrictions_too() -> None:
    limits = {"t1": ParameterConstraints(with_table="t0"), "t0": ParameterConstraints(["table_wise"])}
    request = plan_request(ROWS, Topology(4), limits)
    found = explain(request, "t1")
    assert found.together == ("ebc.t0",)
    why = {way.option: way.ruled_out for way in found.considered}
    assert why["rows x 2"] == "of 'ebc.t0', which is co-located with it: its sharding_types are table_wise"
    assert found.chosen.step_ps == decide(request).priced.cost_ps
    assert "It is co-located with 'ebc.t0' (with_table)" in str(found)


def test_one_rank_leaves_one_way() -> None:
    assert "whole is the only option on these machines." in str(explain(plan_request(ROWS, Topology(1)), "t0"))


def random_request(seed: int) -> PlanRequest:
    """A few tables with any constraints on a few ranks."""
    draw = np.random.default_rng(seed)
    topology = (
        Topology(4), Topology(6, local_world_size=3), Topology(8, local_world_size=4), Topology(3, local_world_size=1),
        Topology(5, hosts=[[0, 1, 2], [3, 4]]),
    )[seed % 5]  # fmt: skip
    if seed % 3 == 0:
        topology = replace(topology, hbm_cap=48 * 2**20)
    types = [
        "data_parallel",
        "table_wise",
        "column_wise",
        "row_wise",
        "table_row_wise",
        "table_column_wise",
        "grid_shard",
    ]
    tables, limits = [], {}
    for i in range(5):
        tables.append(table(f"t{i}", int(draw.integers(1, 60_000)), int(draw.choice([4, 16, 48, 64, 128]))))
        said: dict[str, Any] = {}
        if draw.random() < 0.4:
            said["sharding_types"] = ["table_wise", *draw.choice(types, 2, replace=False).tolist()]
        if draw.random() < 0.3:
            said["forbidden_types"] = draw.choice([t for t in types if t != "table_wise"], 2, replace=False).tolist()
        if draw.random() < 0.3:
            said["min_partition"] = int(draw.choice([1, 8, 64]))
        if draw.random() < 0.3:
            said["ranks"] = sorted(draw.choice(topology.world_size, 2, replace=False).tolist())
        elif draw.random() < 0.3:
            said["max_ranks"] = int(draw.integers(1, 4))
        elif i and draw.random() < 0.3:
            said["with_table"] = f"t{i - 1}"
        if said:
            limits[f"t{i}"] = ParameterConstraints(**said)
    return plan_request(tables, topology, limits, batch_size=256)


@pytest.mark.parametrize("seed", range(25))
def test_ways_are_ruled_out_exactly_where_the_search_could_not_take_them(seed: int) -> None:
    request = random_request(seed)
    decision = decide(request)
    if not decision.found:
        return
    topology, instance = request.topology, decision.instance
    place = {str(option): o for o, option in enumerate(decision.problem.options)}
    explainer = Explainer(request)
    assert explainer.step_ps == decision.priced.cost_ps
    for key in explainer.tables:
        found = explainer.explanation(key)
        row = int(decision.row[decision.problem.instance.names.index(key)])
        for way in found.considered:
            o = place.get(way.option)
            open_ = o is not None and bool(instance.there[row, o])
            if open_ and 1 < way.width < topology.world_size and instance.allowed is not None:
                hosts = [host for host in topology.host_ranks if len(host) == way.width]
                open_ = any(instance.allowed[row, list(host)].all() for host in hosts)
            assert way.allowed == (open_ or way.chosen), (key, way)
            if way.allowed and not way.short:
                # It is a plan within the same limits: none of these is below the bound.
                assert way.step_ps >= decision.bound
        assert found.chosen.step_ps == decision.priced.cost_ps
        assert not found.chosen.short


def test_ways_that_do_not_fit_say_by_how_much() -> None:
    request = plan_request({"a": 400_000, "b": 100}, Topology(4, hbm_cap=64 * 2**20))
    found = explain(request, "a")
    whole = next(way for way in found.considered if way.option == "whole")
    assert whole.short > 30 * 2**20
    assert "does not fit: " in str(found)


def test_a_way_that_does_not_fit_would_fill_a_rank_beyond_its_cap() -> None:
    request = plan_request({"a": 400_000, "b": 100}, Topology(4, hbm_cap=64 * 2**20))
    found = explain(request, "a")
    whole = next(way for way in found.considered if way.option == "whole")
    forced = plan_request({"a": 400_000, "b": 100}, Topology(4, hbm_cap=64 * 2**20 + whole.short + 2**16))
    assert decide(forced.with_constraint("ebc.a", sharding_types=["table_wise"], enforce_hbm=True)).found
    less = plan_request({"a": 400_000, "b": 100}, Topology(4, hbm_cap=64 * 2**20 + whole.short - 2**22))
    assert not decide(less.with_constraint("ebc.a", sharding_types=["table_wise"], enforce_hbm=True)).found


def test_the_sentence_is_about_the_best_of_the_other_open_ways() -> None:
    request = plan_request(ROWS, Topology(4), batch_size=4096)
    explainer = Explainer(request)
    for name in ROWS:
        found = explainer.explanation(f"ebc.{name}")
        best = min(way.step_ps for way in found.considered[1:] if way.allowed and not way.short)
        more = best - found.step_ps
        words = "makes the fastest step" if more > 0 else "equally fast" if not more else "would save"
        assert words in found.reason()
    tight = plan_request({"a": 400_000, "b": 100}, Topology(4, hbm_cap=32 * 2**20))
    tight = tight.with_constraint("ebc.a", enforce_hbm=True).with_constraint("ebc.b", enforce_hbm=True)
    tight = tight.with_constraint("ebc.a", enforce_hbm=True, sharding_types=["row_wise", "table_wise"])
    found = explain(tight, "a")
    assert not [way for way in found.considered[1:] if way.allowed and not way.short]
    assert "rows over 4 ranks is the only allowed option that fits with all other tables unchanged" in found.reason()


def test_many_tables_are_explained_from_one_search() -> None:
    request = plan_request(ROWS, Topology(4), {"t3": ParameterConstraints(["row_wise"])})
    every = Explainer(request)
    for name in ROWS:
        assert str(every.explanation(f"ebc.{name}")) == str(explain(request, name))


def test_what_cannot_be_explained_is_refused() -> None:
    pin = {"t0": ParameterConstraints(sharding=ParameterSharding("row_wise"))}
    with pytest.raises(ConfigError, match=r"Table 'ebc.t0' is pinned, or co-located with a pinned table"):
        explain(plan_request(ROWS, Topology(2), pin), "t0")
    with pytest.raises(ConfigError, match=r"There is no table 'x'; there are \['ebc.t0'"):
        explain(plan_request(ROWS, Topology(2)), "x")
    with pytest.raises(PlannerError):
        explain(plan_request(ROWS, Topology(2, hbm_cap=2**20)), "t0")


@pytest.mark.parametrize("others", [{}, {"b": 100_000}])
def test_rows_over_more_ranks_than_there_are_rows_are_explained_too(others: dict[str, int]) -> None:
    limits = {"a": ParameterConstraints(["row_wise"]), "b": ParameterConstraints(["row_wise"])}
    limits = {name: limits[name] for name in ("a", *others)}
    found = explain(plan_request({"a": 1, **others}, Topology(4), limits), "a")
    assert found.chosen.chosen
    assert found.chosen.option == "rows over 4 ranks"
    assert "Options that its constraints rule out were not considered." in str(found)


def test_an_explanation_knows_its_plan() -> None:
    request = plan_request({"a": 1000, "b": 100_000}, Topology(2))
    plan = make_plan(request)
    found = explain(request, "a")
    assert found.is_in(plan)
    tiling = Tiling.of("a", 1000, 64, [(0, 999, 0, 64, 0), (999, 1000, 0, 64, 1)])
    assert not found.is_in(plan.replaced("ebc", "a", ParameterSharding("explicit", tiling=tiling)))
    assert not found.is_in(ShardingPlan({}))


def test_a_table_numbered_by_frequency_tells_the_bytes_of_its_heads_and_its_curve() -> None:
    limits = {"a": ParameterConstraints(pooling_factors=[20], skew=Skew(100_000, 1.05, ordered=True))}
    request = plan_request([table("a", 100_000, pooled=False), table("b", 1000)], Topology(4), limits)
    found = explain(request, "a")
    heads = [way.option for way in found.considered if "of rows on each" in way.option]
    assert sorted(heads) == [
        f"rows over 4 ranks, {size} of rows on each" for size in ("0.05%", "0.20%", "1.00%", "5.00%")
    ]
    (note,) = [note for note in found.notes if "numbered by frequency" in note]
    assert "with 1,000 (69% of the ids)" in note
    assert found.curve[-1] == (100_000, 1.0)
    assert explain(request, "b").curve == ()
    assert explain(replace(request, topology=Topology(1)), "a").curve == ()
