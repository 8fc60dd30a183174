"""TorchRec's sharders: subscripts, `shard`, `reshard`, `storage_usage`, sharders of a program's own modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tilerec
from tilerec.compat.model_parallel import (
    DistributedModelParallel,
    construct_module_sharding_plan,
    copy_to_device,
    get_module,
    get_unsharded_module_names,
    get_unwrapped_module,
    shard_modules,
)
from tilerec.compat.sharders import (
    BaseEmbeddingSharder,
    EmbeddingBagCollectionSharder,
    ModuleSharder,
    get_module_to_default_sharders,
)
from tilerec.compat.types import ShardedEmbeddingModule, ShardedModule
from tilerec.parallel.env import ShardingEnv
from tilerec.planner.helpers import row_wise, table_wise


@pytest.fixture
def env(tmp_path: Path) -> Iterator[ShardingEnv]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield ShardingEnv.from_process_group(group)
    dist.destroy_process_group()


def collection() -> tilerec.EmbeddingBagCollection:
    return tilerec.EmbeddingBagCollection([tilerec.EmbeddingBagConfig(10, 4, "t", feature_names=["f"])])


def plan_of(ebc: nn.Module, cut: Any) -> Any:
    return construct_module_sharding_plan(ebc, {"t": cut}, local_size=1, world_size=1, device_type="cpu")


def test_sharders_are_subscriptable_and_know_bytes() -> None:
    sharder = cast(ModuleSharder[nn.Module], EmbeddingBagCollectionSharder())
    assert ModuleSharder[nn.Module] is not None
    assert BaseEmbeddingSharder[nn.Module] is not None
    table = torch.empty(10, 4)
    assert sharder.storage_usage(table, "cuda", "fused") == {"hbm": 160}
    assert sharder.storage_usage(table, "cuda", "fused_uvm_caching") == {"ddr": 160}
    assert sharder.storage_usage(table, "cpu", "fused") == {"ddr": 160}
    kinds = get_module_to_default_sharders()
    assert set(kinds) == {tilerec.EmbeddingBagCollection, tilerec.EmbeddingCollection}


def test_a_sharder_shards_and_reshards_a_collection(env: ShardingEnv) -> None:
    ebc = collection()
    before = ebc.embedding_bags["t"].weight.detach().clone()
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 0.5})
    sharded = sharder.shard(ebc, plan_of(ebc, row_wise()), env, torch.device("cpu"), "model.ebc")
    assert isinstance(sharded, ShardedModule)
    assert isinstance(sharded, ShardedEmbeddingModule)
    sharder.reshard(sharded, plan_of(collection(), table_wise(0)), env, None)
    assert sharded.plan.plan[""]["t"].kind.value == "table_wise"  # type: ignore[union-attr, operator, index]
    features = tilerec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1]), torch.tensor([1]))
    sharded(features).values().sum().backward()
    after = torch.as_tensor(sharded.embedding_bags["t"].weight.detach())  # type: ignore[union-attr, index]
    torch.testing.assert_close(after[1], before[1] - 0.5)


class Own(nn.Module):
    """A module of a program that brings its own sharder."""


class OwnSharder(ModuleSharder[Own]):
    @property
    def module_type(self) -> type[Own]:
        return Own

    def shard(self, module: Own, params: Any, env: Any, device: Any = None, module_fqn: str | None = None) -> nn.Module:
        assert module_fqn == "own"
        return nn.Identity()


class Renamed(EmbeddingBagCollectionSharder):
    def shard(self, *args: Any, **kwargs: Any) -> nn.Module:
        raise AssertionError


def test_a_wrapped_model_uses_a_programs_own_sharder(env: ShardingEnv) -> None:
    model = nn.ModuleDict({"own": Own(), "ebc": collection(), "dense": nn.Linear(2, 2)})
    with pytest.warns(UserWarning, match=r"Renamed\.shard has no effect"):
        wrapped = DistributedModelParallel(model, env, torch.device("cpu"), sharders=[OwnSharder(), Renamed()])  # type: ignore[list-item]
    assert isinstance(wrapped.module.own, nn.Identity)
    assert get_unwrapped_module(wrapped) is wrapped.module
    assert get_module(wrapped) is wrapped._dmp_wrapped_module
    assert get_unsharded_module_names(wrapped) == ["own", "dense"]


def test_modules_are_sharded_and_initialised_without_a_wrapper(env: ShardingEnv) -> None:
    model = nn.ModuleDict({"ebc": collection(), "dense": nn.Linear(2, 2, device="meta")})
    shard_modules(model, env, torch.device("cpu"), init_params=True)
    assert isinstance(model["ebc"], ShardedModule)
    assert not model["dense"].weight.is_meta
    twin = copy_to_device(model["dense"], torch.device("cpu"), torch.device("meta"))
    assert twin.weight.is_meta
    assert not model["dense"].weight.is_meta
