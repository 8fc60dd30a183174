"""Prices of plans, made by the planner or by hand."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.planner import (
    EmbeddingShardingPlanner,
    FixedPercentageStorageReservation,
    ParameterConstraints,
    price_plan,
)
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.decision import decide
from tilerec.planner.plan_price import priced
from tilerec.planner.search.instance import Instance
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from tilerec.spec.speeds import Speeds
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.topology import Topology

GIB = 2**30


def configs(*rows: int, dim: int = 32) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(n, dim, f"t{i}", feature_names=[f"f{i}"]) for i, n in enumerate(rows)]


def planner(topology: Topology, **options: Any) -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(topology, 512, storage_reservation=FixedPercentageStorageReservation(0), **options)


TOPOLOGIES = [
    Topology(2, "cpu"),
    Topology(4),
    Topology(8, local_world_size=4),
    Topology(8, local_world_size=4, nic="host"),
    Topology(6, hosts=[[0], [1, 2, 3, 4, 5]]),
]


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"{t}, {t.nic}")
def test_the_report_states_the_price_of_its_plan(topology: Topology) -> None:
    tables = configs(10, 50_000, 400_000, 2_000_000, 90_000)
    limits = {f"t{i}": ParameterConstraints(pooling_factors=[bags]) for i, bags in enumerate((1, 4, 20, 2, 0.5))}
    plan = planner(topology, constraints=limits).plan(tables)
    report, found = plan.report, planner(topology, constraints=limits).price(tables, plan)
    assert report is not None
    assert report.cost_ps == found.cost_ps
    assert report.stages == tuple(found.stages)
    assert np.array_equal(report.load_ps, found.load_ps)
    assert np.array_equal(report.memory, found.memory)
    assert 0 < report.bound_ps <= report.cost_ps
    assert not found.over.any()


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"{t}, {t.nic}")
def test_a_plan_given_back_is_taken_as_it_is_at_the_same_price(topology: Topology) -> None:
    tables = configs(1_000, 60_000, 700_000, 300_000)
    need = 2 * sum(t.num_embeddings for t in tables) * 32 * 4
    tight = dataclasses.replace(
        topology,
        **{"ddr_cap" if topology.compute_device == "cpu" else "hbm_cap": int(1.2 * need / topology.world_size)},
    )
    first = planner(tight).plan(tables)
    again = planner(tight, fixed=first).plan(tables)
    assert again.report.cost_ps == first.report.cost_ps
    assert {n: s.tiling for _, n, s in again.tables()} == {n: s.tiling for _, n, s in first.tables()}


def test_rows_over_any_number_of_ranks_are_found() -> None:
    """Seven ranks of 1.15 GiB for 7 GiB of rows: no power of two would do."""
    topology = Topology(8, hbm_cap=int(1.15 * GIB))
    for ranks in ("0-6", None):
        limits = ParameterConstraints(ranks=ranks, compute_kernels=["dense"])
        plan = planner(topology, constraints={"t0": limits}).plan(configs(58_720_256 // 2))
        assert max(plan.report.memory_per_rank) <= topology.hbm_cap


def test_ranks_of_unlike_memory_hold_rows_in_proportion() -> None:
    topology = Topology(4, hbm_caps=[GIB, 2 * GIB, 4 * GIB, 8 * GIB], ddr_cap=0)
    plan = planner(topology).plan(configs(int(12.25 * GIB / 4 / 32 / 2)))
    memory = np.array(plan.report.memory_per_rank) / np.array(topology.memory_caps)
    assert memory.max() <= 1
    assert memory.min() > 0.8
    assert plan.report.tables[0].option == "rows by memory"
    assert plan.report.bound_ps <= plan.report.cost_ps


def test_a_plan_made_by_hand_has_a_price_beside_that_of_the_planner() -> None:
    topology, tables = Topology(4), configs(200_000, 300_000)
    shardings = {"t0": ParameterSharding("table_wise", ranks=[0]), "t1": ParameterSharding("row_wise")}
    by_hand = ShardingPlan({"": EmbeddingModuleShardingPlan(shardings)}, 4)
    found = planner(topology).price(tables, by_hand)
    assert found.seconds >= planner(topology).plan(tables).report.bound_s
    assert found.memory.shape == (4, 2)
    assert found.parts["lookup"].shape == (4,)
    assert found.memory[0, 0] - found.memory[1, 0] >= 200_000 * 32 * 4


def test_collections_cost_what_they_cost_whether_one_of_them_is_pinned_or_not() -> None:
    """What a step takes once for each collection does not go when the tables of one are given."""
    model = torch.nn.ModuleDict(
        {name: EmbeddingBagCollection(configs(3_000, 40_000), device=torch.device("meta")) for name in "ab"}
    )
    free = planner(Topology(4)).plan(model)
    half = {"a": {name: sharding for path, name, sharding in free.tables() if path == "a"}}
    pinned = planner(Topology(4), fixed=half).plan(model)
    assert pinned.report.cost_ps == pytest.approx(free.report.cost_ps, rel=0.02)
    assert pinned.report.charge_ps == free.report.charge_ps


def speeds(**change: Any) -> Speeds:
    return dataclasses.replace(default_speeds(Topology(4)), **change)


def test_an_exchange_takes_the_longer_direction_where_links_are_duplex_and_both_where_they_are_not() -> None:
    """One rank holds all tables: it sends all rows; each other rank gets its own batch's."""
    tables, held = configs(1_000, 1_000), {}
    for duplex in (True, False):
        topology = Topology(4, speeds=speeds(duplex=duplex, link_in=1e-9, link_out=1e-9))
        plan = planner(
            topology, constraints={t.name: ParameterConstraints(["table_wise"], ranks=[0]) for t in tables}
        ).plan(tables)
        held[duplex] = planner(topology).price(tables, plan).parts["rows"]
    batch = 2 * 512 * 32 * 4 * 1e-9
    assert held[True] == pytest.approx([3 * batch, batch, batch, batch])
    assert held[True] == pytest.approx(held[False])  # here no rank does both


def test_ranks_with_network_cards_of_their_own_wait_for_the_busiest_and_others_share() -> None:
    tables, rows = configs(1_000, 1_000), {}
    for nic in ("device", "host"):
        topology = Topology(4, local_world_size=2, nic=nic)  # type: ignore[arg-type]
        plan = planner(
            topology, constraints={t.name: ParameterConstraints(["table_wise"], ranks=[0]) for t in tables}
        ).plan(tables)
        rows[nic] = planner(topology).price(tables, plan).price.network["rows between hosts"].max()
    assert rows["device"] == pytest.approx(2 * rows["host"])


def test_a_plan_over_a_cap_by_its_price_is_not_returned() -> None:
    """Rows of many ranges come to every rank, on whichever rank they lie: the search finds another plan, or none."""
    tables = configs(*[30_000] * 6, dim=64)
    limits = {t.name: ParameterConstraints(pooling_factors=[30.0]) for t in tables}
    found = set()
    for cap in range(8, 40, 4):
        topology = Topology(8, hbm_cap=cap * 2**20, ddr_cap=0)
        decision = decide(planner(topology, constraints=limits).request(tables))
        if decision.priced is not None:
            found.add(cap)
            assert decision.priced.memory.max() <= cap * 2**20
            assert decision.solution.memory.max() <= decision.priced.memory.max()
    assert found


def test_what_cannot_be_priced_is_refused_by_name() -> None:
    topology, tables = Topology(4), configs(1_000, 2_000)
    plan = planner(topology).plan(tables)
    with pytest.raises(ConfigError, match="got a plan for 4 ranks; expected one for the topology's 8"):
        planner(Topology(8)).price(tables, plan)
    with pytest.raises(ConfigError, match="without table 't2' of module ''"):
        planner(topology).price(configs(1_000, 2_000, 3_000), plan)
    with pytest.raises(ConfigError, match="got a sharding of 1000 x 32; expected 1001 x 32"):
        price_plan(planner(topology).request(configs(1_001, 2_000)), plan)


@pytest.mark.parametrize("topology", [Topology(4, local_world_size=2), Topology(3, hosts=[[0], [1, 2]])], ids=str)
def test_the_bound_is_below_every_arrangement_of_a_small_problem(topology: Topology) -> None:
    tables = configs(20_000, 30_000, dim=64)
    limits = {
        "t0": ParameterConstraints(pooling_factors=[8.0]),
        "t1": ParameterConstraints(pooling_factors=[1.0]),
    }
    decision = decide(planner(topology, constraints=limits).request(tables))
    assert decision.priced is not None
    problem, instance = decision.problem, decision.instance
    ways = []
    for t in range(2):
        ways.append(
            [
                problem.sharding(t, o, places)
                for o in np.flatnonzero(instance.there[t]).tolist()
                for places in arrangements(instance, t, o)
            ]
        )
    costs = [priced(decision.request, {"t0": first, "t1": second}).cost_ps for first in ways[0] for second in ways[1]]
    assert len(costs) > 60
    assert decision.bound <= min(costs)
    assert decision.priced.cost_ps <= min(costs) * (1.001 if len(set(map(len, topology.host_ranks))) == 1 else 1.01)


def arrangements(instance: Instance, table: int, option: int) -> list[tuple[int, ...]]:
    """Every choice of places of an option's pieces."""
    width, pieces = int(instance.width[table, option]), int(instance.pieces[table, option])
    if width == instance.ranks:
        return [()]
    hosts = [h for h in range(instance.hosts) if instance.host_sizes[h] == width]
    # Pieces of one table are alike.
    return list(combinations(range(instance.ranks) if width == 1 else hosts, pieces))
