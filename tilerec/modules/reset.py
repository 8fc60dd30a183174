"""Rows made new: initial values, and the attached optimizer's state as it was before the first step.

Initial values depend on the place only (`modules/initial.py`): a row that is made new has the values that it began
with, the same on every rank and under every tiling. Under an `init_fn` it is called with the row alone, and torch's
generators seeded by table and row.

Legend: M rows, D columns of a leaf.
"""

from __future__ import annotations

import warnings
from typing import cast

import torch
from torch import Tensor

from tilerec.modules.initial import initial_row
from tilerec.modules.table import Table
from tilerec.storage.table_rows import TableRows


@torch.no_grad()
def reset_rows(table: Table, rows_M: Tensor) -> None:
    """Make rows of a table new, with the state of its attached optimizer; those that lie elsewhere are left out.

    Args:
        rows_M: int64, of the whole table; any device.
    """
    for rows in cast("list[TableRows]", getattr(table, "tile_rows", [table.rows])):
        leaf, place = rows.leaf, rows.place
        own_M = rows_M.to(leaf.device)
        own_M = own_M[(own_M >= place.row_offset) & (own_M < place.row_offset + leaf.shape[0])]
        if not own_M.numel() or leaf.is_meta:
            continue
        local_M = own_M - place.row_offset
        rows.leave(local_M)
        leaf.index_copy_(0, local_M, initial_values(table, rows, own_M))
        for slot in rows.spec.slots if rows.spec is not None else ():
            rows.state[slot.name].index_fill_(0, local_M, slot.init)
        if rows.spec is None:
            _forget_grad(table, leaf, local_M)


def initial_values(table: Table, rows: TableRows, rows_M: Tensor) -> Tensor:
    """Initial values `[M, D]` of single rows, in the columns of this leaf."""
    config, place, leaf = table.config, rows.place, rows.leaf
    width = leaf.shape[1]
    if config.init_fn is None:
        low, high = config.get_weight_init_min(), config.get_weight_init_max()
        made = leaf.new_empty(rows_M.numel(), width)
        torch.ops.tilerec.random_rows_(made, rows_M, place.key, place.column_offset, "uniform", low, high)
        return made
    columns = slice(place.column_offset, place.column_offset + width)
    return torch.stack([initial_row(config, place.key, row, leaf)[columns] for row in rows_M.tolist()])


def _forget_grad(table: Table, leaf: Tensor, local_M: Tensor) -> None:
    """What the old id left in `.grad`; an optimizer that steps it has state that is not ours to reset."""
    if leaf.grad is not None and leaf.grad.layout is torch.strided:
        leaf.grad.index_fill_(0, local_M, 0.0)
    if leaf.requires_grad and not getattr(table, "_warned_of_eviction", False):
        table._warned_of_eviction = True
        warnings.warn(
            f"Table '{table.config.name}': rows that lose their id get their initial values again, but the state of an "
            "optimizer that steps .grad is not known here and stays the old id's; attach it "
            "(apply_optimizer_in_backward), and it is reset too.",
            stacklevel=2,
        )
