"""The planner's face: what it finds in a model, what it warns about, and that ranks agree."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tilerec
from tilerec.comms.group import Group
from tilerec.compat.planner.proposers import GreedyProposer
from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.planner import (
    EmbeddingShardingPlanner,
    FixedPercentageStorageReservation,
    ParameterConstraints,
    PlannerError,
    StorageReservation,
    construct_module_sharding_plan,
    row_wise,
)
from tilerec.sharders.table_sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from tilerec.spec.optimizer import Adam, RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding, ShardingPlan, ShardingType
from tilerec.spec.table import DataType, EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.topology import Topology
from tilerec.testing import run_virtual_ranks

META = torch.device("meta")
NOTHING = FixedPercentageStorageReservation(0)
BATCH = 600_000  # room for ids, rows and gradients of a batch of 512 on one rank, 64 columns


def model() -> nn.Module:
    return nn.ModuleDict(
        {
            "ebc": EmbeddingBagCollection(
                [EmbeddingBagConfig(1000, 64, "user"), EmbeddingBagConfig(10, 3, "item")], device=META
            ),
            "deep": nn.Sequential(
                EmbeddingCollection([EmbeddingConfig(7, 257, "user", data_type=DataType.BF16)], device=META)
            ),
        }
    )


def on_cpu(world_size: int, cap: int | None = None, local_world_size: int | None = None) -> Topology:
    return Topology(world_size, "cpu", ddr_cap=cap, local_world_size=local_world_size)


def sizes(plan: ShardingPlan) -> dict[str, dict[str, tuple[int, int]]]:
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for path, table, sharding in plan.tables():
        assert sharding.tiling is not None
        found.setdefault(path, {})[table] = (sharding.tiling.rows, sharding.tiling.dim)
    return found


def test_every_collection_is_planned_under_its_path() -> None:
    plan = EmbeddingShardingPlanner(on_cpu(4, local_world_size=2)).plan(model())
    want = {"ebc": {"user": (1000, 64), "item": (10, 3)}, "deep.0": {"user": (7, 257)}}
    assert sizes(plan) == want
    plan.check(want, 4)
    assert plan.hosts == ((0, 1), (2, 3))
    assert plan.plan["deep.0"]["user"].data_type is DataType.BF16
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_a_collection_itself_is_planned_under_no_path() -> None:
    assert list(EmbeddingShardingPlanner(on_cpu(2)).plan(model()["ebc"]).plan) == [""]  # type: ignore[index]


def test_signatures_are_those_that_users_know() -> None:
    assert list(inspect.signature(EmbeddingShardingPlanner).parameters) == [
        "topology",
        "batch_size",
        "enumerator",
        "storage_reservation",
        "proposer",
        "partitioner",
        "performance_model",
        "stats",
        "constraints",
        "debug",
        "callbacks",
        "timeout_seconds",
        "plan_loader",
        "fixed",
        "cache",
        "effort",
    ]
    assert list(inspect.signature(EmbeddingShardingPlanner.collective_plan).parameters) == [
        "self",
        "module",
        "sharders",
        "pg",
    ]
    for name in ("EmbeddingShardingPlanner", "ParameterConstraints", "Topology", "ShardingPlan"):
        assert getattr(tilerec, name).__name__ == name


@pytest.mark.parametrize("kind", [kind for kind in ShardingType if kind is not ShardingType.EXPLICIT])
def test_constraints_are_honoured_under_every_name(kind: ShardingType) -> None:
    planner = EmbeddingShardingPlanner(
        on_cpu(4, local_world_size=2), constraints={"user": ParameterConstraints([kind])}
    )
    plan = planner.plan(model())
    assert plan.plan["ebc"]["user"].kind is kind
    assert plan.plan["deep.0"]["user"].kind is kind
    plan.check(sizes(plan), 4)


def test_min_partition_cuts_columns_no_narrower() -> None:
    limits = ParameterConstraints([ShardingType.COLUMN_WISE], min_partition=32)
    plan = EmbeddingShardingPlanner(on_cpu(4), constraints={"user": limits}).plan(model())
    tiling = plan.plan["ebc"]["user"].tiling
    assert tiling is not None
    assert [block.c1 - block.c0 for block in tiling.blocks] == [32, 32]


def test_kernels_follow_the_attached_optimizer_and_the_constraints() -> None:
    module = model()
    apply_optimizer_in_backward(RowWiseAdagrad(), [module["ebc"].embedding_bags["user"].weight])  # type: ignore[index, union-attr]
    plan = EmbeddingShardingPlanner(on_cpu(2)).plan(module)
    assert plan.plan["ebc"]["user"].kernel.value == "fused"
    assert plan.plan["ebc"]["item"].kernel is None

    def kernel_of_item(sharders: list[Any] | None = None, **kwargs: object) -> str | None:
        limits = {"item": ParameterConstraints(**kwargs)}  # type: ignore[arg-type]
        planner = EmbeddingShardingPlanner(on_cpu(2), constraints=limits)
        kernel = planner.plan(module, sharders).plan["ebc"]["item"].kernel
        return kernel and kernel.value

    assert kernel_of_item(compute_kernels=["fused"]) == "fused"
    assert kernel_of_item(compute_kernels=["dense"]) == "dense"
    assert kernel_of_item(compute_kernels=["fused", "dense"]) is None
    assert kernel_of_item(compute_kernels=["fused_uvm_caching", "fused"]) == "fused"
    pooled, sequence = (
        [kind({"learning_rate": 0.1})] for kind in (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder)
    )
    assert kernel_of_item(pooled) == "fused"
    assert kernel_of_item(pooled, compute_kernels=["dense"]) == "dense"
    assert kernel_of_item(sequence) is None
    assert kernel_of_item(pooled, compute_kernels=["fused_uvm"]) == "fused_uvm"
    with pytest.warns(UserWarning, match="got compute_kernel 'ssd_virtual_table', which acts as 'fused' here"):
        assert kernel_of_item(compute_kernels=["ssd_virtual_table"]) == "ssd_virtual_table"


def test_a_kernel_that_contradicts_the_attached_optimizer_is_refused() -> None:
    module = model()
    apply_optimizer_in_backward(RowWiseAdagrad(), list(module["ebc"].parameters()))  # type: ignore[index]
    limits = {"item": ParameterConstraints(compute_kernels=["dense"])}
    with pytest.raises(ConfigError, match=r"Table 'item' of module 'ebc': an optimizer is attached, .* does not allow"):
        EmbeddingShardingPlanner(on_cpu(2), constraints=limits).plan(module)


def test_pooling_factors_go_into_the_plan() -> None:
    limits = {"item": ParameterConstraints(pooling_factors=[1.0])}
    plan = EmbeddingShardingPlanner(on_cpu(2), constraints=limits).plan(model())
    assert plan.plan["ebc"]["item"].ids_per_bag == 1.0
    assert plan.plan["ebc"]["user"].ids_per_bag is None


def test_state_of_the_optimizer_counts() -> None:
    module = EmbeddingBagCollection([EmbeddingBagConfig(1000, 64, "t")], device=META)
    limits = {"t": ParameterConstraints(["table_wise"])}
    planner = EmbeddingShardingPlanner(
        on_cpu(1, cap=2 * 1000 * 64 * 4 + BATCH), constraints=limits, storage_reservation=NOTHING
    )
    planner.plan(module)
    apply_optimizer_in_backward(Adam(), list(module.parameters()))
    with pytest.raises(PlannerError, match=r"no piece of table 't' .* fits"):
        planner.plan(module)


def test_a_table_that_two_collections_share_is_placed_once() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "x", feature_names=["f"])])
    ec = EmbeddingCollection([EmbeddingConfig(10, 4, "z", feature_names=["g"])])
    ec.embeddings["z"] = ebc.embedding_bags["x"]
    both = nn.ModuleDict({"ebc": ebc, "ec": ec})
    limits = {"z": ParameterConstraints(["row_wise"])}
    plan = EmbeddingShardingPlanner(on_cpu(2), constraints=limits).plan(both)
    assert plan.plan["ebc"]["x"] == plan.plan["ec"]["z"]
    assert plan.plan["ebc"]["x"].kind is ShardingType.ROW_WISE


def test_constraints_for_no_table_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"constraints name \['usr'\], which is no table .* \['item', 'user'\]"):
        EmbeddingShardingPlanner(on_cpu(2), constraints={"usr": ParameterConstraints()}).plan(model())
    with pytest.raises(ConfigError, match=r"constraints\['user'\] is a list"):
        EmbeddingShardingPlanner(on_cpu(2), constraints={"user": ["row_wise"]})  # type: ignore[dict-item]


def test_the_names_closest_to_a_constraint_for_no_table_are_told() -> None:
    limits = {"usr": ParameterConstraints(), "x": ParameterConstraints()}
    with pytest.raises(ConfigError, match=r"\['usr', 'x'\].* Close are 'user' for 'usr'\."):
        EmbeddingShardingPlanner(on_cpu(2), constraints=limits).plan(model())


def test_every_collection_is_planned_whichever_sharders_are_given() -> None:
    """Sharding places every table; a plan without those that no sharder speaks of would be refused."""
    planner = EmbeddingShardingPlanner(on_cpu(2))
    for sharders in (None, [], [EmbeddingBagCollectionSharder()]):
        assert list(planner.plan(model(), sharders).plan) == ["ebc", "deep.0"]


def test_the_optimizer_that_a_sharder_gives_counts_for_its_kind() -> None:
    module = EmbeddingBagCollection([EmbeddingBagConfig(1000, 64, "t")], device=META)
    cap = 2 * 1000 * 64 * 4 + BATCH
    planner = EmbeddingShardingPlanner(on_cpu(1, cap=cap), storage_reservation=NOTHING)
    planner.plan(module, [EmbeddingBagCollectionSharder({"optimizer": "sgd"})])
    planner.plan(module, [EmbeddingCollectionSharder({"optimizer": "adam"})])
    adam = [EmbeddingBagCollectionSharder({"optimizer": "adam"})]
    with pytest.raises(PlannerError, match=r"no piece of table 't' .* fits"):
        planner.plan(module, adam)
    dense = {"t": ParameterConstraints(compute_kernels=["dense"])}
    EmbeddingShardingPlanner(planner.topology, constraints=dense, storage_reservation=NOTHING).plan(module, adam)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            EmbeddingBagCollectionSharder(),
            r"sharders is a EmbeddingBagCollectionSharder; wanted a list .*sharders=\[Embedd",
        ),
        (EmbeddingBagCollectionSharder, r"sharders is a EmbeddingBagCollectionSharder; wanted a list"),
        (
            [EmbeddingBagCollectionSharder],
            r"sharders\[0\] is the class EmbeddingBagCollectionSharder; wanted",
        ),
        ([EmbeddingBagCollectionSharder(), None], r"sharders\[1\] is a NoneType; wanted a sharder"),
        (
            [EmbeddingBagCollectionSharder()] * 2,
            r"sharders\[0\] and sharders\[1\] are both for EmbeddingBag",
        ),
    ],
)
def test_what_are_no_sharders_is_refused_with_the_next_move(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddingShardingPlanner(on_cpu(2)).plan(model(), wrong)


def test_a_model_without_tables_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear has no embedding collection"):
        EmbeddingShardingPlanner(on_cpu(2)).plan(nn.Linear(1, 1))


def test_arguments_without_effect_warn() -> None:
    with pytest.warns(UserWarning, match="EmbeddingShardingPlanner: proposer, stats have no effect"):
        EmbeddingShardingPlanner(on_cpu(2), 512, proposer=GreedyProposer(), stats=[])
    with pytest.warns(UserWarning, match=r"of the constraints, use_virtual_table \(of a, b\) has no effect"):
        EmbeddingShardingPlanner(
            on_cpu(2),
            constraints={
                "a": ParameterConstraints(use_virtual_table=True),
                "b": ParameterConstraints(use_virtual_table=True, min_partition=4),
            },
        )


def test_without_a_topology_the_launcher_says_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    plan = EmbeddingShardingPlanner().plan(model())
    assert (plan.world_size, plan.hosts) == (4, ((0, 1), (2, 3)))
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    alone = EmbeddingShardingPlanner().collective_plan(model())
    assert alone.world_size == 1


def test_ranks_plan_the_same_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def plan(group: Group) -> ShardingPlan:
        return EmbeddingShardingPlanner().collective_plan(model(), pg=group)

    plans = run_virtual_ranks(4, plan)
    assert all(each == plans[0] for each in plans)
    assert plans[0].hosts == ((0, 1), (2, 3))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert run_virtual_ranks(2, plan)[0].hosts == ((0, 1),)


def test_a_process_group_gives_the_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plan = EmbeddingShardingPlanner().collective_plan(model())
        assert (plan.world_size, plan.hosts) == (1, ((0,),))
        made = construct_module_sharding_plan(model()["ebc"], {"user": row_wise(), "item": row_wise()})  # type: ignore[index]
        assert made["user"].ranks == (0,)
        with pytest.raises(ConfigError, match="the topology has 2 ranks and the group 1"):
            EmbeddingShardingPlanner(on_cpu(2)).collective_plan(model())
    finally:
        dist.destroy_process_group()


def test_ranks_that_plan_otherwise_are_told_where() -> None:
    def plan(group: Group) -> ShardingPlan:
        limits = {"user": ParameterConstraints(["row_wise" if group.rank else "table_wise"])}
        return EmbeddingShardingPlanner(on_cpu(3), constraints=limits).collective_plan(model(), pg=group)

    with pytest.raises(
        ConfigError, match=r"The plan differs between ranks: .*\['deep.0.user'\].*sharding_types.* on rank 0"
    ):
        run_virtual_ranks(3, plan)


def test_a_topology_of_another_world_is_refused() -> None:
    def plan(group: Group) -> ShardingPlan:
        return EmbeddingShardingPlanner(on_cpu(8)).collective_plan(model(), pg=group)

    with pytest.raises(ConfigError, match="the topology has 8 ranks and the group 2"):
        run_virtual_ranks(2, plan)


def test_the_topology_of_one_sharding_group_gives_a_plan_of_it_on_all_ranks() -> None:
    def plan(group: Group, size: int) -> ShardingPlan:
        return EmbeddingShardingPlanner(on_cpu(size)).collective_plan(model(), pg=group)

    plans = run_virtual_ranks(4, plan, 2)
    assert all(made == plans[0] for made in plans)
    assert plans[0].world_size == 2
    with pytest.raises(ConfigError, match="or of one sharding group of DMPCollection, whose size divides it"):
        run_virtual_ranks(4, plan, 3)


def test_a_rank_that_cannot_plan_makes_all_of_them_fail() -> None:
    def plan(group: Group) -> ShardingPlan:
        limits = {"usr" if group.rank else "user": ParameterConstraints()}
        return EmbeddingShardingPlanner(on_cpu(2), constraints=limits).collective_plan(model(), pg=group)

    with pytest.raises(ConfigError, match=r"constraints name \['usr'\]|checks.*is .*passed.* on rank 0"):
        run_virtual_ranks(2, plan)


def test_the_topology_of_rank_0_is_everyones() -> None:
    def plan(group: Group) -> ShardingPlan:
        topology = Topology(2, "cpu", ddr_cap=2**30 * (1 + group.rank))
        return EmbeddingShardingPlanner(topology).collective_plan(model(), pg=group)

    one, other = run_virtual_ranks(2, plan)
    assert one == other
    assert other.report.topology.ddr_cap == 2**30


def test_a_plan_has_a_report_that_is_no_part_of_it() -> None:
    plan = EmbeddingShardingPlanner(on_cpu(4, local_world_size=2), batch_size=64).plan(model())
    report = plan.report
    assert report.cost_s >= report.bound_s > 0
    assert report.gap == (report.cost_s - report.bound_s) / report.bound_s or report.gap >= 0
    assert len(report.memory_per_rank) == 4
    assert sum(report.stage_s.values()) <= report.cost_s
    assert report.batch_size == 64
    assert [(entry.path, entry.name) for entry in report.tables] == [
        ("ebc", "user"), ("ebc", "item"), ("deep.0", "user"),
    ]  # fmt: skip
    assert "report" not in plan.to_json()
    assert ShardingPlan.from_json(plan.to_json()) == plan


def test_a_list_of_tables_is_planned_as_the_collection_of_them() -> None:
    configs = [EmbeddingBagConfig(1000, 64, "user"), EmbeddingBagConfig(10, 4, "item")]
    planner = EmbeddingShardingPlanner(on_cpu(2))
    sharders = [EmbeddingBagCollectionSharder({"optimizer": "adam"})]
    module = EmbeddingBagCollection(configs, device=META)
    assert planner.plan(configs, sharders) == planner.plan(module, sharders)
    with pytest.raises(ConfigError, match="Table 'user' occurs twice"):
        planner.plan([configs[0], configs[0]])
    with pytest.raises(ConfigError, match="the list of tables is empty"):
        planner.plan([])
    with pytest.raises(ConfigError, match="got a dict among the tables"):
        planner.plan([{"name": "x"}])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="module is a str"):
        planner.plan("model")  # type: ignore[arg-type]


def test_parts_of_a_plan_by_hand_stay_and_the_rest_is_planned_around_them(tmp_path: Path) -> None:
    tables = [EmbeddingBagConfig(100_000, 64, f"t{i}") for i in range(4)]
    module = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables, device=META)})
    by_hand = {
        "ebc": {
            "t0": ParameterSharding("table_wise", ranks=[1]),
            "t1": ParameterSharding("table_wise", ranks=[1]),
        }
    }
    cap = int(2.5 * 2 * 100_000 * 64 * 4)
    free = {f"t{i}": ParameterConstraints(["table_wise"]) for i in (2, 3)}
    planner = EmbeddingShardingPlanner(on_cpu(2, cap=cap), fixed=by_hand, constraints=free, storage_reservation=NOTHING)
    plan = planner.plan(module)
    assert [plan.plan["ebc"][f"t{i}"].ranks for i in range(4)] == [(1,), (1,), (0,), (0,)]
    path = tmp_path / "plan.json"
    plan.save(path)
    again = EmbeddingShardingPlanner(on_cpu(2), fixed=path).plan(module)
    assert again.plan["ebc"] == plan.plan["ebc"]
    assert again.report.gap == 0
    with pytest.raises(ConfigError, match="made for 2 ranks, and the topology has 3"):
        EmbeddingShardingPlanner(on_cpu(3), fixed=path).plan(module)
    with pytest.raises(ConfigError, match="fixed= has a table 't9' of module 'ebc', which the model lacks"):
        EmbeddingShardingPlanner(on_cpu(2), fixed={"ebc": {"t9": by_hand["ebc"]["t0"]}}).plan(module)
    with pytest.raises(ConfigError, match=r"fixed\['ebc'\] is or has a str"):
        EmbeddingShardingPlanner(on_cpu(2), fixed={"ebc": {"t0": "row_wise"}})  # type: ignore[dict-item]
    limits = {"t0": ParameterConstraints(["row_wise"])}
    both = EmbeddingShardingPlanner(on_cpu(2), fixed=by_hand, constraints=limits)
    with pytest.raises(ConfigError, match=r"Table 't0' .* in fixed=, and .* sharding_types cannot restrict it"):
        both.plan(module)


def test_a_model_without_a_plan_is_planned_and_keeps_the_report() -> None:
    def sharded(group: Group) -> Any:
        ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t")])
        return tilerec.shard(ebc, mesh=group).plan.report  # type: ignore[union-attr]

    first, second = run_virtual_ranks(2, sharded)
    assert first.cost_ps == second.cost_ps > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"topology": 8}, "topology is a int, wanted a Topology"),
        ({"storage_reservation": 0.1}, "storage_reservation is a float, wanted one of tilerec.planner"),
        ({"fixed": 3}, "fixed is a int; wanted a ShardingPlan"),
    ],
)
def test_what_is_none_of_a_planners_parts_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddingShardingPlanner(**wrong)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, float("nan")])
def test_a_batch_size_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="batch_size is"):
        EmbeddingShardingPlanner(on_cpu(2), wrong).plan(model())


def test_ten_billion_rows_are_planned_without_memory() -> None:
    module = EmbeddingBagCollection(
        [EmbeddingBagConfig(10**10, 64, "huge"), EmbeddingBagConfig(10, 4, "tiny")], device=META
    )
    topology = Topology(64, "cuda", hbm_cap=2**37, local_world_size=8)
    plan = EmbeddingShardingPlanner(topology).plan(module)
    assert max(plan.report.memory_per_rank) <= 2**37
    cells = sum(
        r.cells for rank in range(64) for held in plan.held_by(rank) if held.table == "huge" for r in held.rectangles
    )
    assert cells == 10**10 * 64


def test_other_inputs_are_named_even_where_they_leave_a_rank_no_plan() -> None:
    def plan(group: Group) -> str:
        limits = {"user": ParameterConstraints(["table_wise"])} if group.rank else {}
        planner = EmbeddingShardingPlanner(Topology(2, "cpu", ddr_cap=1000), constraints=limits)
        with pytest.raises(ConfigError) as caught:
            planner.collective_plan(model(), pg=group)
        return str(caught.value)

    for text in run_virtual_ranks(2, plan):
        assert "The plan differs between ranks: inputs.tables" in text
        assert ".constraints is missing on rank 0 and there on rank 1" in text


def test_a_rank_with_a_broken_part_of_its_own_leaves_nobody_waiting() -> None:
    class Broken(StorageReservation):
        def reserved(self, cap: int, module: nn.Module | None, input_bytes: int) -> int:
            raise RuntimeError("no such figure")

    def plan(group: Group) -> str:
        reserve = Broken() if group.rank else None
        planner = EmbeddingShardingPlanner(on_cpu(3), storage_reservation=reserve)
        with pytest.raises((ConfigError, RuntimeError)) as caught:
            planner.collective_plan(model(), pg=group)
        return str(caught.value)

    told, *own = run_virtual_ranks(3, plan)
    assert "'RuntimeError: no such figure' on ranks 1, 2" in told
    assert own == ["no such figure"] * 2


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"constraints": [ParameterConstraints()]}, "constraints is a list, wanted a dict"),
        ({"constraints": {3: ParameterConstraints()}}, "constraints name 3, wanted names of tables"),
        ({"cache": 3}, "cache is a int, wanted the path of a folder"),
        ({"fixed": "nowhere/plan.json"}, r"the plan in fixed= cannot be read: .*nowhere/plan.json"),
        ({"fixed": "/"}, r"the plan in fixed= cannot be read"),
    ],
)
def test_arguments_of_another_kind_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EmbeddingShardingPlanner(**kwargs)


def test_a_table_is_given_by_hand_once() -> None:
    pin, other = ParameterSharding("table_wise", ranks=[1]), ParameterSharding("table_wise", ranks=[0])
    planner = EmbeddingShardingPlanner(
        on_cpu(2), constraints={"item": ParameterConstraints(sharding=pin)}, fixed={"ebc": {"item": other}}
    )
    with pytest.raises(
        ConfigError, match=r"Table 'item' of module 'ebc': got both fixed= and the sharding= of its constr"
    ):
        planner.plan(model())


def test_a_collection_among_the_sharders_is_not_proposed_as_one() -> None:
    with pytest.raises(ConfigError, match=r"is the class EmbeddingBagCollection; wanted a sharder of tilerec.parallel"):
        EmbeddingShardingPlanner(on_cpu(2)).plan(model(), [EmbeddingBagCollection])  # type: ignore[list-item]
