"""Registration of all ops: plain-PyTorch reference kernels, and native CPU and Triton kernels if available.

Importing this file makes every op usable. Each family's `backends.py` imports its own backends; no other file does.
"""

from __future__ import annotations

import torch

from tilerec.ops.cache import backends as cache
from tilerec.ops.exchange import backends as exchange
from tilerec.ops.gradient import definition as gradient
from tilerec.ops.hash import backends as hash
from tilerec.ops.jagged import backends as jagged
from tilerec.ops.lookup import backends as lookup
from tilerec.ops.quantize import backends as quantize
from tilerec.ops.random import backends as random
from tilerec.ops.runtime.cpu.library import advise_huge_pages as advise_huge_pages
from tilerec.ops.runtime.cpu.library import library
from tilerec.ops.runtime.cpu.memory import reused_empty as reused_empty
from tilerec.ops.runtime.triton.library import serves_gpus
from tilerec.ops.update import backends as update

WITHOUT_BACKENDS = (gradient,)
"""Families of ops that compute nothing on a device: importing them registers all their kernels."""


def _register_cpu() -> bool:
    native = library()
    if native is None:
        return False
    for family in (exchange, hash, jagged, lookup, random, update):
        family.register_cpu(native)
    return True


def _register_gpu() -> bool:
    if not serves_gpus():
        return False
    for family in (cache, exchange, hash, jagged, lookup, quantize, random, update):
        family.register_gpu()
    return True


NATIVE_CPU = _register_cpu()
"""True if the native CPU library provides CPU kernels in this process.

Otherwise `tilerec.ops.runtime.cpu.library.reason()` returns the reason.
"""

TRITON = _register_gpu()
"""True if Triton kernels run the ops on GPUs in this process.

Otherwise `tilerec.ops.runtime.triton.library.status()` returns the reason.
"""


def gpu_kernels_serve(device: torch.device) -> bool:
    """Return True if GPU kernels serve the ops on this device: False on CPUs, and on GPUs with reference kernels."""
    return TRITON and device.type == "cuda"
