"""TorchRec's planner: stock parts are ignored with a word, a program's own parts make the plan."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import tilerec
from tilerec.compat.planner.enumerator import EmbeddingEnumerator, EmbeddingPerfEstimator, EmbeddingStorageEstimator
from tilerec.compat.planner.machine import Topology
from tilerec.compat.planner.partitioners import (
    GreedyPerfPartitioner,
    MemoryBalancedPartitioner,
    NoopPerfModel,
    NoopStorageModel,
    SortBy,
)
from tilerec.compat.planner.planner import EmbeddingShardingPlanner, EmbeddingStats, NoopEmbeddingStats
from tilerec.compat.planner.proposers import (
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
    proposers_to_proposals_list,
)
from tilerec.compat.planner.types import Perf, ShardEstimator, ShardingOption, Storage
from tilerec.compat.sharders import EmbeddingBagCollectionSharder
from tilerec.optim.rowwise_adagrad import RowWiseAdagrad
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.planner_error import PlannerError
from tilerec.spec.plan import EmbeddingComputeKernel

SHARDERS = [EmbeddingBagCollectionSharder({"learning_rate": 0.1})]


def model() -> nn.Module:
    tables = [tilerec.EmbeddingBagConfig(1000 * (i + 1), 256, f"t{i}", feature_names=[f"f{i}"]) for i in range(3)]
    return nn.Sequential(tilerec.EmbeddingBagCollection(tables, device="meta"))


@pytest.fixture(scope="module")
def topology() -> Topology:
    return Topology(4, "cuda", local_world_size=2)


@pytest.fixture(scope="module")
def options(topology: Topology) -> list[ShardingOption]:
    return EmbeddingEnumerator(topology, batch_size=64).enumerate(model(), SHARDERS)


def test_options_of_a_table_cover_it_once_per_type(options: list[ShardingOption]) -> None:
    assert {option.fqn for option in options} == {"0.t0", "0.t1", "0.t2"}
    own = {option.sharding_type: option for option in options if option.name == "t0"}
    assert len(own) == 7
    for kind, option in own.items():
        copies = 4 if kind == "data_parallel" else 1
        assert sum(s.size[0] * s.size[1] for s in option.shards) == copies * 1000 * 256
        assert option.total_storage.hbm > copies * 1000 * 256 * 4
        assert option.total_perf > 0
    assert [(s.size, s.offset) for s in own["column_wise"].shards] == [([1000, 128], [0, 0]), ([1000, 128], [0, 128])]
    assert [s.offset[0] for s in own["row_wise"].shards] == [0, 250, 500, 750]


def test_own_estimators_set_the_costs(topology: Topology) -> None:
    class Flat(ShardEstimator):
        def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any = None) -> None:
            for shard in [shard for option in sharding_options for shard in option.shards]:
                shard.perf, shard.storage = Perf(1, 0, 0, 0), Storage(5, 0)

    constraints = {f"t{i}": ParameterConstraints(sharding_types=["row_wise"]) for i in range(3)}
    stock = [EmbeddingPerfEstimator(topology, constraints), EmbeddingStorageEstimator(topology, constraints)]
    found = EmbeddingEnumerator(topology, 64, constraints, estimator=[*stock, Flat(topology)]).enumerate(model(), [])
    assert [option.total_perf for option in found] == [4, 4, 4]
    stock[0].estimate(found)
    assert found[0].total_perf != 4


def test_proposers_propose_one_option_per_table(options: list[ShardingOption]) -> None:
    greedy, uniform, grid = (
        proposers_to_proposals_list([proposer], options)
        for proposer in (GreedyProposer(threshold=5), UniformProposer(), GridSearchProposer(400))
    )
    assert len(greedy) == 5
    assert all([option.name for option in proposal] == ["t0", "t1", "t2"] for proposal in greedy)
    assert sum(o.total_perf for o in greedy[0]) <= sum(o.total_perf for o in greedy[1])
    assert len(uniform) == 7
    assert all(len({option.sharding_type for option in proposal}) == 1 for proposal in uniform)
    assert len(grid) == 7**3
    assert proposers_to_proposals_list([GridSearchProposer(10)], options) == []


def test_partitioners_place_every_shard_within_memory(topology: Topology, options: list[ShardingOption]) -> None:
    for proposal in proposers_to_proposals_list([UniformProposer()], options):
        plan = GreedyPerfPartitioner(sort_by=SortBy.PERF, balance_modules=True).partition(proposal, topology)
        assert all(rank is not None for option in plan for rank in option.get_shards_assignment())
        assert proposal[0].shards[0].rank is None
        assert NoopPerfModel(topology).rate(plan) > 0
        assert NoopStorageModel(topology).rate(plan) > 0
        if proposal[0].sharding_type == "table_row_wise":
            assert all(option.shards[0].rank // 2 == option.shards[1].rank // 2 for option in plan)  # type: ignore[operator]
    small = Topology(4, "cuda", hbm_cap=2**20, local_world_size=2)
    with pytest.raises(PlannerError, match="no rank has room for it"):
        MemoryBalancedPartitioner().partition([copy.deepcopy(options[1])], small)


def test_a_programs_own_proposer_makes_the_plan(topology: Topology) -> None:
    class RowsOnly(UniformProposer):
        def load(self, search_space: list[ShardingOption], enumerator: Any = None) -> None:
            super().load([option for option in search_space if option.sharding_type == "row_wise"], enumerator)

    plan = EmbeddingShardingPlanner(topology, 64, proposer=[RowsOnly()]).plan(model(), SHARDERS)
    assert {sharding.kind.value for _, _, sharding in plan.tables()} == {"row_wise"}
    assert all(list(sharding.ranks or ()) == [0, 1, 2, 3] for _, _, sharding in plan.tables())
    with pytest.raises(PlannerError, match="got no proposal"):
        EmbeddingShardingPlanner(topology, 64, proposer=_Silent()).plan(model(), SHARDERS)


class _Silent(UniformProposer):
    def propose(self) -> None:
        return None


def test_stock_parts_are_ignored_with_one_warning(topology: Topology, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(UserWarning, match="enumerator, proposer, partitioner, performance_model have no effect"):
        planner = EmbeddingShardingPlanner(
            topology, 64, EmbeddingEnumerator(topology, 64), None, [GreedyProposer()], GreedyPerfPartitioner(),
            NoopPerfModel(topology), [EmbeddingStats(), NoopEmbeddingStats()],
        )  # fmt: skip
    plan = planner.plan(model(), SHARDERS)
    assert {name for _, name, _ in plan.tables()} == {"t0", "t1", "t2"}
    assert "t0" in capsys.readouterr().out


def test_a_dense_table_leaves_its_attached_optimizer_to_the_dense_one() -> None:
    ebc = tilerec.EmbeddingBagCollection([tilerec.EmbeddingBagConfig(10, 4, "t", feature_names=["f"])])
    tilerec.apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    limits = {"t": ParameterConstraints(sharding_types=["data_parallel"], compute_kernels=["dense"])}
    plan = EmbeddingShardingPlanner(Topology(2, "cpu"), constraints=limits).plan(ebc)
    (sharding,) = [own for _, _, own in plan.tables()]
    assert sharding.kernel is EmbeddingComputeKernel.DENSE
    features = tilerec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1]), torch.tensor([1]))
    ebc(features).values().sum().backward()
    assert ebc.embedding_bags["t"].weight.grad is not None
