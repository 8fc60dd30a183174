"""Reset of rows: initial values, and the attached optimizer's state from before the first step.

Initial values depend only on the position in the table (`initial_values.py`). A reset row gets its first values again,
the same on every rank and under every tiling. An `init_fn` is called with the row alone, with torch's generators seeded
by table and row.

On a device the host does not wait to learn the row numbers (`ops/random`). Exceptions: an `init_fn`, which the host
calls for each row, tables behind a cache, and copies of hot rows (`spec/hot_rows.py`).

Legend: N entries, of which -1 are no rows; M rows.
"""

from __future__ import annotations

import warnings
from typing import cast

import torch
from torch import Tensor

from tilerec.modules.initial_values import initial_row
from tilerec.modules.table import Table
from tilerec.ops.runtime.readback import on_arrival, poll
from tilerec.ops.runtime.upload import capturing
from tilerec.storage.table_rows import TableRows


@torch.no_grad()
def reset_rows(table: Table, rows_N: Tensor) -> None:
    """Reset rows of a table and their attached optimizer state; skip rows that other ranks hold.

    Args:
        rows_N: int64, row numbers of the whole table, on any device. -1 is no row.
    """
    for rows in cast("list[TableRows]", getattr(table, "tile_rows", [table.rows])):
        device = rows.leaf.device
        # Blocking to the CPU, because the host reads the copy at once.
        own_N = rows_N.to(device, non_blocking=device.type != "cpu")
        # A rank without rows writes nothing, and must not mark its rows as written.
        if not own_N.numel() or not rows.leaf.shape[0]:
            continue
        if rows.names is not None:
            _reset_copies(table, rows, rows.names, own_N)
            continue
        if rows.cache is None:
            rows.arrive()
            rows.about_to_write(_rows_in_tile(rows, own_N) - rows.place.row_offset if rows.observers else None)
        else:
            rows.leave(_rows_in_tile(rows, own_N) - rows.place.row_offset)
        _reset_tile(table, rows, own_N, slice(None), rows.place.row_offset)
        rows.wrote()
        if rows.spec is None and rows.leaf.requires_grad and not getattr(table, "_warned_of_eviction", False):
            _warn_later(table, rows, own_N)


def _reset_copies(table: Table, rows: TableRows, names_H: Tensor, own_N: Tensor) -> None:
    """Reset copies of hot rows, each as a tile of one row: an evicted row is seldom hot. names_H: of the copies."""
    own = torch.isin(names_H, own_N).nonzero()[:, 0]
    if not own.numel():
        return
    rows.arrive()
    rows.about_to_write(own if rows.observers else None)
    for k, row in zip(own.tolist(), names_H[own].tolist(), strict=True):
        _reset_tile(table, rows, own_N, slice(k, k + 1), row)
    rows.wrote()


def _reset_tile(table: Table, rows: TableRows, own_N: Tensor, part: slice, first: int) -> None:
    """Reset rows in a part of a leaf. first: the row of the table that the part begins with."""
    config, place, leaf = table.config, rows.place, rows.leaf.detach()[part]
    beside = {} if rows.spec is None else {slot.name: slot.init for slot in rows.spec.slots}
    tensors = [rows.state[name][part] for name in beside]
    grad = rows.leaf.grad
    if rows.spec is None and grad is not None and grad.layout is torch.strided:
        tensors, beside = [grad[part]], {"grad": 0.0}  # drop the old id's gradient
    low, high, made = 0.0, 0.0, config.init_fn is None
    if made:
        low, high = config.get_weight_init_min(), config.get_weight_init_max()
    torch.ops.tilerec.renew_rows_(
        own_N, leaf if made else None, tensors, first, place.column_offset, place.key, low, high,
        [float(number) for number in beside.values()],
    )  # fmt: skip
    # The op writes outside of autograd. New version counters mark the tensors that a backward saved as stale.
    torch.autograd.graph.increment_version([leaf, *tensors])
    if not made:
        columns = slice(place.column_offset, place.column_offset + leaf.shape[1])
        like = leaf if rows.cache_beside is None else leaf.cpu()  # drawn where the row itself is
        for row in own_N[(own_N >= first) & (own_N < first + leaf.shape[0])].tolist():
            leaf[row - first] = initial_row(config, place.key, row, like)[columns]


def _rows_in_tile(rows: TableRows, own_N: Tensor) -> Tensor:
    """Return the row numbers that lie in this tile, int64 [M]. Waits for a device."""
    first = rows.place.row_offset
    return own_N[(own_N >= first) & (own_N < first + rows.leaf.shape[0])]


def _warn_later(table: Table, rows: TableRows, own_N: Tensor) -> None:
    """Warn, once a reset is confirmed, that the state of an optimizer that steps `.grad` is not reset."""

    def warn(numbers: list[int]) -> None:
        if not numbers[0] or getattr(table, "_warned_of_eviction", False):
            return
        table._warned_of_eviction = True
        warnings.warn(
            f"Table '{table.config.name}': evicted rows get their initial values again, but an optimizer that steps "
            ".grad keeps the old id's state. Attach the optimizer (apply_optimizer_in_backward) to reset its state "
            "too.",
            stacklevel=2,
        )

    if own_N.is_meta or capturing():
        return
    poll(own_N.device)
    first = rows.place.row_offset
    here_N = (own_N >= first) & (own_N < first + rows.leaf.shape[0])
    on_arrival(here_N.sum().view(1), warn)
