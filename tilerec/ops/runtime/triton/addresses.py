"""How one kernel reaches many tensors: a base pointer, and each tensor's distance from it in elements.

A kernel gets the pointer of one tensor (the base) and reads another at `base + distance`. Neighbours in one storage
need nothing else, and neither do separate ones: a device has one address space. Memory comes from PyTorch's allocators
in steps of at least 64 bytes, so distances are whole elements.

What a kernel reads per table or feature (distances, rows, columns …) is a small int64 tensor on the device, sent there
once and kept: while layout and memory stay the same, a step sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilerec.ops.runtime.upload import capturing as capturing
from tilerec.ops.runtime.upload import constants as constants
from tilerec.ops.runtime.upload import current_stream as current_stream
from tilerec.ops.runtime.upload import kept as kept
from tilerec.ops.runtime.upload import upload as upload


def distances(tensors: Sequence[Tensor]) -> list[int]:
    """Elements from the first tensor's memory to each tensor's; all of one dtype.

    A tensor without elements is at 0: nothing is read there. They count from `base`.

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
    """The tensor from which `distances` count: the first with elements, or else the first."""
    return next((tensor for tensor in tensors if tensor.numel()), tensors[0])


def alignment(tensors: Sequence[Tensor], columns: Sequence[int]) -> int:
    """How many elements at a time every row of these tensors can be read: a power of two, at most 16 bytes' worth.

    columns: of each tensor. Rows of 12 fp32 columns that begin at multiples of 16 bytes -> 4; of 6 columns -> 2.
    """
    size = tensors[0].element_size()
    widest = max(16 // size, 1)
    for tensor, width in zip(tensors, columns, strict=True):
        while widest > 1 and (tensor.data_ptr() % (widest * size) or width % widest):
            widest //= 2
    return widest
