"""Addressing of many tensors in one kernel: a base pointer, and each tensor's distance from it in elements.

A kernel receives the pointer of one tensor (the base) and reads another tensor at `base + distance`. This works for
tensors of one storage and for separate ones, since a device has one address space. PyTorch's allocators align memory
to at least 64 bytes, so distances are whole numbers of elements.

The numbers that a kernel reads per table or feature (distances, rows, columns …) are a small int64 tensor on the
device. It is uploaded once and cached: while layout and memory stay the same, a step uploads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from tilerec.ops.runtime.upload import cached_per_stream as cached_per_stream
from tilerec.ops.runtime.upload import capturing as capturing
from tilerec.ops.runtime.upload import constants as constants
from tilerec.ops.runtime.upload import current_stream as current_stream
from tilerec.ops.runtime.upload import upload as upload


def base(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensor from which `distances` count: the first with elements, or else the first."""
    return next((tensor for tensor in tensors if tensor.numel()), tensors[0])


def distances(tensors: Sequence[Tensor]) -> list[int]:
    """Return the distance in elements from the base's memory to each tensor's; all have one dtype.

    Example: two fp32 tensors at addresses 4096 and 4224 -> [0, 32].
    """
    pointers, sizes = list(map(Tensor.data_ptr, tensors)), list(map(Tensor.numel, tensors))
    return base_and_distances(pointers, sizes, range(len(tensors)), tensors[0].element_size())[1]


def base_and_distances(
    pointers: Sequence[int], sizes: Sequence[int], own: Sequence[int], size: int
) -> tuple[int, list[int]]:
    """Return the base among the tensors `own`, and the distance in elements from it to each of them.

    The base is the first with elements, or else the first. A tensor without elements has distance 0, since kernels read
    nothing there.

    Args:
        pointers, sizes: per tensor, the address of its memory and its number of elements.
        size: bytes of an element.
    """
    start = next((t for t in own if sizes[t]), own[0])
    return start, [(pointers[t] - pointers[start]) // size if sizes[t] else 0 for t in own]


def ceil_div(number: int, parts: int) -> int:
    """Return the quotient rounded up; `triton.cdiv` takes ten times as long."""
    return -(-number // parts)


def power_of_two(values: Sequence[int], most: int) -> int:
    """Return the largest power of two up to `most` that divides all values. Example: (12, 40), 16 -> 4."""
    divisor = math.gcd(most, *values)
    return divisor & -divisor
