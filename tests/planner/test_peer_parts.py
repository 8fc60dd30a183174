"""Set-ups of TorchRec's planner run with the import changed."""

from __future__ import annotations

import pytest

from tilerec.planner import (
    DynamicProgrammingProposer,
    EmbeddingEnumerator,
    EmbeddingOffloadScaleupProposer,
    EmbeddingPerfEstimator,
    EmbeddingShardingPlanner,
    EmbeddingStats,
    EmbeddingStorageEstimator,
    GreedyPerfPartitioner,
    GreedyProposer,
    GridSearchProposer,
    HeuristicalStorageReservation,
    MemoryBalancedPartitioner,
    NoopEmbeddingStats,
    NoopPerfModel,
    NoopStorageModel,
    ParameterConstraints,
    SortBy,
    Topology,
    UniformProposer,
)
from tilerec.spec.table import EmbeddingBagConfig


def test_a_planner_set_up_as_for_torchrec_plans_and_says_once_what_it_does_not_use() -> None:
    topology = Topology(world_size=8, compute_device="cuda", hbm_cap=2**30, local_world_size=4)
    constraints = {
        "t": ParameterConstraints(sharding_types=["row_wise", "table_wise"], pooling_factors=[12.0])
    }
    with pytest.warns(UserWarning, match="have no effect") as caught:
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=1024,
            enumerator=EmbeddingEnumerator(
                topology=topology,
                batch_size=1024,
                constraints=constraints,
                estimator=[
                    EmbeddingPerfEstimator(topology=topology, constraints=constraints),
                    EmbeddingStorageEstimator(topology=topology, constraints=constraints),
                ],
            ),
            storage_reservation=HeuristicalStorageReservation(percentage=0.15),
            proposer=[GridSearchProposer(), GreedyProposer(use_depth=False), UniformProposer()],
            partitioner=GreedyPerfPartitioner(sort_by=SortBy.PERF, balance_modules=True),
            performance_model=NoopPerfModel(topology=topology),
            stats=EmbeddingStats(),
            constraints=constraints,
            debug=False,
        )
    assert len(caught) == 1
    assert "enumerator, proposer, partitioner, performance_model, stats have no effect" in str(
        caught[0].message
    )
    plan = planner.plan([EmbeddingBagConfig(100_000, 64, "t")])
    assert plan.plan[""]["t"].kind.value in ("row_wise", "table_wise")
    assert plan.plan[""]["t"].ids_per_bag == 12.0


def test_parts_keep_what_they_were_made_with() -> None:
    assert DynamicProgrammingProposer().arguments == {"hbm_bins_per_device": 100}
    assert EmbeddingOffloadScaleupProposer(False).arguments == {"use_depth": False}
    assert MemoryBalancedPartitioner(tolerance=0.1).arguments == {
        "max_search_count": 10, "tolerance": 0.1, "balance_modules": False,
    }  # fmt: skip
    assert NoopStorageModel(3).arguments == {"topology": 3}
    assert NoopEmbeddingStats().arguments == {}
