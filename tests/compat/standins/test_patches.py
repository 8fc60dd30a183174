"""Attributes that TorchRec's objects have are there while stand-ins are installed, and gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.optim as torch_optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import tilerec
from tilerec.compat.standins.session import installed
from tilerec.compat.state_dicts import local_shards, state_dict_all_gather_keys, state_dict_gather
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import row_wise, table_wise


def batch() -> Any:
    return tilerec.KeyedJaggedTensor.from_lengths_sync(["a"], torch.tensor([1, 2, 3]), torch.tensor([2, 0, 1]))


def test_private_fields_of_batches_read_and_write() -> None:
    before = torch_optim._apply_optimizer_in_backward
    with installed():
        features = batch()
        assert features._keys == ["a"]
        assert features._values.tolist() == [1, 2, 3]
        assert features._lengths.tolist() == [2, 0, 1]
        assert features._weights is None
        features._values = torch.tensor([4, 5, 6])
        assert features["a"].values().tolist() == [4, 5, 6]
        assert features["a"]._lengths.tolist() == [2, 0, 1]
        pooled = tilerec.EmbeddingBagCollection([tilerec.EmbeddingBagConfig(9, 2, "t", feature_names=["a"])])(features)
        assert pooled.wait() is pooled
        assert pooled._keys == ["a"]
        assert torch_optim._apply_optimizer_in_backward is not before
    assert torch_optim._apply_optimizer_in_backward is before
    assert not hasattr(batch(), "_lengths")
    assert not hasattr(DTensor, "local_shards")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_outputs_wait_and_tables_have_local_shards(one_rank: None) -> None:
    with installed():
        tables = [tilerec.EmbeddingConfig(5, 2, name, feature_names=["a"]) for name in ("t", "u")]
        ec = tilerec.EmbeddingCollection(tables)
        shard(ec, {"t": row_wise(), "u": table_wise(0)})
        out = ec(batch())
        assert out.wait() is out
        state = ec.state_dict()
        gathered = {name: torch.zeros(5, 2) for name in state}
        state_dict_gather(state, gathered)
        for name, value in state.items():
            own = value.local_shards() if isinstance(value, DTensor) else local_shards(one_rank_dtensor(value))
            assert [(s.metadata.shard_offsets, s.metadata.shard_sizes) for s in own] == [([0, 0], [5, 2])]
            assert own[0].tensor.tolist() == gathered[name].tolist()
        table = one_rank_dtensor(torch.zeros(3, 2))
        assert table.copy_(torch.arange(6.0).reshape(3, 2)) is table
        assert table.copy_(table + 1).to_local().tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
        assert state_dict_all_gather_keys(state, dist.group.WORLD) == list(state)


def one_rank_dtensor(value: torch.Tensor) -> DTensor:
    return DTensor.from_local(value, init_device_mesh("cpu", (1,)), [Shard(0)])
