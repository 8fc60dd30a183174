"""The exchange ops on GPUs; `tilerec/ops/exchange.py` says what they mean, with examples.

`exchange_route.py` has `route_ids`, `exchange_rows.py` `place_rows_` and `pick_rows`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilerec.ops.library import LIBRARY
from tilerec.ops.triton.exchange_route import route_ids
from tilerec.ops.triton.exchange_rows import pick_rows, pick_rows_, place_rows_
from tilerec.ops.triton.library import on_own_device


def kernels() -> dict[str, Callable[..., Any]]:
    """The kernels by op name."""
    return {
        "route_ids": route_ids,
        "place_rows_": place_rows_,
        "pick_rows": pick_rows,
        "pick_rows_": pick_rows_,
    }


def register(key: str = "CUDA") -> None:
    """Let these kernels serve the ops on tensors of a dispatch key."""
    for name, kernel in kernels().items():
        LIBRARY.impl(name, on_own_device(kernel), key, allow_override=True)
