"""`mark_of`: the way to notice that a tensor is another one, or was written to.

Code that relies on a tensor's contents over time (batches in flight, results prepared in advance, batches read without
a copy) keeps the tensor and its mark, and compares marks. Keeping the tensor matters: no other tensor can then be
allocated at its address.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilerec.torch_private import version_of


def mark_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the mark of a tensor: address, shape, strides, dtype, device and version.

    Equal marks mean the same contents, except after a write that torch does not count: through `tensor.data`, through a
    NumPy array that shares the memory, or to an inference tensor.
    """
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, version_of(tensor))
