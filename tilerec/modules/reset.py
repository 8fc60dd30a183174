"""Rows made new: initial values, and the attached optimizer's state as it was before the first step.

Initial values depend on the place only (`modules/initial.py`): a row that is made new has the values that it began
with, the same on every rank and under every tiling. Under an `init_fn` it is called with the row alone, and torch's
generators seeded by table and row.

On a device the host does not wait for these rows (`ops/random/renew.py`), but under an `init_fn`, which it calls
for each, and where rows lie behind a cache.

Legend: N entries, of which -1 are no rows; M rows.
"""

from __future__ import annotations

import warnings
from typing import cast

import torch
from torch import Tensor

from tilerec.modules.initial import initial_row
from tilerec.modules.table import Table
from tilerec.ops.runtime.readback import use_arrived, when_arrived
from tilerec.ops.runtime.upload import capturing
from tilerec.storage.table_rows import TableRows


@torch.no_grad()
def reset_rows(table: Table, rows_N: Tensor) -> None:
    """Make rows of a table new, with the state of its attached optimizer; those that lie elsewhere are left out.

    Args:
        rows_N: int64, of the whole table; any device. -1 is none.
    """
    for rows in cast("list[TableRows]", getattr(table, "tile_rows", [table.rows])):
        there = rows.leaf.device
        own_N = rows_N.to(there, non_blocking=there.type != "cpu")  # to the host: it is read there at once
        # Nothing is written where there are no rows: such ranks must not take theirs for written.
        if not own_N.numel() or not rows.leaf.shape[0]:
            continue
        if rows.cache is None:
            rows.arrive()
            rows.about_to_write()
        else:
            rows.leave(_here(rows, own_N) - rows.place.row_offset)
        _renew(table, rows, own_N)
        if rows.spec is None and rows.leaf.requires_grad and not getattr(table, "_warned_of_eviction", False):
            _warn_later(table, rows, own_N)


def _renew(table: Table, rows: TableRows, own_N: Tensor) -> None:
    config, place, leaf = table.config, rows.place, rows.leaf.detach()
    beside = {} if rows.spec is None else {slot.name: slot.init for slot in rows.spec.slots}
    tensors = [rows.state[name] for name in beside]
    grad = rows.leaf.grad
    if rows.spec is None and grad is not None and grad.layout is torch.strided:
        tensors, beside = [grad], {"grad": 0.0}  # what the old id left there
    low, high, made = 0.0, 0.0, config.init_fn is None
    if made:
        low, high = config.get_weight_init_min(), config.get_weight_init_max()
    torch.ops.tilerec.renew_rows_(
        own_N, leaf if made else None, tensors, place.row_offset, place.column_offset, place.key, low, high,
        [float(number) for number in beside.values()],
    )  # fmt: skip
    # Ops write behind autograd's back; it must learn that saved copies of these tensors are stale.
    torch.autograd.graph.increment_version([leaf, *tensors])
    if not made:
        columns = slice(place.column_offset, place.column_offset + leaf.shape[1])
        for row in _here(rows, own_N).tolist():
            leaf[row - place.row_offset] = initial_row(config, place.key, row, leaf)[columns]


def _here(rows: TableRows, own_N: Tensor) -> Tensor:
    """int64 [M]: those that lie in these rows. Waits for a device."""
    first = rows.place.row_offset
    return own_N[(own_N >= first) & (own_N < first + rows.leaf.shape[0])]


def _warn_later(table: Table, rows: TableRows, own_N: Tensor) -> None:
    """An optimizer that steps `.grad` has state that is not ours to reset: said once rows are known to be reset."""

    def warn(numbers: list[int]) -> None:
        if not numbers[0] or getattr(table, "_warned_of_eviction", False):
            return
        table._warned_of_eviction = True
        warnings.warn(
            f"Table '{table.config.name}': rows that lose their id get their initial values again, but the state of an "
            "optimizer that steps .grad is not known here and stays the old id's; attach it "
            "(apply_optimizer_in_backward), and it is reset too.",
            stacklevel=2,
        )

    if own_N.is_meta or capturing():
        return
    use_arrived(own_N.device)
    first = rows.place.row_offset
    here_N = (own_N >= first) & (own_N < first + rows.leaf.shape[0])
    when_arrived(here_N.sum().view(1), warn)
