"""TorchRec's planner on cases of `planner.py`, which runs this script in an environment with TorchRec.

    python planner_peer.py requests.json found.json

`requests.json` is a list of {"case": tables and machines, "search": whether to plan, "plans": shards by name,
"options": whether to list options}. `found.json` is the list of answers, each with

- the seconds and shards of TorchRec's own plan, if "search" is true;
- a rating of every plan;
- TorchRec's options for each table with their estimated costs, if "options" is true.

The script uses TorchRec's public interface only. Seconds run from the built module to the written plan. A rating is the
objective of TorchRec's search (`NoopPerfModel`): milliseconds of the slowest rank, summed over its shards.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch


class Peer:
    """TorchRec on one case."""

    def __init__(self, case: dict[str, Any]) -> None:
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.planner import ParameterConstraints, Topology
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        self.case = case
        self.module = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    num_embeddings=t["rows"],
                    embedding_dim=t["dim"],
                    name=t["name"],
                    feature_names=t["features"],
                )
                for t in case["tables"]
            ],
            device=torch.device("meta"),
        )
        self.topology = Topology(
            world_size=case["ranks"],
            local_world_size=case["local"],
            compute_device=case.get("device", "cuda"),
            hbm_cap=case["hbm"],
        )
        self.constraints = {t["name"]: ParameterConstraints(pooling_factors=t["pooling"]) for t in case["tables"]}
        self.sharders: Any = [EmbeddingBagCollectionSharder()]

    def plan(self) -> tuple[float, dict[str, Any]]:
        """Return the seconds of planning, and [row, column, rows, columns, rank] of each shard, by table."""
        from torchrec.distributed.planner import EmbeddingShardingPlanner
        from torchrec.distributed.planner.stats import NoopEmbeddingStats
        from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation

        planner = EmbeddingShardingPlanner(
            topology=self.topology,
            batch_size=self.case["batch"],
            storage_reservation=FixedPercentageStorageReservation(0.0),
            stats=[NoopEmbeddingStats()],
            constraints=self.constraints,
        )
        began = time.perf_counter()
        plan = planner.plan(self.module, self.sharders)
        sizes = {t["name"]: (t["rows"], t["dim"]) for t in self.case["tables"]}
        tables: dict[str, Any] = {}
        for name, sharding in next(iter(plan.plan.values())).items():
            row = {"type": sharding.sharding_type, "kernel": sharding.compute_kernel}
            if sharding.sharding_spec is None:  # a copy on every rank
                row["shards"] = [[0, 0, *sizes[name], rank] for rank in range(self.case["ranks"])]
            else:
                row["shards"] = [
                    [*shard.shard_offsets, *shard.shard_sizes, shard.placement.rank()]
                    for shard in sharding.sharding_spec.shards
                ]
            tables[name] = row
        json.dumps(tables)
        return time.perf_counter() - began, tables

    def _enumerated(self) -> tuple[Any, list[Any]]:
        """Return TorchRec's enumerator and its options in device memory: replicas dense, all others fused."""
        from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

        enumerator = EmbeddingEnumerator(
            topology=self.topology, batch_size=self.case["batch"], constraints=self.constraints
        )
        options = enumerator.enumerate(self.module, self.sharders)
        kernels = {True: "dense", False: "fused"}
        return enumerator, [o for o in options if o.compute_kernel == kernels[o.sharding_type == "data_parallel"]]

    def options(self) -> list[dict[str, Any]]:
        """Return [row, column, rows, columns, milliseconds, bytes] of each shard of each option of each table."""
        return [
            {
                "name": option.name,
                "type": option.sharding_type,
                "shards": [[*s.offset, *s.size, s.perf.total, s.storage.hbm] for s in option.shards],
            }
            for option in self._enumerated()[1]
        ]

    def rate(self, tables: dict[str, Any]) -> float:
        """Return the rating of a plan, by setting its shards on TorchRec's options of the same sharding types."""
        from torchrec.distributed.planner.perf_models import NoopPerfModel
        from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
        from torchrec.distributed.planner.types import Shard

        enumerator, options = self._enumerated()
        chosen = {}
        for option in options:
            row = tables[option.name]
            if option.sharding_type == row["type"]:
                option.shards = [
                    Shard(size=[rows, columns], offset=[r0, c0], rank=rank)
                    for r0, c0, rows, columns, rank in row["shards"]
                ]
                chosen[option.name] = option
        assert len(chosen) == len(tables), sorted(set(tables) - set(chosen))[:4]
        EmbeddingPerfEstimator(topology=self.topology, constraints=self.constraints).estimate(
            list(chosen.values()), enumerator._sharder_data_map
        )
        return float(NoopPerfModel(topology=self.topology).rate(list(chosen.values())))


def main() -> None:
    warnings.filterwarnings("ignore")
    found = []
    for request in json.loads(Path(sys.argv[1]).read_text()):
        peer, answer, plans = Peer(request["case"]), {}, dict(request["plans"])
        if request["search"]:
            answer["seconds"], answer["plan"] = peer.plan()
            plans[""] = answer["plan"]
        if request.get("options"):
            answer["options"] = peer.options()
        answer["ratings"] = {name: peer.rate(tables) for name, tables in plans.items()}
        found.append(answer)
        Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
