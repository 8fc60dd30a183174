"""Cases of managed collision: ids that get rows, are evicted, expire or are dropped, on one rank and on several."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.golden import inputs
from tests.golden.digest import digest
from tests.golden.inputs import Numbers
from tests.golden.optimizers import OPTIMIZERS
from tests.golden.training import Marks
from tilerec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    apply_optimizer_in_backward,
    shard,
)
from tilerec.comms import Group
from tilerec.modules import (
    DistanceLFU_EvictionPolicy,
    HashZchEvictionConfig,
    HashZchManagedCollisionModule,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHManagedCollisionModule,
)
from tilerec.parallel import full_state_dict, resize_ids
from tilerec.planner import column_wise, row_wise, table_wise
from tilerec.testing import run_virtual_ranks

STEPS = 6
ROWS = {"user": (48, 8, ("u", "v")), "item": (40, 16, ("i",)), "plain": (10, 3, ("p",))}
KEYS = {"u": 150, "i": 120, "v": 150, "p": 10}
SAMPLES = {1: (8,), 2: (5, 3), 3: (2, 5, 1)}


class Ticks:
    """A clock that counts its readings."""

    def __init__(self) -> None:
        self.time = 0

    def __call__(self) -> int:
        self.time += 1
        return self.time


POLICIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "lru_and_lfu": lambda: (
        HashZchManagedCollisionModule(48, "cpu", 6, eviction_policy_name="LRU_EVICTION"),
        MCHManagedCollisionModule(40, "cpu", LFU_EvictionPolicy(), 2, buckets=10),
    ),
    "rejected_and_admitted_late": lambda: (
        HashZchManagedCollisionModule(48, "cpu", 6, when_full="reject"),
        MCHManagedCollisionModule(
            40, "cpu", DistanceLFU_EvictionPolicy(0.5), 1, buckets=5, admission_threshold=2
        ),
    ),
    "times_to_live": lambda: (
        HashZchManagedCollisionModule(
            48, "cpu", 6, eviction_policy_name="PER_FEATURE_TTL_EVICTION", clock=Ticks(),
            eviction_config=HashZchEvictionConfig(["u", "v"], None, [1, 3]), disable_fallback=True,
        ),
        HashZchManagedCollisionModule(
            40, "cpu", 5, eviction_policy_name="SINGLE_TTL_EVICTION", clock=Ticks(),
            eviction_config=HashZchEvictionConfig(["i"], 2),
        ),
    ),
    "reserved_and_lru": lambda: (
        HashZchManagedCollisionModule(48, "cpu", 4, percent_reserved_slots=25),
        MCHManagedCollisionModule(40, "cpu", LRU_EvictionPolicy(), 1, buckets=5),
    ),
}  # fmt: skip


def build(policy: str, pooled: bool, optimizer: str) -> Any:
    torch.manual_seed(7)
    user, item = POLICIES[policy]()
    kind: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    tables = [kind(rows, dim, name, feature_names=names) for name, (rows, dim, names) in ROWS.items()]
    ids = ManagedCollisionCollection({"user": user, "item": item}, tables)
    if pooled:
        made: Any = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables), ids, return_remapped_features=True
        )
    else:
        made = ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables), ids, return_remapped_features=True)
    spec = OPTIMIZERS[optimizer]
    assert spec is not None
    apply_optimizer_in_backward(spec, list(made.parameters()))
    return made


def managed(policy: str, pooled: bool, optimizer: str, world: int, resized: bool = False) -> Marks:
    """Train; `resized`: the table of users gets more buckets in the middle."""
    # Ranks share torch's generator and the clocks count their own readings: each rank has a module of its own.
    modules = [build(policy, pooled, optimizer) for _ in range(world)]

    def live(group: Group) -> Any:
        module = modules[group.rank]
        if world > 1:
            cuts = {
                "user": row_wise(num_buckets=6) if resized else row_wise(),
                "item": column_wise([0, world - 1]),
                "plain": table_wise(world - 1),
            }
            shard(module, {"_embedding_module": cuts}, group)
        seen: list[Any] = []
        for step in range(STEPS):
            if resized and step == STEPS // 2:
                resize_ids(module, "user", 96, 12)
            batch = inputs.batch(KEYS, SAMPLES[world][group.rank], 9, step, group.rank)
            out, remapped = module(batch)
            values = [part.values() for part in out.values()] if isinstance(out, dict) else [out.values()]
            numbers = Numbers(5, step, group.rank)
            torch.autograd.backward(values, [numbers.eighths(*y.shape, most=8) * world for y in values])
            seen.append([*(y.detach().clone() for y in values), remapped.values(), remapped.lengths()])
        optimizer_of = module.embedding_module.fused_optimizer
        state = optimizer_of.full_state_dict() if world > 1 else optimizer_of.state_dict()
        return seen, full_state_dict(module), state

    ranks = run_virtual_ranks(world, live)
    assert len({digest(rank[1]) for rank in ranks}) == 1, "ranks have different whole state"
    return {
        "outputs": digest([rank[0] for rank in ranks]),
        "weights": digest(ranks[0][1]),
        "state": digest(ranks[0][2]),
    }


CASES: dict[str, Callable[[], Marks]] = {
    f"managed/{policy}-{'pooled' if pooled else 'sequence'}-{optimizer}-{world}{'-resized' * resized}": partial(
        managed, policy, pooled, optimizer, world, resized
    )
    for policy, pooled, optimizer, world, resized in (
        ("lru_and_lfu", True, "rowwise_adagrad", 1, False),
        ("lru_and_lfu", True, "rowwise_adagrad", 2, False),
        ("lru_and_lfu", False, "adam", 3, False),
        ("rejected_and_admitted_late", True, "adagrad", 1, False),
        ("rejected_and_admitted_late", False, "sgd", 2, False),
        ("times_to_live", True, "sgd_momentum", 1, False),
        ("times_to_live", True, "rowwise_adagrad_l2", 3, False),
        ("reserved_and_lru", False, "partial_rowwise_adam", 1, False),
        ("reserved_and_lru", True, "adamw", 2, False),
        ("lru_and_lfu", True, "adagrad", 1, True),
        ("lru_and_lfu", True, "adagrad", 2, True),
    )
}
