"""Cases of the planner: the plan, its predicted costs, and prices of plans made by hand.

Costs are whole picoseconds and bytes. Words of messages and times of planning do not count.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.golden.digest import digest
from tests.golden.training import Marks
from tilerec import DataType, EmbeddingBagConfig, EmbeddingConfig, ParameterConstraints, Topology
from tilerec.parallel import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from tilerec.planner import (
    EmbeddingShardingPlanner,
    FixedPercentageStorageReservation,
    ParameterSharding,
    ShardingPlan,
    Skew,
    Wire,
)

GB = 2**30
SHARDERS = (
    EmbeddingBagCollectionSharder({"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.1}),
    EmbeddingCollectionSharder({"optimizer": "adam", "learning_rate": 0.1}, Wire("bf16", "bf16")),
)


def _pooled(rows: list[int], dim: int = 64, data_type: DataType = DataType.FP32) -> list[Any]:
    return [
        EmbeddingBagConfig(count, dim + 16 * (i % 3), f"t{i}", data_type, [f"f{i}", *([f"g{i}"] if i % 4 == 1 else [])])
        for i, count in enumerate(rows)
    ]


def _sequences(rows: list[int]) -> list[Any]:
    return [EmbeddingConfig(count, 32, f"s{i}", feature_names=[f"h{i}"]) for i, count in enumerate(rows)]


SMALL = _pooled([1000, 50_000, 3_000_000, 20_000, 700, 400_000, 9_000_000, 12])
LARGE = _pooled([40_000_000 // (i + 1) for i in range(24)], 96)
HALF = _pooled([5_000_000 // (i + 1) for i in range(10)], 128, DataType.BF16)

CPU_2 = Topology(2, "cpu", ddr_cap=16 * GB)
CPU_4 = Topology(4, "cpu", ddr_cap=8 * GB, local_world_size=2)
UNEVEN = Topology(5, "cpu", ddr_cap=8 * GB, hosts=[[0, 1, 2], [3, 4]])
CAPS = Topology(4, "cpu", ddr_caps=[8 * GB, 4 * GB, 8 * GB, 2 * GB], local_world_size=2)
CUDA_8 = Topology(8, "cuda", hbm_cap=16 * GB, ddr_cap=64 * GB, local_world_size=8)
CUDA_16 = Topology(16, "cuda", hbm_cap=8 * GB, ddr_cap=32 * GB, local_world_size=8)
TIGHT = Topology(4, "cuda", hbm_cap=4 * GB, ddr_cap=64 * GB, local_world_size=4)

KNOWN = {
    "t1": ParameterConstraints(pooling_factors=[12.0, 3.0], skew=Skew(20_000, 1.05)),
    "t2": ParameterConstraints(sharding_types=["row_wise", "table_row_wise"], pooling_factors=[30.0]),
    "t5": ParameterConstraints(ranks="0-1", max_ranks=1),
    "t6": ParameterConstraints(forbidden_types=["row_wise"], min_partition=32, pooling_factors=[5.0]),
    "t0": ParameterConstraints(with_table="t4"),
    "t3": ParameterConstraints(hosts=[0], is_weighted=True),
}  # fmt: skip

Tables = list[Any]
REQUESTS: dict[str, tuple[Tables, Topology, dict[str, ParameterConstraints], dict[str, Any]]] = {
    "cpu-2": (SMALL, CPU_2, {}, {}),
    "cpu-2-sequences": (_sequences([100, 80_000, 1_000_000]), CPU_2, {}, {"batch_size": 64}),
    "cpu-4-hosts": (SMALL, CPU_4, {}, {"batch_size": 2048}),
    "cpu-4-constraints": (SMALL, CPU_4, KNOWN, {}),
    "cpu-4-unlike-caps": (SMALL, CAPS, {}, {}),
    "cpu-5-uneven-hosts": (SMALL, UNEVEN, {}, {}),
    "cpu-5-uneven-hosts-constraints": (SMALL, UNEVEN, KNOWN, {"batch_size": 128}),
    "cuda-8": (LARGE, CUDA_8, {}, {"batch_size": 4096}),
    "cuda-16-hosts": (LARGE, CUDA_16, {}, {"batch_size": 1024}),
    "cuda-4-host-memory": (LARGE, TIGHT, {}, {}),
    "cuda-8-half": (HALF, CUDA_8, {}, {"effort": 2}),
    "cuda-16-wide-rows": (
        HALF, CUDA_16, {"t0": ParameterConstraints(sharding_types=["column_wise", "grid_shard"])}, {},
    ),
}  # fmt: skip


def planner_of(topology: Topology, constraints: dict[str, ParameterConstraints], options: dict[str, Any]) -> Any:
    reservation = FixedPercentageStorageReservation(0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what has no effect on a plan
        return EmbeddingShardingPlanner(topology, storage_reservation=reservation, constraints=constraints, **options)


def _arrays(value: Any) -> Any:
    """Arrays of numpy as lists, whose numbers are hashed by their bits."""
    if isinstance(value, np.ndarray):
        return [list(value.shape), value.dtype.name, value.ravel().tolist()]
    return {key: _arrays(item) for key, item in value.items()} if isinstance(value, dict) else value


def numbers_of(report: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a report's file."""
    names = ("cost_ps", "bound_ps", "charge_ps", "network_ps", "stages", "load_ps", "tiers", "memory", "cap")
    return {name: report[name] for name in names}


def planned(name: str) -> Marks:
    """The plan of a request, its report's numbers, and its price."""
    tables, topology, constraints, options = REQUESTS[name]
    planner = planner_of(topology, constraints, options)
    plan = planner.plan(tables, SHARDERS)
    report = plan.report.to_json()
    price = planner.price(tables, plan, SHARDERS)
    return {
        "plan": digest(plan.dumps()),
        "report": digest(numbers_of(report)),
        "tables": digest(report["tables"]),
        "price": digest([price.cost_ps, price.charge_ps, _arrays(price.load_ps), _arrays(price.memory)]),
        "request": digest(str(planner.request(tables, SHARDERS).digest())),
    }


def priced(kind: str, kernel: str | None, topology: Topology) -> Marks:
    """The price of a plan in which all tables are cut alike."""
    ranks = {"table_wise": [1], "table_row_wise": [0, 1], "table_column_wise": [0, 1]}.get(kind)
    hosts = {"grid_shard": list(range(topology.world_size))}.get(kind)
    sharding = ParameterSharding(kind, kernel, ranks or hosts)
    plan = ShardingPlan({"": {table.name: sharding for table in SMALL}}, topology.world_size)  # type: ignore[dict-item]
    price = planner_of(topology, {}, {}).price(SMALL, plan, SHARDERS)
    return {
        "seconds": digest([price.seconds, _arrays(price.stages), _arrays(dict(price.parts))]),
        "memory": digest([_arrays(price.memory), _arrays(price.over)]),
    }


CASES: dict[str, Callable[[], Marks]] = {
    **{f"planned/{name}": partial(planned, name) for name in REQUESTS},
    **{
        f"priced/{kind}-{kernel}-{topology.compute_device}-{topology.world_size}": partial(
            priced, kind, kernel, topology
        )
        for kind, kernel, topology in (
            ("row_wise", "fused", CPU_4),
            ("column_wise", "fused", CPU_4),
            ("data_parallel", "fused", CPU_2),
            ("table_wise", "fused", UNEVEN),
            ("table_row_wise", "fused", CPU_4),
            ("table_column_wise", "fused", CUDA_8),
            ("grid_shard", "fused", CUDA_16),
            ("row_wise", "fused_uvm_caching", CUDA_8),
            ("row_wise", "fused_uvm", CUDA_16),
        )
    },
}
