"""Troubles of the field with plans. Names say the trouble; numbers are threads of meta-pytorch/torchrec."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.troubles.world import HOSTS, SIZE, flat
from tilerec.comms.group import Group
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.helpers import construct_module_sharding_plan, table_column_wise
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.sharders.table_sharders import get_default_sharders
from tilerec.spec.optimizer import SGD
from tilerec.spec.plan import ParameterSharding, ShardingPlan
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.topology import Topology
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks

# ---------------------------------------------------------- 2282: planning many tables outlives the time-out


def thousand_tables() -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(1000 + 997 * i, 16 * (1 + i % 8), f"t{i}", feature_names=[f"f{i}"]) for i in range(1000)
    ]
    return EmbeddingBagCollection(tables, device="meta")


def test_2282_a_thousand_tables_are_planned_by_each_rank_alone() -> None:
    """No process group exists here, so nobody can be kept waiting in one."""
    assert not torch.distributed.is_initialized()
    plan = EmbeddingShardingPlanner(topology=Topology(64, "cpu", local_world_size=8)).plan(thousand_tables())
    assert len(plan.plan[""]) == 1000
    plan.check({"": {f"t{i}": (1000 + 997 * i, 16 * (1 + i % 8)) for i in range(1000)}}, 64)


class Counting:
    """A group that counts the calls it passes on."""

    def __init__(self, group: Group) -> None:
        self.group, self.calls = group, 0
        original = group.all_gather_object

        def counted(value: object) -> list[object]:
            self.calls += 1
            # Rank 0's topology first, from it alone; then digests.
            said = json.dumps(value) if value is None or isinstance(value, dict) else value
            assert len(said) <= ((1000 if group.rank == 0 else 4) if self.calls == 1 else 16)  # type: ignore[arg-type]
            return original(value)

        group.all_gather_object = counted  # type: ignore[method-assign]


def test_2282_a_collective_plan_takes_rank_0s_topology_and_two_messages_of_at_most_sixteen_bytes() -> None:
    tables = thousand_tables()
    planner = EmbeddingShardingPlanner(topology=Topology(SIZE, "cpu", hosts=HOSTS))

    def run(group: Group) -> tuple[int, str]:
        counting = Counting(group)
        plan = planner.collective_plan(tables, get_default_sharders(), group)
        assert group.traffic.total() == 0
        return counting.calls, plan.fingerprint()

    (calls, first), *others = run_virtual_ranks(SIZE, run)
    assert calls == 3  # the topology, whether every rank has planned, and digests
    assert {mark for _, mark in others} == {first}


# -------------------------------------------- 602, 1252, 2958: proposed and refused, or refused and possible

COLLECTIONS = {
    "pooled": lambda: EmbeddingBagCollection([EmbeddingBagConfig(8, 8, "t", feature_names=["f"])]),
    "sequence": lambda: EmbeddingCollection([EmbeddingConfig(8, 8, "t", feature_names=["f"])]),
}


@pytest.mark.parametrize("which", COLLECTIONS)
def test_1252_what_a_sharder_offers_the_planner_plans_and_shard_does_on_cpu(which: str) -> None:
    offers = []
    for sharder in get_default_sharders():
        if isinstance(COLLECTIONS[which](), sharder.module_type):
            for kind in sharder.sharding_types("cpu"):
                offers += [(kind, kernel) for kernel in sharder.compute_kernels(kind, "cpu")]
    assert len(offers) >= 14
    topology = Topology(SIZE, "cpu", hosts=HOSTS)

    def run(group: Group, kind: str, kernel: str) -> ShardingPlan:
        torch.manual_seed(0)
        module = COLLECTIONS[which]()
        if kernel == "fused":
            apply_optimizer_in_backward(SGD(lr=0.5), list(module.parameters()))
        limits = {"t": ParameterConstraints(sharding_types=[kind], compute_kernels=[kernel], min_partition=2)}
        plan = EmbeddingShardingPlanner(topology=topology, constraints=limits).plan(module)
        shard(module, plan=plan, mesh=group, topology=topology)
        before = full_state_dict(module)
        flat(module(random_batch(["f"], 8, 4, empty=0, seed=group.rank))).sum().backward()
        if kernel == "dense":
            torch.optim.SGD(module.parameters(), lr=0.5).step()
        (old,), (new,) = before.values(), full_state_dict(module).values()
        assert bool((old != new).any())
        return plan

    for virtual, (kind, kernel) in enumerate(offers):
        torch.manual_seed(virtual)
        first, *others = [plan.plan[""]["t"] for plan in run_virtual_ranks(SIZE, run, kind, kernel)]
        assert (first.sharding_type.value, first.compute_kernel.value) == (kind, kernel)
        assert all(other == first for other in others)


def test_602_a_wish_that_cannot_be_met_is_refused_with_table_and_reason() -> None:
    """Each rank holds half of the table, and not the whole of it."""
    module = EmbeddingBagCollection([EmbeddingBagConfig(400_000, 64, "t", feature_names=["f"])], device="meta")
    limits = {"t": ParameterConstraints(sharding_types=["table_wise"])}
    small = Topology(2, "cpu", ddr_cap=150 * 2**20)
    with pytest.raises(ValueError, match="no piece of table 't' that its constraints and sizes allow") as caught:
        EmbeddingShardingPlanner(topology=small, constraints=limits).plan(module)
    assert "a split by rows of 't', which sharding_types rule out" in str(caught.value)


# ----------------------------------------------------------- 2510: how many rows does a rank hold, after all


ROWS_2510 = 1_600_000_000
HELD = {
    "row_wise": ("0-15", "100,000,000 x 128"),
    "table_row_wise": ("8-15", "200,000,000 x 128"),
    "grid_shard": ("0-15", "200,000,000 x 64"),
}


@pytest.mark.parametrize("kind", HELD)
def test_2510_the_printed_plan_says_what_each_of_2_x_8_ranks_holds(kind: str) -> None:
    ranks, held = HELD[kind]
    own = {"table_row_wise": list(range(8, 16))}.get(kind)

    def run(group: Group) -> tuple[str, tuple[int, ...]]:
        module = EmbeddingBagCollection([EmbeddingBagConfig(ROWS_2510, 128, "t", feature_names=["f"])], device="meta")
        topology = Topology(16, "cpu", local_world_size=8)
        plan = {"t": ParameterSharding(kind, ranks=own)}
        shard(module, plan=plan, mesh=group, topology=topology, device="meta")
        (leaf,) = module.parameters()
        return str(module.plan), tuple(leaf.shape)

    outcomes = run_virtual_ranks(16, run)
    (line,) = [line for line in outcomes[0][0].splitlines() if kind in line]
    said = re.sub(r"(?<=\d),(?=\d)", "", " ".join(line.split()))
    assert f" {ranks} " in said
    assert held.replace(",", "") in said
    rows, columns = (int(word.replace(",", "")) for word in held.split(" x "))
    first = int(ranks.split("-")[0])
    assert [shape for _, shape in outcomes[first:]] == [(rows, columns)] * (16 - first)
    assert [shape for _, shape in outcomes[:first]] == [(0, 128)] * first


@pytest.mark.parametrize("planned", [False, True])
def test_1388_table_column_wise_gives_ranks_of_one_host_one_block_of_columns_each(planned: bool) -> None:
    module = EmbeddingBagCollection([EmbeddingBagConfig(8, 64, "t", feature_names=["f"])], device="meta")
    topology = Topology(16, "cpu", local_world_size=8)
    if planned:
        limits = {"t": ParameterConstraints(sharding_types=["table_column_wise"], min_partition=8)}
        sharding = EmbeddingShardingPlanner(topology=topology, constraints=limits).plan(module).plan[""]["t"]
    else:
        made = construct_module_sharding_plan(
            module, {"t": table_column_wise(host_index=1)}, local_size=8, world_size=16
        )
        sharding = made["t"]
    assert sharding.tiling is not None
    owners = [block.owners[0][0] for block in sharding.tiling.blocks]
    assert 1 < len(owners) == len(set(owners))
    assert planned or owners == list(range(8, 16))
    assert len({topology.host_of(rank) for rank in owners}) == 1
