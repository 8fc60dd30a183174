"""Registration of the update ops: references on import, native and Triton kernels by call."""

from __future__ import annotations

import ctypes

from tilerec.ops.update import definition as definition
from tilerec.ops.update import order as order


def register_cpu(library: ctypes.CDLL) -> None:
    """Register the native kernels for CPU tensors."""
    from tilerec.ops.update import cpu

    cpu.register(library)


def register_gpu() -> None:
    """Register the Triton kernels for GPU tensors."""
    from tilerec.ops.update.triton import backend

    backend.register()
