"""Tables in files: a plan places them by constraint, counts no memory for their rows, and prices reads of rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.planner.plan_requests import plan_request
from tilerec import (
    CacheParams,
    ConfigError,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyValueParams,
    apply_optimizer_in_backward,
    cache_tables,
)
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.cost.model import FILE_ROW, Model
from tilerec.planner.decision import decide
from tilerec.planner.plan_price import priced
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.planner.request import PlanRequest
from tilerec.spec.optimizer import Adam
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.topology import Topology

FILES = KeyValueParams("/tmp")
CACHE = CacheParams("lfu", load_factor=0.05)


def in_files(**more: Any) -> ParameterConstraints:
    return ParameterConstraints(compute_kernels=["key_value"], cache_params=CACHE, key_value_params=FILES, **more)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_table_larger_than_all_memory_lies_in_files(device: str) -> None:
    cap = 64 * 2**20
    topology = Topology(2, device, hbm_cap=cap, ddr_cap=cap)
    request = PlanRequest.from_json(plan_request({"a": 2_000_000, "b": 1000}, topology, {"a": in_files()}).to_json())
    decision = decide(request)
    assert decision.found
    assert (decision.solution.memory <= decision.instance.cap).all()
    found = decision.shardings()["ebc.a"]
    assert (found.kernel and found.kernel.value, found.cache, found.files) == ("key_value", CACHE, FILES)
    assert decision.bound <= decision.priced.cost_ps
    # What the search has counted is what the plan's price counts.
    whole = priced(request, decision.shardings())
    assert (whole.price.memory == decision.priced.price.memory).all()


def test_rows_in_files_take_no_host_memory_but_their_cache() -> None:
    topology = Topology(1, "cuda")
    for constraint, whole in ((in_files(), False), (ParameterConstraints(compute_kernels=["fused_uvm_caching"]), True)):
        memory = decide(plan_request({"a": 100_000}, topology, {"a": constraint})).solution.memory
        assert (memory[0, 1] >= 100_000 * 64 * 4) == whole


def test_the_price_of_a_row_is_that_of_one_record() -> None:
    topology = Topology(1, "cpu")
    seconds = []
    for file_row in (None, FILE_ROW, 3 * FILE_ROW):
        speeds = replace(default_speeds(topology), file_row=file_row)
        request = plan_request({"a": 1_000_000}, replace(topology, speeds=speeds), {"a": in_files()})
        decision = decide(request)
        model: Model = decision.problem.model
        record = 64 * 4 + 4  # a row, and the number that row-wise Adagrad has of it
        expected = model.missed[0] * 2 * (1 + record / 12288) * (file_row or FILE_ROW)
        assert model.fetched(torch.tensor([0]).numpy(), model.missed[0], 64)[0] == pytest.approx(expected)
        seconds.append(decision.priced.cost_ps)
    assert seconds[0] == seconds[1] < seconds[2]


def test_memory_is_preferred_where_it_suffices() -> None:
    either = ParameterConstraints(compute_kernels=["fused", "key_value"], key_value_params=FILES)
    for cap, kernel in ((2**30, "fused"), (2**26, "key_value")):
        topology = Topology(1, "cpu", ddr_cap=cap)
        found = decide(plan_request({"a": 500_000}, topology, {"a": either})).shardings()["ebc.a"]
        assert found.kernel is not None
        assert found.kernel.value == kernel
        assert (found.files is None) == (kernel == "fused")


def test_a_table_that_is_in_files_stays_there(tmp_path: Path) -> None:
    module = EmbeddingBagCollection(
        [EmbeddingBagConfig(n, 8, name, feature_names=[name]) for name, n in (("a", 70), ("b", 9))]
    )
    apply_optimizer_in_backward(Adam(), module.parameters())
    cache_tables(module.embedding_bags["a"], load_factor=0.5, folder=tmp_path)
    request = EmbeddingShardingPlanner(Topology(2, "cpu")).request(module)
    again = PlanRequest.from_json(request.to_json())
    assert [(table.cached, table.files) for table in again.tables] == [(0.5, True), (None, False)]
    kernels = {key: sharding.kernel and sharding.kernel.value for key, sharding in decide(again).shardings().items()}
    assert kernels == {"a": "key_value", "b": "fused"}


def test_a_pin_in_files_takes_its_cache_only() -> None:
    pin = ParameterSharding("table_wise", "key_value", ranks=[1], cache_params=CACHE, key_value_params=FILES)
    request = plan_request({"a": 100_000, "b": 10}, Topology(2), {"a": ParameterConstraints(sharding=pin)})
    decision = decide(request)
    assert decision.solution.memory[1, 1] == 0
    assert decision.shardings()["ebc.a"].files == FILES


def test_two_slower_memories_for_one_table_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"got compute_kernels \['fused_uvm_caching', 'key_value'\]; expected one"):
        ParameterConstraints(compute_kernels=["fused", "fused_uvm_caching", "key_value"])


def test_constraints_with_a_folder_are_written_and_read() -> None:
    limits = in_files()
    assert ParameterConstraints.from_json("a", limits.to_json()) == limits
    words = ParameterConstraints(key_value_params={"ssd_storage_directory": "/tmp"})
    assert words.key_value_params == FILES
