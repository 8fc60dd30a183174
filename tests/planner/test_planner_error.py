"""No plan: which memory, by how much, what weighs most, and remedies that hold."""

from __future__ import annotations

import pytest

from tests.planner.plan_requests import plan_request, table
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.decision import decide
from tilerec.planner.make_plan import make_plan
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.planner.planner_error import PlannerError, PlannerErrorType, planner_error_of
from tilerec.planner.remedies import least_fitting
from tilerec.planner.request import PlanRequest
from tilerec.planner.reservation import FixedPercentageStorageReservation
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.plan_table import bytes_text
from tilerec.spec.table import DataType, EmbeddingBagConfig
from tilerec.spec.topology import Topology

MIB = 2**20


def refused(request: PlanRequest) -> PlannerError:
    with pytest.raises(PlannerError) as caught:
        make_plan(request)
    for remedy in caught.value.remedies:
        assert decide(remedy.request).found
        assert remedy.text in str(caught.value)
    return caught.value


def test_tables_that_are_too_much_in_all_are_said_to_be() -> None:
    error = refused(plan_request({"a": 400_000, "b": 300_000, "c": 10}, Topology(2, ddr_cap=0, hbm_cap=64 * MIB)))
    assert error.proved
    assert error.tier == "device"
    assert error.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    assert error.short > 30 * MIB
    assert error.heaviest == ("ebc.a", "ebc.b", "ebc.c")
    text = str(error)
    assert "No plan exists for 3 tables on 2 cuda ranks of 1 host" in text
    assert "MiB too much" in text
    found = [remedy.text for remedy in error.remedies]
    assert any(word.endswith("ranks instead of 2") for word in found)
    assert any(word.startswith("hbm_cap of ") for word in found)


def test_bf16_rows_of_as_few_tables_as_needed_are_proposed() -> None:
    error = refused(plan_request({"a": 400_000, "b": 300_000, "c": 200_000}, Topology(2, ddr_cap=0, hbm_cap=100 * MIB)))
    (text,) = [remedy.text for remedy in error.remedies if "bf16" in remedy.text]
    assert text == "bf16 rows (data_type) for 'ebc.a'"
    narrow = [table(name, rows, data_type=DataType.BF16) for name, rows in (("a", 900_000), ("b", 10))]
    again = refused(plan_request(narrow, Topology(2, ddr_cap=0, hbm_cap=32 * MIB)))
    assert not any("bf16" in remedy.text for remedy in again.remedies)


def test_a_table_that_may_not_be_split_is_named_with_what_forbids_it() -> None:
    limits = {"a": ParameterConstraints(["table_wise", "column_wise"], min_partition=64)}
    error = refused(plan_request({"a": 400_000, "b": 10}, Topology(4, ddr_cap=0, hbm_cap=64 * MIB), limits))
    assert error.proved
    assert error.error_type is PlannerErrorType.STRICT_CONSTRAINTS
    assert "no piece of table 'ebc.a' that its constraints and sizes allow fits a rank" in str(error)
    assert any("a split by rows of 'ebc.a', which sharding_types rule out" in r.text for r in error.remedies)
    pin = ParameterConstraints(sharding=ParameterSharding("table_wise", ranks=[0]))
    limits = {"a": pin, "b": ParameterConstraints(["table_wise", "column_wise"], ranks=[0], min_partition=64)}
    error = refused(plan_request({"a": 150_000, "b": 150_000}, Topology(2, ddr_cap=0, hbm_cap=64 * MIB), limits))
    assert any(r.text == "'ebc.b' as table_wise, without its sharding_types and ranks" for r in error.remedies)


def test_a_hand_made_part_beyond_a_cap_is_named_with_rank_and_bytes() -> None:
    pin = ParameterConstraints(sharding=ParameterSharding("table_wise", ranks=[1]))
    error = refused(plan_request({"a": 400_000, "b": 10}, Topology(4, ddr_cap=0, hbm_cap=64 * MIB), {"a": pin}))
    assert error.proved
    assert "rank 1 holds " in str(error)
    assert "pinned tables take 'ebc.a'" in str(error)
    assert error.short > 30 * MIB
    assert any(remedy.text == "'ebc.a' left to the planner instead of pinned" for remedy in error.remedies)


def test_all_tables_by_hand_beyond_a_cap_are_refused_too() -> None:
    pin = ParameterConstraints(sharding=ParameterSharding("table_wise", ranks=[0]))
    error = refused(plan_request({"a": 400_000}, Topology(2, ddr_cap=0, hbm_cap=64 * MIB), {"a": pin}))
    assert "more than its cap" in str(error)


def test_memory_that_is_all_reserved_is_said_to_be() -> None:
    error = refused(plan_request({"a": 10}, Topology(2, "cpu", ddr_cap=64 * MIB), reserved=65 * MIB))
    assert error.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    assert error.tier == "host"
    assert "65.0 MiB are reserved" in str(error)
    assert any("ddr_cap" in remedy.text for remedy in error.remedies)


def test_hosts_are_proposed_where_a_host_is_full() -> None:
    error = refused(plan_request({"a": 2_000_000}, Topology(8, ddr_cap=0, hbm_cap=32 * MIB, local_world_size=4)))
    assert any("hosts of 4 ranks more" in r.text or "host of 4 ranks more" in r.text for r in error.remedies)


def test_host_memory_is_proposed_where_there_could_be_more_or_constraints_forbid_it() -> None:
    tables = {"a": 400_000, "b": 300_000}
    without = refused(plan_request(tables, Topology(2, ddr_cap=0, hbm_cap=64 * MIB)))
    (text,) = [r.text for r in without.remedies if "host memory" in r.text]
    assert text.startswith("ddr_cap of ")
    for said in ({"enforce_hbm": True}, {"compute_kernels": ["fused"]}):
        limits = {name: ParameterConstraints(**said) for name in tables}
        kept = refused(plan_request(tables, Topology(2, hbm_cap=64 * MIB), limits))
        (text,) = [r.text for r in kept.remedies if "host memory" in r.text]
        assert text.startswith("rows in host memory behind a cache for 'ebc.a', 'ebc.b'")
    large = refused(plan_request({"a": 2_000_000}, Topology(2, hbm_cap=32 * MIB)))
    assert any("CacheParams(load_factor=" in r.text for r in large.remedies)
    on_cpu = refused(plan_request({"a": 400_000}, Topology(2, "cpu", ddr_cap=16 * MIB)))
    assert not any("host memory behind" in r.text for r in on_cpu.remedies)


def test_none_found_is_not_none_exists() -> None:
    # Pieces of 0.6 of a rank on as many ranks: memory in all suffices, and no two fit together.
    rows = {f"t{i}": 150_000 for i in range(12)}
    limits = {name: ParameterConstraints(["table_wise"]) for name in rows}
    decision = decide(plan_request(rows, Topology(8, ddr_cap=0, hbm_cap=64 * MIB), limits))
    assert not decision.found
    error = planner_error_of(decision)
    assert not error.proved
    assert "No plan was found (there may be one)" in str(error)


def test_the_least_number_that_fits_is_found() -> None:
    asked_for: list[int] = []

    def fits(k: int) -> bool:
        asked_for.append(k)
        return k >= 37

    assert least_fitting(100, fits, 10) == 37
    assert len(asked_for) <= 7
    assert least_fitting(100, fits, 1) in range(37, 101)


@pytest.mark.parametrize("part", [0.0, 0.15, 0.6])
def test_a_larger_cap_that_is_named_fits_with_what_is_reserved_of_it(part: float) -> None:
    constraints = {"a": ParameterConstraints(["table_wise"])}
    config = [EmbeddingBagConfig(400_000, 64, "a", feature_names=["a"])]

    def planner(cap: int) -> EmbeddingShardingPlanner:
        reserved = FixedPercentageStorageReservation(part)
        return EmbeddingShardingPlanner(
            Topology(2, ddr_cap=0, hbm_cap=cap), 64, storage_reservation=reserved, constraints=constraints
        )

    with pytest.raises(PlannerError) as caught:
        planner(64 * MIB).plan(config)
    (remedy,) = [r for r in caught.value.remedies if r.text.startswith("hbm_cap of ")]
    words = remedy.text.split()
    cap = int(float(words[2]) * {"MiB": 2**20, "GiB": 2**30}[words[3]])
    assert cap == remedy.request.topology.hbm_cap
    planner(cap).plan(config)
    with pytest.raises(PlannerError):
        planner(cap * 24 // 25).plan(config)


def test_gradients_as_large_as_tables_are_named_where_they_are_too_much() -> None:
    limits = {"b": ParameterConstraints(compute_kernels=["dense"])}
    tables = [table("a", 400_000, optimizer=None), table("b", 10, optimizer=None)]
    error = refused(plan_request(tables, Topology(2, ddr_cap=0, hbm_cap=90 * MIB), limits))
    (text,) = [r.text for r in error.remedies if "updates in the backward pass" in r.text]
    assert "such as RowWiseAdagrad, for 'ebc.a': without one" in text
    fused = refused(plan_request({"a": 4_000_000}, Topology(2, ddr_cap=0, hbm_cap=90 * MIB)))
    assert not any("updates in the backward pass" in r.text for r in fused.remedies)


def test_bytes_of_a_hand_made_part_are_those_of_state_and_gradients_too() -> None:
    pin = ParameterConstraints(sharding=ParameterSharding("table_wise", ranks=[1]))
    for optimizer, size in ((RowWiseAdagrad(), 4 * 65), (None, 8 * 64)):
        tables = [table("a", 400_000, optimizer=optimizer)]
        error = refused(plan_request(tables, Topology(2, ddr_cap=0, hbm_cap=64 * MIB), {"a": pin}))
        assert f"pinned tables take 'ebc.a' {bytes_text(400_000 * size)}" in str(error)


def test_ranks_that_differ_in_memory_are_said_to() -> None:
    topology = Topology(2, ddr_cap=0, hbm_caps=[64 * MIB, 32 * MIB])
    error = refused(plan_request({"a": 900_000}, topology))
    assert "2 x 32.0 MiB to 64.0 MiB of device memory" in str(error)
    (text,) = [r.text for r in error.remedies if r.text.startswith("hbm_cap of ")]
    assert text.endswith("at least on every rank; they have 32.0 MiB to 64.0 MiB")
    assert any("ranks instead of 2" in r.text for r in error.remedies)
    full = refused(plan_request({"a": 10}, topology, reserved=40 * MIB))
    assert "rank 1 holds" in str(full)
    assert "more than its cap of 32.0 MiB" in str(full)
