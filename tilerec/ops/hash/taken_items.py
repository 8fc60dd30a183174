"""Items in a chosen order, or rows of hashed ids in their place: `take_items_`. Terms as in `definition.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.ops.hash.checks import check_take_items, raise_bad_order
from tilerec.ops.hash.hashed_rows import hash_rows_reference
from tilerec.ops.runtime.library import LIBRARY


@LIBRARY.op(
    "take_items_(Tensor items_n, Tensor order_M, int[] counts, Tensor(a!)[] outs, int[] starts, int rows, "
    "int first_row) -> ()",
    check=check_take_items,
)
def take_items_reference(
    items_n: Tensor, order_M: Tensor, counts: Sequence[int], outs: Sequence[Tensor], starts: Sequence[int], rows: int,
    first_row: int,
) -> None:  # fmt: skip
    """Write the items at `order_M`: the first counts[0] of them to outs[0] from starts[0] on, and so forth.

    With `rows` > 0 the items are ids, and their rows of `hash_rows_` are written in their place.

    items [a, b, c], order [2, 0, 2], counts [1, 2], outs [[x], [x, x, x]], starts [0, 1] -> outs [[c], [x, a, c]]
    """
    if order_M.shape[0]:
        low, high = (int(bound) for bound in torch.aminmax(order_M))
        if low < 0 or high >= items_n.shape[0]:
            raise_bad_order(order_M, items_n.shape[0])
    taken_M = items_n.index_select(0, order_M)
    if rows:
        hash_rows_reference(taken_M, rows, first_row, taken_M)
    for out, start, piece in zip(outs, starts, taken_M.split(list(counts)), strict=True):
        out[start : start + piece.shape[0]] = piece
