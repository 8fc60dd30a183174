"""Registration of the cache ops: references on import, native and Triton kernels by call."""

from __future__ import annotations

from tilerec.ops.cache import definition as definition


def register_gpu() -> None:
    """Register the Triton kernels for GPU tensors."""
    from tilerec.ops.cache.triton import backend

    backend.register()
