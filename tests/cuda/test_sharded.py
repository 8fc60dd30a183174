"""Sharded tables on a GPU: NCCL with one rank, gloo with several ranks that share the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda.sizes import real
from tests.cuda.sizes import size as size_of
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.check_replicas import check_replicas
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.resharding.reshard import reshard
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import column_wise, data_parallel, row_wise
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.cache import CacheParams
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KEYS, ROWS, STEPS = ["a", "b", "c"], 40, 3


def model() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    module = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(ROWS, 8, "rows", feature_names=["a"]),
            EmbeddingBagConfig(ROWS, 12, "columns", feature_names=["b", "a"], pooling=PoolingType.MEAN),
            EmbeddingBagConfig(ROWS, 5, "copies", feature_names=["c"]),
        ]
    )
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), module.parameters())
    return module


def batch(rank: int, step: int) -> KeyedJaggedTensor:
    return random_batch(KEYS, ROWS, 3 + 2 * rank, seed=10 * step + rank)


def whole_after_training(size: int) -> list[Tensor]:
    module = model()
    for step in range(STEPS):
        out = module(concat_batches([batch(rank, step) for rank in range(size)])).values()
        out.square().sum().backward()
    return [parameter.detach() for parameter in module.parameters()]


def train_on_the_gpu() -> list[Tensor]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    module = model().cuda()
    ranks = list(range(size))
    shard(
        module,
        plan={
            "rows": ParameterSharding("row_wise"),
            "columns": ParameterSharding("column_wise", ranks=ranks),
            "copies": ParameterSharding("data_parallel"),
        },
    )
    for step in range(STEPS):
        out = module(batch(rank, step).to("cuda")).values()
        assert out.is_cuda
        (out.square().sum() * size).backward()
    # `DTensor.full_tensor()` of tensors on a GPU over gloo ends in a segmentation fault of torch 2.11.
    state = full_state_dict(module)
    return [state[f"embedding_bags.{name}.weight"].cpu() for name in ("rows", "columns", "copies")]


# One GPU is enough: NCCL with one rank, gloo with several on the same device.
WORLDS = pytest.mark.parametrize(("backend", "size"), [pytest.param("nccl", 1, marks=real), ("gloo", 2), ("gloo", 4)])


@WORLDS
def test_tables_on_a_gpu_equal_those_of_one_process_on_the_cpu(backend: str, size: int) -> None:
    want = whole_after_training(size)
    with Ranks(size, backend=backend, timeout_s=size_of(60, 600)) as ranks:
        for got in ranks.run(train_on_the_gpu):
            for own, table in zip(got, want, strict=True):
                torch.testing.assert_close(own, table, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- hot rows


def train_hot_rows_on_the_gpu(hot: bool, kernel: str | None) -> list[Tensor]:
    """Whole rows and state after training, a move of the hot rows and more training."""
    rank = torch.distributed.get_rank()
    module = model() if kernel else model().cuda()
    cache = None if kernel is None else CacheParams(load_factor=0.5)

    def plan(hot_ids: list[int], kernel: str | None, cache: CacheParams | None) -> dict[str, ParameterSharding]:
        own = HotRows(torch.tensor(hot_ids)) if hot else HotRows()
        kinds = {"rows": ("row_wise", None), "columns": ("column_wise", [0, 1]), "copies": ("table_wise", [1])}
        return {n: ParameterSharding(t, kernel, r, cache_params=cache, hot=own) for n, (t, r) in kinds.items()}

    shard(module, plan=plan([0, 1, 5, 30], kernel, cache), device="cuda", exact=True)
    for step in range(STEPS):
        if step == STEPS - 1:
            reshard(module, plan([1, 2, 39], None, None), progress=False)
        module(batch(rank, step).to("cuda")).values().square().sum().backward()
    for table in module._tables.values():
        for rows in table.tile_rows:
            assert rows.leaf.is_cuda == (kernel is None or rows.names is not None)
    found = list(full_state_dict(module).values())
    for state in module.fused_optimizer.full_state_dict()["state"].values():
        found += list(state.values())
    check_replicas(module)
    return [value.cpu() for value in found]


def test_hot_rows_on_a_gpu_train_as_rows_without_copies_behind_a_cache_too() -> None:
    with Ranks(2, backend="gloo", timeout_s=size_of(60, 600)) as ranks:
        want = ranks.run(train_hot_rows_on_the_gpu, False, None)
        for kernel in (None, "fused_uvm_caching"):
            for got, own in zip(ranks.run(train_hot_rows_on_the_gpu, True, kernel), want, strict=True):
                for a, b in zip(got, own, strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


# ------------------------------------------------------------------------------------------------------------ sequences


def sequences() -> EmbeddingCollection:
    torch.manual_seed(0)
    module = EmbeddingCollection(
        [
            EmbeddingConfig(ROWS, 8, "rows", feature_names=["a"]),
            EmbeddingConfig(ROWS, 8, "columns", feature_names=["b"]),
            EmbeddingConfig(ROWS, 8, "copies", feature_names=["c"]),
        ]
    )
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), module.parameters())
    return module


def loss_of(out: dict[str, Any]) -> Tensor:
    return torch.stack([part.values().square().sum() for part in out.values()]).sum()


def train_sequences_on_the_gpu() -> list[Tensor]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    module = sequences().cuda()
    ranks = list(range(size))
    plan = {"rows": row_wise(), "columns": column_wise(ranks=ranks), "copies": data_parallel()}
    shard(module, plan=plan)
    for step in range(STEPS):
        (loss_of(module(batch(rank, step).to("cuda"))) * size).backward()
    state = full_state_dict(module)
    return [state[f"embeddings.{name}.weight"].cpu() for name in plan]


@WORLDS
def test_sequences_on_a_gpu_equal_those_of_one_process_on_the_cpu(backend: str, size: int) -> None:
    module = sequences()
    for step in range(STEPS):
        loss_of(module(concat_batches([batch(rank, step) for rank in range(size)]))).backward()
    with Ranks(size, backend=backend, timeout_s=size_of(60, 600)) as ranks:
        for got in ranks.run(train_sequences_on_the_gpu):
            for own, table in zip(got, module.parameters(), strict=True):
                torch.testing.assert_close(own, table.detach(), rtol=0, atol=1e-5)


# ---------------------------------------------------------------------------------------------------- managed collision


def managed(device: str) -> ManagedCollisionEmbeddingBagCollection:
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(64, 8, "t", feature_names=["a", "b"])]
    ids = HashZchManagedCollisionModule(64, device, 8, eviction_policy_name="LRU_EVICTION")
    collection = ManagedCollisionCollection({"t": ids}, tables)
    module = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables), collection, True).to(device)
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), module.parameters())
    return module


def any_ids(rank: int, step: int) -> KeyedJaggedTensor:
    return random_batch(["a", "b"], 60 + 60 * step, 8 + rank, seed=10 * step + rank)


def train_managed_on_the_gpu() -> tuple[dict[str, Tensor], str]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    module = managed("cuda")
    shard(module, plan={"_embedding_module": {"t": row_wise()}}, exact=True)
    for step in range(STEPS + 2):
        pooled, _ = module(any_ids(rank, step).to("cuda"))
        (pooled.values().square().sum() * size).backward()
    return {name: value.cpu() for name, value in full_state_dict(module).items()}, str(module.stats()["t"])


@WORLDS
def test_managed_collision_on_a_gpu_equals_one_process_on_the_cpu(backend: str, size: int) -> None:
    module = managed("cpu")
    for step in range(STEPS + 2):
        pooled, _ = module(concat_batches([any_ids(rank, step) for rank in range(size)]))
        pooled.values().square().sum().backward()
    wanted, stats = module.state_dict(), module.stats()["t"]
    assert stats.total.evictions > 0
    with Ranks(size, backend=backend, timeout_s=size_of(60, 600)) as ranks:
        for state, said in ranks.run(train_managed_on_the_gpu):
            assert said == str(stats)
            for name, value in wanted.items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5 if "weight" in name else 0)
