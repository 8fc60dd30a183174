"""Memory of a jagged tensor's tensors: allocation, bytes, streams that read it, release."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from tilerec.ops.runtime.fetch import host_readable


def allocate_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return uninitialised memory of the same shape and dtype on `device`."""
    return torch.empty_like(tensor, device=device, memory_format=torch.contiguous_format)


def size_in_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def record_stream(tensors: Iterable[Tensor], stream: torch.Stream) -> None:
    """Keep the memory allocated until the work queued on `stream` is done. No effect for tensors on the host."""
    for tensor in tensors:
        if not host_readable(tensor):
            tensor.record_stream(stream)


def clear_storage(tensors: Iterable[Tensor]) -> int:
    """Free the storages and return their bytes. The contents cannot be read afterwards."""
    freed = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        freed += storage.nbytes()
        storage.resize_(0)
    return freed
