"""Models with managed ids, their batches and training, alone and on ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.evict import DistanceLFU_EvictionPolicy, HashZchEvictionConfig, LFU_EvictionPolicy
from tilerec.modules.hash_zch import HashZchManagedCollisionModule
from tilerec.modules.managed_collection import ManagedCollisionCollection
from tilerec.modules.managed_embedding import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tilerec.modules.mch import MCHManagedCollisionModule
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.testing.batches import random_batch, split_batch

ONE_AT_A_TIME = threading.Lock()  # ranks are threads, and torch's generator is the process's


SAMPLES, STEPS, COLUMNS = 12, 6, 8 + 8 + 16 + 3


ROWS = {"user": (48, 8, ("u", "v")), "item": (40, 16, ("i",)), "plain": (10, 3, ("p",))}


KEYS = {"u": 150, "i": 120, "v": 150, "p": 10}


class Ticks:
    """A clock that goes on by itself; on ranks beside the first it is wrong, and nobody minds."""

    def __init__(self) -> None:
        self.time, self.off = 0, 0

    def __call__(self) -> int:
        self.time += 1
        return self.time + self.off


def configs(kind: Any) -> list[Any]:
    return [kind(rows, dim, name, feature_names=names) for name, (rows, dim, names) in ROWS.items()]


POLICIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "lru and lfu, shared rows": lambda: (
        HashZchManagedCollisionModule(48, "cpu", 6, eviction_policy_name="LRU_EVICTION"),
        MCHManagedCollisionModule(40, "cpu", LFU_EvictionPolicy(), 2, buckets=10),
    ),
    "rejected and admitted late": lambda: (
        HashZchManagedCollisionModule(48, "cpu", 6, when_full="reject"),
        MCHManagedCollisionModule(
            40, "cpu", DistanceLFU_EvictionPolicy(0.5), 1, buckets=5, admission_threshold=2
        ),
    ),
    "times to live": lambda: (
        HashZchManagedCollisionModule(
            48, "cpu", 6, eviction_policy_name="PER_FEATURE_TTL_EVICTION", clock=Ticks(),
            eviction_config=HashZchEvictionConfig(["u", "v"], None, [1, 3]), disable_fallback=True,
        ),
        HashZchManagedCollisionModule(
            40, "cpu", 5, eviction_policy_name="SINGLE_TTL_EVICTION", clock=Ticks(),
            eviction_config=HashZchEvictionConfig(["i"], 2),
        ),
    ),
}  # fmt: skip


def build(policy: str, pooled: bool = True, weighted: bool = False, device: str | None = None) -> Any:
    with ONE_AT_A_TIME:
        return _build(policy, pooled, weighted, device)


def _build(policy: str, pooled: bool, weighted: bool, device: str | None) -> Any:
    torch.manual_seed(7)
    user, item = POLICIES[policy]()
    if pooled:
        tables = configs(EmbeddingBagConfig)
        mcc = ManagedCollisionCollection({"user": user, "item": item}, tables)
        made: Any = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables, weighted, device), mcc, return_remapped_features=True
        )
    else:
        tables = configs(EmbeddingConfig)
        mcc = ManagedCollisionCollection({"user": user, "item": item}, tables)
        made = ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(tables, device), mcc, return_remapped_features=True
        )
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.25), made.parameters())
    return made


def global_batch(step: int, weighted: bool = False) -> KeyedJaggedTensor:
    """Ids of a power law; each fourth step brings none to the last samples."""
    return random_batch(
        list(KEYS), KEYS, SAMPLES, seed=step, weighted=weighted, exponent=0.7, mean_length=2.0,
        values_dtype=torch.int32 if step == 2 else torch.int64,
    )  # fmt: skip


def local_batch(step: int, group: Group, sizes: list[int], weighted: bool = False) -> KeyedJaggedTensor:
    return split_batch(global_batch(step, weighted), sizes)[group.rank]


def upstream(step: int, rows: int, columns: int) -> Tensor:
    """Gradients that are small whole numbers of sixteenths: no sum of them rounds, at any number of ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(-8, 9, (rows, columns), generator=generator) / 16


def train(module: Any, group: Group, sizes: list[int], steps: range, weighted: bool = False) -> list[KeyedJaggedTensor]:
    """Train on this rank's samples under gradients that belong to the samples, whichever rank has them."""
    maps = []
    first = sum(sizes[: group.rank])
    for step in steps:
        out, remapped = module(local_batch(step, group, sizes, weighted))
        if isinstance(out, dict):
            loss = sum(
                (out[name].values() * upstream(step, 1, dim)).sum() for _, dim, names in ROWS.values() for name in names
            )
            (loss * group.size).backward()  # type: ignore[union-attr]
        else:
            grads = upstream(step, SAMPLES, COLUMNS)[first : first + sizes[group.rank]]
            (out.values() * grads * group.size).sum().backward()
        maps.append(remapped)
    return maps


def sizes_of(world: int) -> list[int]:
    """Uneven; the last of four ranks has no samples."""
    return {1: [12], 2: [7, 5], 3: [2, 9, 1], 4: [3, 5, 4, 0]}[world]


@lru_cache
def alone(policy: str, weighted: bool = False) -> tuple[list[KeyedJaggedTensor], dict[str, Tensor], Any]:
    """What one process makes of the global batches, unsharded."""
    module = build(policy, weighted=weighted)
    maps = []
    for step in range(STEPS):
        out, remapped = module(global_batch(step, weighted))
        (out.values() * upstream(step, SAMPLES, COLUMNS)).sum().backward()
        maps.append(remapped)
    return maps, dict(module.state_dict()), module.stats()


def assert_same(state: dict[str, Tensor], want: dict[str, Tensor], exactly: bool = True) -> None:
    assert list(state) == list(want)
    for name, value in want.items():
        if exactly or not value.dtype.is_floating_point:
            assert torch.equal(state[name], value), name
        else:
            assert torch.allclose(state[name], value, atol=1e-5), name
