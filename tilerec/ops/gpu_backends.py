"""Triton kernels of all op families, for GPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilerec.ops.cache.triton.backend import KERNELS as CACHE
from tilerec.ops.exchange.triton.backend import KERNELS as EXCHANGE
from tilerec.ops.hash.triton.backend import KERNELS as HASH
from tilerec.ops.jagged.triton.backend import KERNELS as JAGGED
from tilerec.ops.lookup.triton.backend import KERNELS as LOOKUP
from tilerec.ops.marks.triton import KERNELS as MARKS
from tilerec.ops.quantize.triton import KERNELS as QUANTIZE
from tilerec.ops.random.triton.backend import KERNELS as RANDOM
from tilerec.ops.random.triton.renew import KERNELS as RENEW
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.runtime.triton.library import on_own_device
from tilerec.ops.update.triton.backend import KERNELS as UPDATE

FAMILIES = (CACHE, EXCHANGE, HASH, JAGGED, LOOKUP, MARKS, QUANTIZE, RANDOM, RENEW, UPDATE)


def register(key: str = "CUDA", families: Sequence[Mapping[str, Callable[..., Any]]] = FAMILIES) -> None:
    """Register the kernels over the references for a dispatch key."""
    for kernels in families:
        LIBRARY.serve(key, kernels, on_own_device)
