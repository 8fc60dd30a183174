"""Sharded collections and batches for tests of routes, lookups and updates."""

from __future__ import annotations

from typing import Any

import torch

from tilerec.comms.group import Group
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import DataType, EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology


def sharded(
    group: Group,
    tiling: Tiling,
    features: tuple[str, ...] = ("a",),
    *,
    hosts: Any = None,
    weighted: bool = False,
    sequence: bool = False,
    data_type: DataType = DataType.FP32,
    **kwargs: Any,
) -> Any:
    """One table under a tiling. Ranks share torch's generator, so values are written, not drawn."""
    if sequence:
        module: Any = EmbeddingCollection([EmbeddingConfig(tiling.rows, tiling.dim, "t", data_type, features)])
        table = module.embeddings["t"]
    else:
        configs = [EmbeddingBagConfig(tiling.rows, tiling.dim, "t", data_type, features)]
        module = EmbeddingBagCollection(configs, is_weighted=weighted)
        table = module.embedding_bags["t"]
    with torch.no_grad():
        table.weight.copy_(torch.arange(tiling.cells).view(tiling.rows, tiling.dim) % 97)
    topology = Topology(group.size, "cpu", hosts=hosts)
    shard_collection(module, {"t": tiling}, group, group.split("route"), topology, **kwargs)
    return module


def batch_of(
    ids: list[list[int]], keys: tuple[str, ...] = ("a",), dtype: torch.dtype = torch.int64
) -> KeyedJaggedTensor:
    """Bags, key after key."""
    return KeyedJaggedTensor.from_lengths_sync(
        list(keys),
        torch.tensor([i for bag in ids for i in bag], dtype=dtype),
        torch.tensor([len(bag) for bag in ids]),
    )


def rows(size: int, ranks: int, dim: int = 4) -> Tiling:
    """Even row ranges."""
    step = size // ranks
    return Tiling.of("t", size, dim, [(r * step, (r + 1) * step, 0, dim, r) for r in range(ranks)])
