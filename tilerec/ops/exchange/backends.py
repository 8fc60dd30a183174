"""Registration of the exchange ops: references on import, native and Triton kernels by call."""

from __future__ import annotations

import ctypes

from tilerec.ops.exchange import definition as definition


def register_cpu(library: ctypes.CDLL) -> None:
    """Register the native kernels for CPU tensors."""
    from tilerec.ops.exchange import cpu

    cpu.register(library)


def register_gpu() -> None:
    """Register the Triton kernels for GPU tensors."""
    from tilerec.ops.exchange.triton import backend

    backend.register()
