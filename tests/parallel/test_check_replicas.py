"""Copies of a tile that drift apart are found, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.check_replicas import check_replicas
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import data_parallel, row_wise
from tilerec.spec.cache import CacheParams
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.optimizer import Adagrad
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.table import DataType, EmbeddingBagConfig
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks


def trained(group: Group, plan: dict[str, Any] | None = None) -> Any:
    """Two replicated tables and one in rows, or tables by a plan, after a step."""
    types = {"a": DataType.FP32, "b": DataType.BF16, "rows": DataType.FP32}
    module = EmbeddingBagCollection(
        [EmbeddingBagConfig(30, 4, name, kind, feature_names=["f"]) for name, kind in types.items()]
    )
    apply_optimizer_in_backward(Adagrad(lr=0.1), module.parameters())
    shard(module, plan or {"a": data_parallel(), "b": data_parallel(), "rows": row_wise()}, group)
    module(random_batch(["f"], 30, 8, seed=group.rank)).values().sum().backward()
    return module


def test_copies_with_the_same_bits_pass() -> None:
    run_virtual_ranks(3, lambda group: check_replicas(trained(group)))


@pytest.mark.parametrize("tensor", ["weight", "sum"])
@pytest.mark.parametrize("table", ["a", "b"])
def test_a_copy_that_one_rank_changed_is_named_on_all_ranks(table: str, tensor: str) -> None:
    def fn(group: Group) -> str:
        module = trained(group)
        rows = module.embedding_bags[table].rows
        with torch.no_grad():
            memory = rows.leaf if tensor == "weight" else rows.state[tensor]
            if group.rank == 1:
                memory.view(-1)[7] += 1.0
        with pytest.raises(ConfigError) as raised:
            check_replicas(module)
        return str(raised.value)

    for said in run_virtual_ranks(3, fn):
        assert said.startswith(
            f"Table '{table}': {tensor} of the tile at row 0, column 0 differs between ranks [0, 2] and rank 1; "
        )


def test_tiles_with_one_owner_are_not_compared() -> None:
    def fn(group: Group) -> None:
        module = trained(group)
        with torch.no_grad():
            module.embedding_bags["rows"].weight.fill_(float(group.rank))
        check_replicas(module)

    run_virtual_ranks(2, fn)


HOT = {"a": [0, 9, 29], "b": [7], "rows": [3, 28]}


@pytest.mark.parametrize("kernel", [None, "fused_uvm_caching"])
@pytest.mark.parametrize("tensor", ["weight", "sum"])
def test_a_hot_row_that_was_written_without_its_copies_is_named_on_all_ranks(tensor: str, kernel: str | None) -> None:
    def fn(group: Group) -> str:
        kinds = {"a": "column_wise", "b": "table_wise", "rows": "row_wise"}
        ranks = {"a": [0, 1], "b": [1], "rows": None}
        plan = {
            name: ParameterSharding(
                kind, kernel, ranks[name], hot=HotRows(HOT[name]),
                cache_params=None if kernel is None else CacheParams(load_factor=0.5),
            )
            for name, kind in kinds.items()
        }  # fmt: skip
        module = trained(group, plan)
        check_replicas(module)
        table = module.embedding_bags["rows"]
        with torch.no_grad():
            memory = table.weight if tensor == "weight" else table.rows.state[tensor]
            memory.add_(1.0)
        with pytest.raises(ConfigError) as raised:
            check_replicas(module)
        module.load_state_dict(full_state_dict(module))
        module.fused_optimizer.load_state_dict(module.fused_optimizer.full_state_dict())
        check_replicas(module)
        return str(raised.value)

    for text in run_virtual_ranks(2, fn):
        assert text.startswith(f"Table 'rows': {tensor} of the hot row 3 on rank 0 differs from its copies; ")
