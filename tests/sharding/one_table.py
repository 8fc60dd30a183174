"""One table of a collection, its tilings over two ranks, and steps of training, alone and sharded."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import nn

from tilerec.comms.group import Group
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.sharding.embedding import ShardedEmbeddingBagCollection
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sharding.table import ShardedTable
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.batches import concat_batches, random_batch

ROWS, DIM = 7, 6
KEY = "embedding_bags.t.weight"
TILINGS: dict[str, list[tuple[Any, ...]]] = {
    "everywhere": [(0, 7, 0, 6, (0, 1))],
    "5 + 2 rows": [(0, 5, 0, 6, 0), (5, 7, 0, 6, 1)],
    "two tiles": [(0, 7, 0, 2, 0), (0, 7, 2, 4, 1), (0, 7, 4, 6, 0)],
    "one rank": [(0, 7, 0, 6, 1)],
}


def collection(dtype: torch.dtype = torch.float32) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"], dtype=dtype)])


def sharded(base: EmbeddingBagCollection, group: Group, tiling: str) -> ShardedEmbeddingBagCollection:
    own = copy.deepcopy(base)
    tilings = {"t": Tiling.of("t", ROWS, DIM, TILINGS[tiling])}
    shard_collection(own, tilings, group, group.split("route"), Topology(group.size, "cpu"))
    return cast(ShardedEmbeddingBagCollection, own)


def table_of(module: nn.Module) -> ShardedTable:
    return cast(ShardedTable, cast(Any, module).embedding_bags["t"])


def batch(rank: int, step: int = 0) -> KeyedJaggedTensor:
    return random_batch(["f"], 7, 4, seed=10 * step + rank)


def step(module: nn.Module, features: KeyedJaggedTensor, scale: float) -> None:
    values = module(features).values()
    ((values * values).sum() * scale).backward()


def trained(base: EmbeddingBagCollection, steps: int) -> EmbeddingBagCollection:
    """Unsharded, on the batches of both ranks."""
    reference = copy.deepcopy(base)
    for s in range(steps):
        step(reference, concat_batches([batch(0, s), batch(1, s)]), 1.0)
    return reference
