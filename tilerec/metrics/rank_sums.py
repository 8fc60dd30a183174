"""Sums and concatenations over the ranks whose samples a module's values cover.

Legend: W ranks.
"""

from __future__ import annotations

from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor

from tilerec.comms.group import Group

RankGroup: TypeAlias = Group | dist.ProcessGroup | None
"""Ranks: a group of tilerec, a process group of torch, or None for torch's default group if there is one."""


@final
class RankSums:
    """Collectives of metrics over a group; without a group nothing is sent.

    Args:
        group: see `RankGroup`.
        alone: whether this rank's samples are all samples, whatever the group.
    """

    def __init__(self, group: RankGroup, *, alone: bool = False) -> None:
        self._given = None if alone else group
        self._alone = alone

    @property
    def size(self) -> int:
        """W."""
        if isinstance(self._given, Group):
            return self._given.size
        return dist.get_world_size(self._given) if self._has_process_group() else 1

    @property
    def rank(self) -> int:
        """This rank, 0 to W - 1."""
        if isinstance(self._given, Group):
            return self._given.rank
        return dist.get_rank(self._given) if self._has_process_group() else 0

    def sum(self, name: str, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks of a contiguous tensor, on every rank. Collective; one all-reduce."""
        if self.size == 1:
            return tensor
        if isinstance(self._given, Group):
            return self._given.all_reduce_(name, tensor.clone()).wait()
        carried = tensor.to(_carrier(self._given, tensor), copy=True)
        dist.all_reduce(carried, group=self._given)
        return carried.to(tensor.device)

    def concatenate(self, name: str, tensor_n: Tensor) -> Tensor:
        """Return the tensors of all ranks, concatenated along their last dimension in the order of ranks. Collective.

        The other dimensions are equal on all ranks. If one rank has float64 numbers, the result is float64.
        """
        if self.size == 1:
            return tensor_n
        sizes_W = torch.zeros(self.size + 1, dtype=torch.int64)
        sizes_W[self.rank] = tensor_n.shape[-1]
        sizes_W[-1] = int(tensor_n.dtype == torch.float64)
        *sizes, wide = self.sum(f"sizes of {name}", sizes_W.to(tensor_n.device)).tolist()
        # A sum of tensors that are zero outside of the rank's own place: exact, and one kind of collective for all.
        dtype = torch.float64 if wide else tensor_n.dtype
        all_N = tensor_n.new_zeros(*tensor_n.shape[:-1], sum(sizes), dtype=dtype)
        start = sum(sizes[: self.rank])
        all_N[..., start : start + tensor_n.shape[-1]] = tensor_n
        return self.sum(name, all_N)

    def objects(self, own: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of ranks. Collective; pickled, for small objects."""
        if isinstance(self._given, Group):
            return self._given.all_gather_object(own)
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._given)
        return found

    def _has_process_group(self) -> bool:
        return not self._alone and dist.is_available() and dist.is_initialized()


def _carrier(group: dist.ProcessGroup | None, tensor: Tensor) -> torch.device:
    """Return the device to send from: the GPU for a tensor on the CPU under NCCL, else the tensor's own."""
    if "nccl" in dist.get_backend(group) and tensor.device.type == "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    return tensor.device
