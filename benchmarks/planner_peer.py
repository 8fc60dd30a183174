"""TorchRec's planner on a case of `planner.py`: run by it, in an environment that has TorchRec.

    python planner_peer.py case.json plan.json

Written from TorchRec's public interface. Seconds run from the built module to the written plan file.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

import torch


def main() -> None:
    warnings.filterwarnings("ignore")
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.planner.stats import NoopEmbeddingStats
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    case = json.loads(Path(sys.argv[1]).read_text())
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                num_embeddings=t["rows"], embedding_dim=t["dim"], name=t["name"], feature_names=t["features"]
            )
            for t in case["tables"]
        ],
        device=torch.device("meta"),
    )
    topology = Topology(
        world_size=case["ranks"], local_world_size=case["local"], compute_device="cuda", hbm_cap=case["hbm"]
    )
    constraints = {t["name"]: ParameterConstraints(pooling_factors=t["pooling"]) for t in case["tables"]}
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=case["batch"],
        storage_reservation=FixedPercentageStorageReservation(0.0),
        stats=[NoopEmbeddingStats()],
        constraints=constraints,
    )
    began = time.perf_counter()
    plan = planner.plan(module, [EmbeddingBagCollectionSharder()])
    tables = {}
    for name, sharding in next(iter(plan.plan.values())).items():
        row = {"type": sharding.sharding_type, "kernel": sharding.compute_kernel}
        if sharding.sharding_spec is None:  # a copy on every rank
            table = next(t for t in case["tables"] if t["name"] == name)
            row["shards"] = [[0, 0, table["rows"], table["dim"], rank] for rank in range(case["ranks"])]
        else:
            row["shards"] = [
                [*shard.shard_offsets, *shard.shard_sizes, shard.placement.rank()]
                for shard in sharding.sharding_spec.shards
            ]
        tables[name] = row
    written = json.dumps(tables)
    Path(sys.argv[2]).write_text(written)
    seconds = time.perf_counter() - began
    found = {"seconds": seconds, "plan": tables}
    if case["own"] is not None:
        constraints = {t["name"]: ParameterConstraints(pooling_factors=t["pooling"]) for t in case["tables"]}
        found["rating"] = rated(tables, case, module, topology, constraints)
        found["own rating"] = rated(case["own"], case, module, topology, constraints)
    Path(sys.argv[2]).write_text(json.dumps(found))


def rated(tables: dict, case: dict, module: object, topology: object, constraints: dict) -> float:
    """Milliseconds of the slowest rank of a plan, by TorchRec's estimator: shards are set on its own options."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
    from torchrec.distributed.planner.types import Shard

    enumerator = EmbeddingEnumerator(topology=topology, batch_size=case["batch"], constraints=constraints)
    options = enumerator.enumerate(module, [EmbeddingBagCollectionSharder()])
    chosen = {}
    for option in options:
        row = tables[option.name]
        kernel = "dense" if row["type"] == "data_parallel" else "fused"
        if option.sharding_type == row["type"] and option.compute_kernel == kernel:
            option.shards = [
                Shard(size=[rows, columns], offset=[r0, c0]) for r0, c0, rows, columns, _ in row["shards"]
            ]
            chosen[option.name] = option
    assert len(chosen) == len(tables), sorted(set(tables) - set(chosen))[:4]
    EmbeddingPerfEstimator(topology=topology, constraints=constraints).estimate(
        list(chosen.values()), enumerator._sharder_data_map
    )
    load = [0.0] * case["ranks"]
    for name, option in chosen.items():
        for shard, (*_, rank) in zip(option.shards, tables[name]["shards"], strict=True):
            load[rank] += shard.perf.total
    return max(load)


if __name__ == "__main__":
    main()
