"""TorchRec's functions about state dicts with sharded tables, and a table's tiles as torch's `Shard`s."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from tilerec.sharding.tiled_tensor import TiledTensor
from tilerec.torch_private import local_place, older_shard


def local_shards(value: DTensor) -> list[Any]:
    """Return this rank's tiles of a table as torch's `Shard`s, with their places. Writes change the table."""
    where = f"rank:{dist.get_rank() if dist.is_initialized() else 0}/{value.device}"
    return [older_shard(tensor, offsets, sizes, where) for tensor, offsets, sizes in _tiles(value)]


def _tiles(value: DTensor) -> list[tuple[Tensor, Iterable[int], Iterable[int]]]:
    if isinstance(value, TiledTensor):
        chunks = enumerate(value.__create_chunk_list__())
        return [(value.__get_tensor_shard__(MetadataIndex("", c.offsets, i)), c.offsets, c.sizes) for i, c in chunks]
    local = value.to_local()
    return [(local, *local_place(value))] if local.numel() else []


def copy_whole(value: DTensor, source: Tensor, non_blocking: bool = False) -> DTensor:
    """Copy a plain tensor of the whole table to this rank's tiles, or a DTensor as torch does; return the table."""
    if isinstance(source, DTensor) or source.shape != value.shape:
        Tensor.copy_(value, source, non_blocking)
        return value
    for tensor, offsets, sizes in _tiles(value):
        rows = [slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True)]
        tensor.copy_(source[tuple(rows)], non_blocking)
    return value


def state_dict_gather(src: Mapping[str, Any], dst: MutableMapping[str, Tensor]) -> None:
    """Copy every value of `dst` from `src`, tables as a whole. Collective."""
    for key, target in dst.items():
        value = src[key]
        target.copy_(value.full_tensor() if isinstance(value, DTensor) else value)


def state_dict_all_gather_keys(state_dict: Mapping[str, Any], pg: dist.ProcessGroup) -> list[str]:
    """Return the keys of all ranks; in tilerec every rank has all of them."""
    return list(state_dict)


def state_dict_to_device(state_dict: Mapping[str, Any], pg: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Return the values on a device."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in state_dict.items()}
