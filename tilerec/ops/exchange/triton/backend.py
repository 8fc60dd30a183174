"""Triton kernels of the exchange ops on GPUs. `definition.py` defines the ops, with examples.

`route.py` has `route_ids`; `rows.py` has `place_rows_`, `pick_rows` and `pick_rows_`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilerec.ops.exchange.triton.route import route_ids
from tilerec.ops.exchange.triton.rows import pick_rows, pick_rows_, place_rows_
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.runtime.triton.library import on_own_device


def kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernels by op name."""
    return {
        "route_ids": route_ids,
        "place_rows_": place_rows_,
        "pick_rows": pick_rows,
        "pick_rows_": pick_rows_,
    }


def register(key: str = "CUDA") -> None:
    """Register these kernels for the ops on tensors of a dispatch key."""
    for name, kernel in kernels().items():
        LIBRARY.impl(name, on_own_device(kernel), key, allow_override=True)
