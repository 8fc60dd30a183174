"""Triton kernels of the exchange ops on GPUs. `definition.py` defines the ops, with examples.

`route.py` has `route_ids`; `rows.py` has `place_rows_`, `pick_rows` and `pick_rows_`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilerec.ops.exchange.definition import pick_rows_from
from tilerec.ops.exchange.triton.route import route_ids
from tilerec.ops.exchange.triton.rows import pick_rows_, place_rows_

pick_rows = pick_rows_from(pick_rows_)

KERNELS: dict[str, Callable[..., Any]] = {
    "route_ids": route_ids,
    "place_rows_": place_rows_,
    "pick_rows": pick_rows,
    "pick_rows_": pick_rows_,
}
"""Kernels by op name."""
