"""Set-ups of TorchRec's planner run with the import changed."""

from __future__ import annotations

import pytest

from tilerec.compat.planner_parts import (
    BasicCommsBandwidths,
    CustomTopologyData,
    DynamicProgrammingProposer,
    EmbeddingEnumerator,
    EmbeddingOffloadScaleupProposer,
    EmbeddingPerfEstimator,
    EmbeddingStats,
    EmbeddingStorageEstimator,
    GreedyPerfPartitioner,
    GreedyProposer,
    GridSearchProposer,
    MemoryBalancedPartitioner,
    NoopEmbeddingStats,
    NoopPerfModel,
    NoopStorageModel,
    SortBy,
    UniformProposer,
)
from tilerec.errors import ConfigError
from tilerec.planner import (
    EmbeddingShardingPlanner,
    HeuristicalStorageReservation,
    ParameterConstraints,
    Topology,
)
from tilerec.spec.table import EmbeddingBagConfig


def test_a_planner_set_up_as_for_torchrec_plans_and_says_once_what_it_does_not_use() -> None:
    topology = Topology(world_size=8, compute_device="cuda", hbm_cap=2**30, local_world_size=4)
    constraints = {"t": ParameterConstraints(sharding_types=["row_wise", "table_wise"], pooling_factors=[12.0])}
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
    assert "enumerator, proposer, partitioner, performance_model, stats have no effect" in str(caught[0].message)
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


def test_topologies_are_set_up_as_for_torchrec() -> None:
    with pytest.warns(UserWarning, match="Topology: got settings without effect: bwd_compute_multiplier") as caught:
        topology = Topology(
            world_size=2,
            compute_device="cuda",
            bwd_compute_multiplier=2.0,
            custom_topology_data=CustomTopologyData({"hbm_cap": [10, 20], "ddr_cap": [5, 5]}, world_size=2),
            weighted_feature_bwd_compute_multiplier=1.0,
            uneven_sharding_perf_multiplier=1.0,
            generalized_comms_bandwidths=BasicCommsBandwidths(inter_host_bw=3.0, intra_host_bw=4.0),
            created_by_factory=True,
        )
    assert len(caught) == 1
    assert (topology.hbm_caps, topology.ddr_caps, topology.ddr_cap) == ((10, 20), None, 5)
    assert (topology.inter_host_bw, topology.intra_host_bw) == (3.0, 4.0)
    with pytest.raises(ConfigError, match="CustomTopologyData: data: got key 'disk'; expected one of"):
        CustomTopologyData({"disk": [1, 2]}, 2)
    with pytest.raises(ConfigError, match="hbm_cap: got 1 numbers; expected 2"):
        CustomTopologyData({"hbm_cap": [1]}, 2)
    with pytest.raises(ConfigError, match="got key 'ddr_cap'; expected"):
        CustomTopologyData({"hbm_cap": [1]}, 1).get_data("ddr_cap")
