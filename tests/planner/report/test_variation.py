"""Other machines, batches, types."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.planner.plan_requests import plan_request
from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.decision import decide
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.planner.report.variation import with_changes
from tilerec.planner.request import PlanRequest
from tilerec.planner.reservation import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
    StorageReservation,
)
from tilerec.planner.search.instance import Status
from tilerec.sharders.table_sharders import EmbeddingBagCollectionSharder
from tilerec.spec.parameter_sharding import Wire
from tilerec.spec.table import DataType, EmbeddingBagConfig
from tilerec.spec.topology import Topology

REQUEST = plan_request({"a": 100, "b": 10}, Topology(8, hbm_cap=1000, local_world_size=4), reserved=100)


def test_nothing_changes_nothing() -> None:
    assert with_changes(REQUEST).digest() == REQUEST.digest()


def test_what_is_given_changes_and_the_rest_stays() -> None:
    other = with_changes(REQUEST, hosts=3, hbm_cap=2000, batch_size=64, data_type="BF16")
    assert other.topology.host_ranks == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    assert (other.topology.hbm_cap, other.reserved, other.batch_size) == (2000, 100, 64)
    assert {table.data_type for table in other.tables} == {DataType.BF16}
    assert with_changes(REQUEST, ranks_per_host=2).topology.world_size == 4
    assert with_changes(REQUEST, ddr_cap=7).topology.ddr_cap == 7
    assert with_changes(REQUEST, ddr_cap=7).reserved == 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hosts": 0}, "hosts is 0; it must be at least 1"),
        ({"data_type": "fp4"}, r"data type 'fp4' is none of \['fp32', 'bf16'"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"wire": "fp4"}, r"Wire: got forward='fp4'"),
        ({"hosts": 1}, r"name rank 7, but the topology has ranks 0 to 3"),
        ({"hbm_cap": -5}, "got hbm_cap=-5"),
    ],
)
def test_what_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_changes(REQUEST.with_constraint("ebc.a", ranks=[7]) if "hosts" in change else REQUEST, **change)


def test_hosts_of_different_sizes_need_a_size() -> None:
    uneven = plan_request({"a": 10}, Topology(3, hosts=[[0, 1], [2]]), {"a": ParameterConstraints()})
    with pytest.raises(ConfigError, match="The hosts differ in size"):
        with_changes(uneven, hosts=2)
    assert with_changes(uneven, hosts=2, ranks_per_host=2).topology.world_size == 4


def test_what_is_reserved_as_a_part_grows_with_the_memory() -> None:
    half = replace(REQUEST, reserved_part=0.5)
    assert with_changes(half, hbm_cap=3000).reserved_bytes() == [1600] * 8


def test_ranks_that_differ_in_memory_need_a_cap_for_new_ones() -> None:
    differ = plan_request({"a": 10}, Topology(2, hbm_caps=[2**30, 2**31], local_world_size=1))
    with pytest.raises(ConfigError, match=r"differ in memory \(hbm_caps\); give the memory of the new ranks"):
        with_changes(differ, hosts=4)
    other = with_changes(differ, hosts=4, hbm_cap=2**32).topology
    assert (other.world_size, other.memory_caps) == (4, (2**32,) * 4)


# ------------------------------------------------------------------------- a what-if is a plan made afresh


RESERVATIONS: tuple[Callable[[], StorageReservation], ...] = (
    lambda: HeuristicalStorageReservation(0.15),
    lambda: HeuristicalStorageReservation(0.1, dense_tensor_estimate=3_000_000),
    lambda: HeuristicalStorageReservation(0.0),
    lambda: InferenceStorageReservation(0.05, dense_tensor_estimate=70_000),
    lambda: FixedPercentageStorageReservation(0.2),
    lambda: FixedAbsoluteStorageReservation(5_000_000),
)


def made(inputs: dict[str, Any]) -> EmbeddingShardingPlanner:
    """A planner of these inputs."""
    return EmbeddingShardingPlanner(
        Topology(
            inputs["hosts"] * inputs["ranks_per_host"],
            inputs["device"],
            local_world_size=inputs["ranks_per_host"],
            hbm_cap=inputs["hbm_cap"],
            ddr_cap=inputs["ddr_cap"],
        ),
        inputs["batch_size"],
        storage_reservation=inputs["reservation"](),
        constraints=inputs["constraints"],
    )


def asked_of(planner: EmbeddingShardingPlanner, inputs: dict[str, Any]) -> PlanRequest:
    """A request with tables of one data type and one wire format."""
    wire = inputs["wire"]
    formats = None if wire is None else Wire(wire, wire)
    tables = [
        EmbeddingBagConfig(rows, dim, f"t{i}", data_type=inputs["data_type"], feature_names=[f"f{i}"])
        for i, (rows, dim) in enumerate(inputs["tables"])
    ]
    return planner.request(tables, [EmbeddingBagCollectionSharder(qcomm_codecs_registry=formats)])


def drawn(draw: np.random.Generator) -> dict[str, Any]:
    """Inputs of a small random request."""
    count = int(draw.integers(1, 5))
    constraints: dict[str, ParameterConstraints] = {
        f"t{i}": ParameterConstraints(
            pooling_factors=[float(draw.integers(1, 20))],
            sharding_types=["row_wise", "table_wise"] if draw.random() < 0.3 else None,
        )
        for i in range(count)
        if draw.random() < 0.6
    }
    return {
        "hosts": int(draw.integers(1, 4)),
        "ranks_per_host": int(draw.integers(1, 3)),
        "device": "cuda" if draw.random() < 0.7 else "cpu",
        "hbm_cap": int(draw.choice([2**29, 2**32])),
        "ddr_cap": int(draw.choice([2**28, 2**32])),
        "batch_size": int(draw.choice([64, 512, 1024])),
        "wire": draw.choice(["bf16", "int8", "fp32", None]),
        "data_type": [DataType.FP32, DataType.BF16][int(draw.integers(2))],
        "reservation": RESERVATIONS[int(draw.integers(len(RESERVATIONS)))],
        "constraints": constraints,
        "tables": [(int(draw.integers(1, 200_000)), int(draw.choice([8, 32, 64, 128]))) for _ in range(count)],
    }


NEW: dict[str, tuple[Any, ...]] = {
    "hosts": (1, 2, 3),
    "ranks_per_host": (1, 2, 3),
    "hbm_cap": (2**28, 2**30),
    "ddr_cap": (2**29, 2**31),
    "batch_size": (1, 128, 2048),
    "wire": ("bf16", "fp16", "fp32"),
    "data_type": (DataType.FP16, DataType.BF16, DataType.FP32),
}


def outcome(request: PlanRequest) -> int | Status:
    """The fingerprint of the plan; how the search ended where there is none."""
    decision = decide(request)
    return decision.plan().fingerprint() if decision.found else decision.solution.status


@pytest.mark.parametrize("seed", range(28))
def test_a_what_if_is_the_plan_of_a_planner_with_these_inputs(seed: int) -> None:
    draw = np.random.default_rng(seed)
    before = drawn(draw)
    changed = draw.choice(list(NEW), int(draw.integers(1, 4)), replace=False).tolist()
    if seed < 2 * len(NEW):
        changed = [list(NEW)[seed % len(NEW)]]  # each alone
    change = {name: NEW[name][int(draw.integers(len(NEW[name])))] for name in changed}
    after = {**before, **change}
    words = {name: value.value if name == "data_type" else value for name, value in change.items()}
    request = asked_of(made(before), before)
    then = with_changes(request, **words)
    fresh = asked_of(made(after), after)
    assert then.to_json() == fresh.to_json()
    assert then.digest() == fresh.digest()
    if seed % 7 == 1:
        assert outcome(then) == outcome(fresh)


def test_reserved_batches_of_input_grow_with_the_batch() -> None:
    """They are no bytes among other bytes: another batch takes what it takes."""
    request = replace(REQUEST, reserved=9, reserved_part=0.1, reserved_batches=2)
    then = with_changes(request, batch_size=4 * request.batch_size)
    for each in (request, then):
        assert each.reserved_bytes() == [9 + 2 * each.input_bytes() + 100] * 8
    assert then.input_bytes() > 3 * request.input_bytes()
    assert PlanRequest.from_json(json.loads(json.dumps(request.to_json()))).digest() == request.digest()
    assert with_changes(then, batch_size=request.batch_size).digest() == request.digest()
    with pytest.raises(ConfigError, match="reserved_batches is -1; it must be a whole number from 0"):
        replace(REQUEST, reserved_batches=-1)
