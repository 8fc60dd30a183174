"""Sharded tables in state dicts: convert logical tensors (`logical.py`) to tensors, and load tensors into them.

logical.py  <-  tiled_tensor.py  <-  state.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tilerec.sharding.logical import Cover as Cover
from tilerec.sharding.logical import LogicalTensor as LogicalTensor
from tilerec.sharding.logical import Piece as Piece
from tilerec.sharding.logical import copy_into as copy_into


def shown(logical: LogicalTensor) -> Tensor:
    """Return a logical tensor for a state dict, sharing its memory: plain, a DTensor or a `TiledTensor`."""
    if logical.cover.whole_on(logical.group.size):
        return logical.pieces[0].memory
    from tilerec.sharding import tiled_tensor  # torch.distributed.tensor takes more than a second to import

    return tiled_tensor.shown(logical)


def load(logical: LogicalTensor, value: Tensor) -> None:
    """Write a value of the same shape: a whole tensor, a DTensor of any placement, or a `TiledTensor` of any tiling.

    Collective if the value is spread over ranks.
    """
    if type(value) in (Tensor, nn.Parameter):
        logical.load_whole(value)
        return
    from tilerec.sharding import tiled_tensor

    tiled_tensor.load(logical, value)


def size_mismatch(key: str, got: Sequence[int], want: Sequence[int]) -> str:
    """Return torch's error message for a value of another shape."""
    return (
        f"size mismatch for {key}: copying a param with shape {torch.Size(got)} from checkpoint, the shape in current "
        f"model is {torch.Size(want)}."
    )
