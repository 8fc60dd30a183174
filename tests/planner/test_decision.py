"""What constraints make of a plan: every one is kept, on any world."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.planner.plan_requests import plan_request, table
from tilerec.errors import ConfigError
from tilerec.modules.cached_tables import cache_tables
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.read_plan import _produces
from tilerec.planner import decision as decision_module
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.workload import Skew
from tilerec.planner.decision import _of_lowest_price, _without_empty_ranges, decide
from tilerec.planner.make_plan import make_plan
from tilerec.planner.plan_price import priced
from tilerec.planner.planner import EmbeddingShardingPlanner, topology_of_ranks
from tilerec.planner.report.plan_report import PlanReport
from tilerec.planner.report.report_builder import build_report
from tilerec.planner.request import PlanRequest
from tilerec.planner.search.instance import SHARE, Solution, Status, evaluate
from tilerec.planner.search.solve import solve
from tilerec.sharding.strategies import row_wise
from tilerec.spec.cache import CacheParams
from tilerec.spec.optimizer import Adam
from tilerec.spec.plan import EmbeddingComputeKernel, ParameterSharding, ShardingPlan, ShardingType, Wire
from tilerec.spec.table import DataType, EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

MIB = 2**20
TYPES = [kind for kind in ShardingType if kind is not ShardingType.EXPLICIT]
WORLDS = [
    Topology(1, "cpu"),
    Topology(3),
    Topology(4, local_world_size=2),
    Topology(4, local_world_size=1),
    Topology(5, hosts=[[0, 1, 2], [3, 4]]),
    Topology(6, hosts=[[0, 3, 5], [1, 2, 4]]),
]


def placed(request: PlanRequest) -> ShardingPlan:
    plan = make_plan(request)
    plan.check({"ebc": {t.names[0][1]: (t.rows, t.dim) for t in request.tables}}, request.topology.world_size)
    return plan


_NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="further sizes: nightly")


@pytest.mark.parametrize("topology", WORLDS, ids=str)
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("rows", "dim"), [(1000, 64), (1, 1), pytest.param(7, 257, marks=_NIGHTLY)])
def test_a_type_that_is_asked_for_is_had_and_gives_its_tiling(
    kind: ShardingType, topology: Topology, rows: int, dim: int
) -> None:
    request = plan_request([table("a", rows, dim), table("b", 500)], topology, {"a": ParameterConstraints([kind])})
    sharding = placed(request).plan["ebc"]["a"]
    assert sharding.kind is kind
    assert sharding.ranks is not None
    assert sharding.tiling is not None
    assert _produces("a", kind, sharding.ranks, sharding.tiling, topology)


@pytest.mark.parametrize("topology", [Topology(3), Topology(4, local_world_size=2)], ids=str)
def test_a_grid_that_is_asked_for_in_frequency_order_has_uneven_ranges_that_a_model_takes(topology: Topology) -> None:
    limits = ParameterConstraints(["grid_shard"], skew=Skew(1000, 1.05, ordered=True), pooling_factors=[20])
    sharding = placed(plan_request([table("a", 1000, 64)], topology, {"a": limits})).plan["ebc"]["a"]
    assert sharding.kind is ShardingType.GRID_SHARD
    assert sharding.ranks is not None
    assert sharding.tiling is not None
    cuts = sharding.tiling.blocks[0].cuts
    assert cuts[1] < cuts[-1] - cuts[-2]
    assert _produces("a", sharding.kind, sharding.ranks, sharding.tiling, topology)


def test_pieces_lie_on_the_ranks_and_hosts_that_are_allowed() -> None:
    topology = Topology(8, local_world_size=2)
    limits = {
        "a": ParameterConstraints(ranks="3"),
        "b": ParameterConstraints(hosts=[2, 3], forbidden_types=["data_parallel"]),
        "c": ParameterConstraints(["row_wise"], ranks="1,4-6"),
        "d": ParameterConstraints(["table_column_wise"], ranks="1,2,6,7"),
    }
    part = placed(plan_request(dict.fromkeys("abcd", 100_000), topology, limits)).plan["ebc"]
    assert part["a"].ranks == (3,)
    assert set(part["b"].ranks or ()) <= {4, 5, 6, 7}
    assert set(part["c"].ranks or ()) <= {1, 4, 5, 6}
    assert part["c"].kind is ShardingType.ROW_WISE
    assert set(part["d"].ranks or ()) <= {6, 7}


def test_no_more_ranks_than_allowed_hold_a_table() -> None:
    for most in (1, 2, 4):
        limits = {"a": ParameterConstraints(max_ranks=most, pooling_factors=[50])}
        plan = placed(plan_request({"a": 1_000_000, "b": 10}, Topology(8), limits))
        tiling = plan.plan["ebc"]["a"].tiling
        assert tiling is not None
        assert len(tiling.ranks()) <= most
    with pytest.raises(ConfigError, match=r"Table 'ebc.a': max_ranks=2 and its other constraints contradict"):
        decide(plan_request({"a": 100}, Topology(8), {"a": ParameterConstraints(["data_parallel"], max_ranks=2)}))


def test_constraints_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Table 'ebc.a': nothing that its constraints allow"):
        decide(plan_request({"a": 100}, Topology(8), {"a": ParameterConstraints(["data_parallel"], ranks=[0])}))


def test_tables_that_lie_together_are_cut_alike_on_the_same_ranks() -> None:
    limits = {
        "a": ParameterConstraints(with_table="b"),
        "b": ParameterConstraints(forbidden_types=["data_parallel"]),
        "c": ParameterConstraints(with_table="b"),
    }
    rows = {"a": 1000, "b": 2_000_000, "c": 70_000, "d": 100, "e": 30_000}
    part = placed(plan_request(rows, Topology(8, local_world_size=4), limits)).plan["ebc"]
    assert part["a"].ranks == part["b"].ranks == part["c"].ranks
    assert part["a"].kind is part["b"].kind is part["c"].kind


def test_a_table_lies_with_one_that_was_given_by_hand() -> None:
    limits = {
        "a": ParameterConstraints(with_table="b"),
        "b": ParameterConstraints(sharding=ParameterSharding("table_wise", ranks=[5])),
    }
    assert placed(plan_request({"a": 1000, "b": 1000}, Topology(8), limits)).plan["ebc"]["a"].ranks == (5,)
    limits["a"] = ParameterConstraints(with_table="b", ranks=[1])
    with pytest.raises(ConfigError, match=r"Table 'ebc.a': with_table='ebc.b' puts it on ranks"):
        decide(plan_request({"a": 1000, "b": 1000}, Topology(8), limits))


def test_tables_that_cannot_lie_together_are_refused() -> None:
    limits = {
        "a": ParameterConstraints(["row_wise"]),
        "b": ParameterConstraints(["table_wise"], with_table="a"),
    }
    with pytest.raises(ConfigError, match=r"Tables \['ebc.a', 'ebc.b'\] .*no way to be cut"):
        decide(plan_request({"a": 1000, "b": 1000}, Topology(2), limits))
    limits = {"a": ParameterConstraints(ranks=[0]), "b": ParameterConstraints(ranks=[1], with_table="a")}
    with pytest.raises(ConfigError, match=r"Tables \['ebc.a', 'ebc.b'\] .*no rank"):
        decide(plan_request({"a": 1000, "b": 1000}, Topology(3), limits))


def test_pins_stay_as_they_are_and_count() -> None:
    tiling = Tiling.of("a", 1000, 64, [(0, 300, 0, 64, (0, 1)), (300, 1000, 0, 32, 2), (300, 1000, 32, 64, 3)])
    limits = {"a": ParameterConstraints(sharding=tiling)}
    plan = placed(plan_request({"a": 1000, "b": 500_000}, Topology(4), limits))
    assert plan.plan["ebc"]["a"] == ParameterSharding(
        "explicit", tiling=tiling, data_type=plan.plan["ebc"]["a"].data_type
    )
    entry = plan.report.tables[0]
    assert entry.option == "pinned"
    assert entry.bytes == 4 * (300 * 2 * 64 + 700 * 64) + 4 * (2 * 300 + 2 * 700)
    assert sum(entry.owner_ps) > 0
    loaded = plan.report.load_ps.sum(1)
    assert loaded.min() > 0


def test_all_tables_may_be_pinned() -> None:
    limits = {name: ParameterConstraints(sharding=ParameterSharding("row_wise")) for name in "ab"}
    report = placed(plan_request({"a": 1000, "b": 2000}, Topology(2), limits)).report
    assert report.cost_ps == report.bound_ps > 0
    assert report.gap == 0


def test_a_pin_that_goes_with_neither_table_nor_world_is_refused() -> None:
    other = Tiling.of("a", 999, 64, [(0, 999, 0, 64, 0)])
    with pytest.raises(ConfigError, match=r"Table 'ebc.a': its tiling is of 999 x 64 cells"):
        decide(plan_request({"a": 1000}, Topology(2), {"a": ParameterConstraints(sharding=other)}))
    far = ParameterConstraints(sharding=ParameterSharding("table_wise", ranks=[7]))
    with pytest.raises(ConfigError, match=r"Table 'ebc.a': ranks contain 7; the world has ranks 0 to 1"):
        decide(plan_request({"a": 1000}, Topology(2), {"a": far}))
    dense = ParameterConstraints(sharding=ParameterSharding("row_wise", "dense"))
    with pytest.raises(ConfigError, match=r"optimizer is attached, .* has 'dense'"):
        decide(plan_request({"a": 1000}, Topology(2), {"a": dense}))


def test_the_order_of_tables_does_not_matter() -> None:
    rows = {f"t{i}": 1000 * (i + 1) for i in range(20)}
    topology = Topology(8, local_world_size=4)
    one, other = (
        placed(plan_request(rows, topology)),
        placed(plan_request(dict(reversed(rows.items())), topology)),
    )
    assert {t: s for _, t, s in one.tables()} == {t: s for _, t, s in other.tables()}


def test_ordered_ids_and_uneven_rows_make_whole_tilings() -> None:
    limits = {
        "a": ParameterConstraints(["row_wise"], skew=Skew(900_000, 1.1, ordered=True), pooling_factors=[20]),
        "b": ParameterConstraints(["row_wise"], pooling_factors=[7]),
    }
    tables = [table("a", 1_000_003), table("b", 999_983, optimizer=Adam()), table("c", 400_000)]
    part = placed(plan_request(tables, Topology(4), limits, batch_size=4096)).plan["ebc"]
    tiling = part["a"].tiling
    assert tiling is not None
    cuts = tiling.blocks[0].cuts
    assert cuts[1] < 1_000_003 // 4  # frequent rows come first


def test_memory_that_is_reserved_is_not_used() -> None:
    topology = Topology(2, ddr_cap=0, hbm_cap=40 * 2**20)
    request = plan_request({"a": 100_000}, topology, {"a": ParameterConstraints(["table_wise"])})
    assert decide(request).found
    assert not decide(replace(request, reserved=20 * 2**20)).found


@pytest.mark.parametrize("cap", [88, 96, 104, 112])
def test_what_homes_take_is_known_to_the_search_so_the_first_plan_fits(
    cap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    rows = {f"t{i}": int(n) for i, n in enumerate(np.exp(rng.normal(9, 1.5, 80)))}
    limits = {name: ParameterConstraints(pooling_factors=[20.0]) for name in rows}
    searches = []

    def counted(*args: Any, **more: Any) -> Solution:
        searches.append(solve(*args, **more))
        return searches[-1]

    monkeypatch.setattr(decision_module, "solve", counted)
    decision = decide(plan_request(rows, Topology(32, local_world_size=4, hbm_cap=cap * MIB), limits))
    assert decision.found
    assert len(searches) == 1
    assert decision.priced is not None
    assert np.all(decision.priced.memory[:, 0] <= cap * MIB)


def test_tables_that_device_memory_does_not_hold_lie_in_host_memory_behind_caches() -> None:
    rows = {"a": 400_000, "b": 300_000, "c": 1000}
    roomy = decide(plan_request(rows, Topology(2))).shardings()
    assert all(sharding.kernel is EmbeddingComputeKernel.FUSED for sharding in roomy.values())
    decision = decide(plan_request(rows, Topology(2, hbm_cap=64 * MIB)))
    assert decision.found
    assert (decision.solution.memory <= decision.instance.cap).all()
    assert decision.bound <= decision.priced.cost_ps
    kernels = {key: sharding.kernel for key, sharding in decision.shardings().items()}
    assert EmbeddingComputeKernel.FUSED_UVM_CACHING in kernels.values()
    # A small table that is read often stays where it is fast.
    assert kernels["ebc.c"] is EmbeddingComputeKernel.FUSED
    assert any("in host memory" in note for note in build_report(decision, decision.plan()).notes)


def test_constraints_say_where_rows_lie_and_how_large_a_cache_is() -> None:
    limits = {
        "a": ParameterConstraints(
            compute_kernels=["fused_uvm_caching"], cache_params=CacheParams("lfu", load_factor=0.05)
        ),
        "b": ParameterConstraints(compute_kernels=["fused_uvm"]),
        "c": ParameterConstraints(compute_kernels=["fused", "fused_uvm_caching"]),
    }
    request = plan_request({"a": 100_000, "b": 100_000, "c": 100_000, "d": 100_000}, Topology(2), limits)
    again = PlanRequest.from_json(request.to_json())
    assert again.digest() == request.digest()
    decision = decide(again)
    found = decision.shardings()
    kernels = [sharding.kernel.value for sharding in found.values() if sharding.kernel is not None]
    assert kernels == ["fused_uvm_caching", "fused_uvm", "fused", "fused"]
    assert found["ebc.a"].cache_params == CacheParams("lfu", load_factor=0.05)
    assert found["ebc.c"].cache_params is None
    weights = 100_000 * (64 * 4 + 4)
    assert decision.solution.memory[:, 1].sum() == pytest.approx(2 * weights, rel=0.01)
    # A cache of a twentieth, and none: the fewer lines, the more rows travel.
    small, none = (decision.problem.model.missed[t] for t in (0, 1))
    assert 0 < small < none


def test_a_pinned_table_in_host_memory_takes_it_there() -> None:
    pin = ParameterSharding("table_wise", "fused_uvm_caching", ranks=[1], cache_params=CacheParams(load_factor=0.1))
    request = plan_request({"a": 100_000, "b": 10}, Topology(2), {"a": ParameterConstraints(sharding=pin)})
    memory = decide(request).solution.memory
    assert memory[1, 1] == pytest.approx(100_000 * (64 * 4 + 4), rel=0.01)
    assert memory[0, 1] == 0


def test_a_table_in_host_memory_needs_an_attached_optimizer() -> None:
    limits = {"a": ParameterConstraints(compute_kernels=["fused_uvm_caching"])}
    with pytest.raises(ConfigError, match=r"Table 'ebc.a': its compute_kernels .* takes an optimizer"):
        plan_request([table("a", optimizer=None)], Topology(2), limits)
    frozen = plan_request([table("a", optimizer=None, trained=False)], Topology(2), limits)
    assert decide(frozen).found


def test_a_table_that_is_cached_already_stays_in_host_memory() -> None:
    module = EmbeddingBagCollection(
        [EmbeddingBagConfig(n, 8, name, feature_names=[name]) for name, n in (("a", 70), ("b", 9))]
    )
    apply_optimizer_in_backward(Adam(), module.parameters())
    cache_tables(module.embedding_bags["a"], load_factor=0.5)
    request = EmbeddingShardingPlanner(Topology(2)).request(module)
    again = PlanRequest.from_json(request.to_json())
    assert [table.cached for table in again.tables] == [0.5, None]
    decision = decide(again)
    kernels = {key: sharding.kernel for key, sharding in decision.shardings().items()}
    assert kernels["a"] is EmbeddingComputeKernel.FUSED_UVM_CACHING
    assert kernels["b"] is EmbeddingComputeKernel.FUSED
    assert decision.solution.memory[:, 1].sum() >= 70 * 8 * 4 * 3


def test_on_a_cpu_there_is_one_memory() -> None:
    limits = {"a": ParameterConstraints(compute_kernels=["fused_uvm_caching"])}
    decision = decide(plan_request({"a": 1000}, Topology(2, "cpu"), limits))
    assert not any(option.cached for option in decision.problem.options)
    assert decision.shardings()["ebc.a"].kernel is EmbeddingComputeKernel.FUSED_UVM_CACHING


def test_the_report_adds_up_and_is_read_back() -> None:
    report = placed(plan_request({f"t{i}": 1000 * 3**i for i in range(9)}, Topology(4, local_world_size=2))).report
    assert report.cost_ps == int(report.stage_ps.sum()) + report.charge_ps
    assert report.bound_ps <= report.cost_ps
    held = sum(entry.bytes for entry in report.tables)
    assert 0 < held <= sum(report.memory_per_rank)
    back = PlanReport.from_json(report.to_json())
    assert str(back) == str(report)
    assert back.to_json() == report.to_json()


def test_ranks_lie_on_hosts_of_the_launchers_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert topology_of_ranks(4, "cpu").host_ranks == ((0, 1), (2, 3))
    assert topology_of_ranks(3, "cpu").host_ranks == ((0, 1, 2),)


def test_a_table_that_lies_with_a_pinned_one_is_cut_as_that_is() -> None:
    limits = {
        "a": ParameterConstraints(with_table="b"),
        "b": ParameterConstraints(sharding=ParameterSharding("row_wise", ranks=[1, 3, 0])),
        "c": ParameterConstraints(with_table="a"),
    }
    part = placed(plan_request({"a": 10, "b": 1000, "c": 7, "d": 100}, Topology(4), limits)).plan["ebc"]
    for name in "ac":
        assert (part[name].kind, part[name].ranks) == (part["b"].kind, (1, 3, 0))
        assert part[name].compute_kernel is not None
    limits["a"] = ParameterConstraints(["table_wise"], with_table="b")
    with pytest.raises(ConfigError, match=r"Table 'ebc.a': with_table='b' makes it row_wise, which its constraints do"):
        decide(plan_request({"a": 10, "b": 1000, "c": 7}, Topology(4), limits))
    limits["a"] = ParameterConstraints(with_table="b", max_ranks=2)
    with pytest.raises(ConfigError, match=r"with_table='ebc.b' puts it on ranks \[0, 1, 3\]"):
        decide(plan_request({"a": 10, "b": 1000, "c": 7}, Topology(4), limits))


def test_a_pin_has_its_tables_type_and_travels_in_its_own_format() -> None:
    def report(wire: Wire | None) -> PlanReport:
        pin = ParameterSharding("table_wise", ranks=[0], wire=wire, data_type=DataType.FP16)
        limits = {"a": ParameterConstraints(sharding=pin)}
        plan = placed(plan_request({"a": 1000, "b": 10}, Topology(2, local_world_size=1), limits))
        assert plan.plan["ebc"]["a"].data_type is DataType.FP32
        return plan.report

    assert report(Wire("bf16", "bf16")).cost_ps < report(None).cost_ps


def test_every_rank_is_filled_to_its_own_cap_at_most() -> None:
    topology = Topology(4, hbm_caps=[64 * 2**20, 32 * 2**20, 64 * 2**20, 24 * 2**20], local_world_size=2)
    report = placed(plan_request({f"t{i}": 20_000 for i in range(24)}, topology)).report
    assert report.cap[:, 0].tolist() == list(topology.memory_caps)
    assert (report.memory <= report.cap).all()
    assert report.fullest_rank in (1, 3)


@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "row_wise"])
def test_tables_weigh_no_more_on_a_rank_than_it_has_to_do(kind: str) -> None:
    topology = Topology(8, local_world_size=4, inter_host_bw=1e5)
    rows = {f"t{i}": 20_000 for i in range(9)}
    report = placed(
        plan_request(rows, topology, {name: ParameterConstraints([kind]) for name in rows}, batch_size=4096)
    ).report
    for rank in range(8):
        weighed = sum(seconds for _, seconds in report.weighs_most(rank, 99))
        # Sums over rows of column blocks are an estimate: which blocks share a host is not known before.
        assert weighed <= report.load_ps[rank].sum() / 1e12 * (1.05 if kind == "column_wise" else 1.0 + 1e-9)
    assert sum(seconds for _, seconds in report.weighs_most(report.slowest_rank, 99)) > 0


def test_the_order_of_tables_does_not_matter_to_those_that_get_a_host_by_turns() -> None:
    rows = {f"t{i}": 1000 * (i + 1) for i in range(7)}
    limits = {name: ParameterConstraints(["table_column_wise"]) for name in ("t2", "t5", "t6")}
    topology = Topology(8, local_world_size=4)
    one = placed(plan_request(rows, topology, limits))
    for turn in (1, 3, 5):
        names = [*rows][turn:] + [*rows][:turn]
        other = placed(plan_request({name: rows[name] for name in names}, topology, limits))
        assert {t: s for _, t, s in one.tables()} == {t: s for _, t, s in other.tables()}


def test_tables_that_lie_together_are_cut_alike_where_an_uneven_range_would_have_no_row() -> None:
    rows = ["row_wise"]
    limits = {"a": ParameterConstraints(rows), "b": ParameterConstraints(rows, with_table="a")}
    decision = decide(plan_request({"a": 100_000, "b": 10}, Topology(2), limits))
    row = int(decision.row[0])
    assert row == decision.row[1]
    shares = np.array([SHARE // 50, SHARE - SHARE // 50])
    uneven = replace(decision, solution=replace(decision.solution, rows={row: shares}))
    assert _without_empty_ranges(uneven).solution.rows == {}
    fine = replace(decision, solution=replace(decision.solution, rows={row: np.array([SHARE // 2, SHARE // 2])}))
    assert _without_empty_ranges(fine).solution.rows == fine.solution.rows


def test_tables_that_lie_together_with_column_blocks_on_one_host_share_that_host() -> None:
    one_host = ["table_column_wise"]
    limits = {"a": ParameterConstraints(one_host), "b": ParameterConstraints(one_host, with_table="a")}
    decision = decide(plan_request({"a": 5000, "b": 6000}, Topology(4, local_world_size=2), limits))
    a, b = (decision.shardings()[f"ebc.{name}"].ranks for name in "ab")
    assert a == b
    limits = {
        "a": ParameterConstraints([*one_host, "data_parallel"]),
        "b": ParameterConstraints(["data_parallel"], with_table="a"),
    }
    decision = decide(plan_request({"a": 50, "b": 60}, Topology(4, local_world_size=2), limits))
    assert {s.kind for s in decision.shardings().values()} == {ShardingType.DATA_PARALLEL}


def test_no_plan_is_called_impossible_where_only_unlike_ranges_of_rows_fit() -> None:
    # With 8 ids per bag, 1,000 + 1,000 rows send nearly two full outputs home, and 1,999 + 1 little more than one.
    rows, limits = {"a": 2000}, {"a": ParameterConstraints(["row_wise"], pooling_factors=[8.0])}

    def memory(sizes: list[int], cap: int) -> Any:
        request = plan_request(rows, Topology(2, hbm_cap=cap), limits, batch_size=16_384)
        tiling = row_wise("a", 2000, 64, [0, 1], request.topology, sizes=sizes)
        sharding = ParameterSharding("row_wise", ranks=(0, 1), tiling=tiling)
        return request, priced(request, {"ebc.a": sharding}).memory[:, 0].max()

    (_, even), (_, unlike) = memory([1000, 1000], 2**40), memory([1999, 1], 2**40)
    assert unlike < even
    request, _ = memory([1999, 1], int(unlike + even) // 2)
    decision = decide(request)
    assert decision.solution.status is not Status.NONE_EXISTS


def test_rows_are_not_cut_by_caps_over_more_ranks_than_allowed_or_apart_from_others() -> None:
    topology = Topology(4, hbm_caps=[70 * MIB, 20 * MIB, 20 * MIB, 20 * MIB])
    large, small = table("a", 200_000, 128), table("b", 100, 128)
    free = decide(plan_request([large], topology, batch_size=64))
    assert free.by_caps == {"ebc.a"}
    few = {"a": ParameterConstraints(max_ranks=3)}
    assert not decide(plan_request([large], topology, few, batch_size=64)).by_caps
    beside = {"b": ParameterConstraints(with_table="a")}
    assert not decide(plan_request([large, small], topology, beside, batch_size=64)).by_caps


def test_a_table_whose_column_blocks_must_share_a_host_may_have_copies_everywhere() -> None:
    kinds = ["table_column_wise", "data_parallel"]
    limits = {"small": ParameterConstraints(kinds), "large": ParameterConstraints(["row_wise"])}
    rows = {"small": 5, "large": 1_000_000}
    decision = decide(plan_request(rows, Topology(4, local_world_size=2), limits, batch_size=65_536))
    assert decision.instance.allowed is not None
    assert decision.shardings()["ebc.small"].kind is ShardingType.DATA_PARALLEL


def test_of_what_the_search_found_the_least_price_counts() -> None:
    decision = decide(plan_request({f"t{i}": 5000 for i in range(6)}, Topology(3)))
    assert decision.priced is not None
    best = decision.solution
    together = evaluate(decision.instance, best.option, [(0,) for _ in best.places])
    believed = replace(together, cost=best.cost - 1, others=(best,))
    wrong = replace(
        decision,
        solution=believed,
        priced=priced(decision.request, replace(decision, solution=together).shardings()),
    )
    assert wrong.priced is not None
    assert wrong.priced.cost_ps > decision.priced.cost_ps
    found = _of_lowest_price(wrong)
    assert found.priced is not None
    assert found.priced.cost_ps == decision.priced.cost_ps
    # One that the search knows to be dearer than that price is not looked at.
    dear = replace(believed, others=(replace(best, cost=wrong.priced.cost_ps),))
    assert _of_lowest_price(replace(wrong, solution=dear)).priced is wrong.priced
