"""Which kernels run: the plain-PyTorch reference everywhere, faster backends registered over it where they can be had.

Importing this file makes every op usable; nothing else imports a backend.
"""

from __future__ import annotations

from tilerec.ops import cache as cache
from tilerec.ops import exchange as exchange
from tilerec.ops import gradient as gradient
from tilerec.ops import hash as hash
from tilerec.ops import jagged as jagged
from tilerec.ops import lookup as lookup
from tilerec.ops import order as order
from tilerec.ops import quant as quant
from tilerec.ops import random as random
from tilerec.ops import renew as renew
from tilerec.ops import update as update
from tilerec.ops.cpu.library import advise_huge_pages as advise_huge_pages
from tilerec.ops.cpu.library import library
from tilerec.ops.cpu.memory import reused_empty as reused_empty
from tilerec.ops.triton.library import serves_gpus


def _register_cpu() -> bool:
    native = library()
    if native is None:
        return False
    from tilerec.ops.cpu import exchange, hash, jagged, lookup, random, update

    for backend in (exchange, hash, jagged, lookup, random, update):
        backend.register(native)
    return True


def _register_gpu() -> bool:
    if not serves_gpus():
        return False
    from tilerec.ops.triton import cache, exchange, hash, jagged, lookup, parts, quant, random, renew, update

    for backend in (cache, exchange, hash, jagged, lookup, parts, quant, random, renew, update):
        backend.register()
    return True


NATIVE_CPU = _register_cpu()
"""Whether the native CPU library serves the ops of this process (`tilerec.ops.cpu.library.reason()` says why not)."""

TRITON = _register_gpu()
"""Whether Triton kernels serve the ops of this process on GPUs (`tilerec.ops.triton.library.status()` says why not)."""
