"""Registration of the random ops: references on import, native and Triton kernels by call."""

from __future__ import annotations

import ctypes

from tilerec.ops.random import definition as definition
from tilerec.ops.random import renew as renew


def register_cpu(library: ctypes.CDLL) -> None:
    """Register the native kernels for CPU tensors."""
    from tilerec.ops.random import cpu

    cpu.register(library)


def register_gpu() -> None:
    """Register the Triton kernels for GPU tensors."""
    from tilerec.ops.random.triton import backend, renew

    backend.register()
    renew.register()
