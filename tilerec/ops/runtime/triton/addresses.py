"""Addressing of many tensors in one kernel: a base pointer, and each tensor's distance from it in elements.

A kernel receives the pointer of one tensor (the base) and reads another tensor at `base + distance`. This works for
tensors of one storage and for separate ones, since a device has one address space. PyTorch's allocators align memory
to at least 64 bytes, so distances are whole numbers of elements.

The numbers that a kernel reads per table or feature (distances, rows, columns …) are a small int64 tensor on the
device. It is uploaded once and cached: while layout and memory stay the same, a step uploads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilerec.ops.runtime.upload import cached_per_stream as cached_per_stream
from tilerec.ops.runtime.upload import capturing as capturing
from tilerec.ops.runtime.upload import constants as constants
from tilerec.ops.runtime.upload import current_stream as current_stream
from tilerec.ops.runtime.upload import upload as upload


def distances(tensors: Sequence[Tensor]) -> list[int]:
    """Return the distance in elements from the first tensor's memory to each tensor's; all have one dtype.

    Distances count from `base`. A tensor without elements has distance 0, since kernels read nothing there.

    Example: two fp32 tensors at addresses 4096 and 4224 -> [0, 32].
    """
    start, size = base(tensors).data_ptr(), tensors[0].element_size() if tensors else 1
    out = []
    for tensor in tensors:
        apart = tensor.data_ptr() - start if tensor.numel() else 0
        assert apart % size == 0, "tensors of one dtype lie whole elements apart"
        out.append(apart // size)
    return out


def base(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensor from which `distances` count: the first with elements, or else the first."""
    return next((tensor for tensor in tensors if tensor.numel()), tensors[0])


def alignment(tensors: Sequence[Tensor], columns: Sequence[int]) -> int:
    """Return the vector width in elements with which every row can be read: a power of two, at most 16 bytes.

    columns: per tensor. Rows of 12 fp32 columns that begin at multiples of 16 bytes -> 4; of 6 columns -> 2.
    """
    size = tensors[0].element_size()
    widest = max(16 // size, 1)
    for tensor, width in zip(tensors, columns, strict=True):
        while widest > 1 and (tensor.data_ptr() % (widest * size) or width % widest):
            widest //= 2
    return widest
