"""Reset of rows: initial values for weights, initial numbers for slots and gradients.

Managed collision reassigns rows to other ids. On a GPU neither the ids that took another id's row nor their number is
available on the host. So callers pass one entry per id, and most entries are -1.

Terms
  tile    the rows and columns of a table on this rank, from `row_offset` and `column_offset` on
  beside  tensors with as many rows as the tile, each with the number that it is reset to

Legend: N entries, E rows of the tile, C its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.random.definition import check_tile
from tilerec.ops.runtime.library import LIBRARY, new_record


class RenewCall(NamedTuple):
    """One call of `renew_rows_`; its fields are the op's arguments."""

    rows_N: Tensor
    tile: Tensor | None
    beside: Sequence[Tensor]
    row_offset: int
    column_offset: int
    key: Sequence[int]
    low: float
    high: float
    numbers: Sequence[float]

    @property
    def reset(self) -> Sequence[Tensor]:
        """The tile, if there is one, and the tensors beside it."""
        return self.beside if self.tile is None else [self.tile, *self.beside]


def check_row_reset(call: RenewCall) -> None:
    """Raise a `ConfigError` for arguments that do not match."""
    rows_N, tile, beside, row_offset, column_offset, key, _, _, numbers = call
    if tile is not None:
        check_tile(tile, key, row_offset, column_offset, "uniform")
    held = [tensor.shape[0] for tensor in call.reset]
    if any(rows != held[0] for rows in held) or len(numbers) != len(beside):
        raise ConfigError(
            f"renew_rows_: tensors of {held} rows, and {len(numbers)} numbers for {len(beside)} tensors in `beside`; "
            "expected equal numbers of rows, and one number per tensor in `beside`."
        )
    if rows_N.dtype != torch.int64 or rows_N.dim() != 1:
        raise ConfigError(
            f"renew_rows_: rows are {rows_N.dtype} of shape {list(rows_N.shape)}; expected a flat list of int64."
        )


@LIBRARY.op(
    "renew_rows_(Tensor rows_N, Tensor(a!)? tile, Tensor(b!)[] beside, int row_offset, int column_offset, int[] key, "
    "float low, float high, float[] numbers) -> ()",
    unpack=lambda *args: new_record(RenewCall, args),
    check=check_row_reset,
    check_fake=True,
)
def renew_rows_reference_(call: RenewCall) -> None:
    """Write initial values into some rows of a tile, and a number into the same rows of each tensor in `beside`.

    Args:
        rows_N: int64, rows of the whole table. Rows outside of the tile, and -1, are skipped; duplicates are allowed.
        tile: `[E, C]`; it gets the values of `random_fill_`, uniform in [low, high). None: no weights are reset.
        beside: `[E]` or `[E, …]`, each with its entry of `numbers`.

    Tile of rows 4 to 7, beside [1, 2, 3, 4] with the number 0, rows [5, -1, 9, 5]: row 5 of the tile gets its initial
    values, and beside is [1, 0, 3, 4].
    """
    rows_N, tile, beside, row_offset, column_offset, key, low, high, numbers = call
    held = call.reset[0].shape[0] if call.reset else 0
    own_M = _rows_in_tile(rows_N, row_offset, held)
    if not own_M.numel():
        return
    local_M = own_M - row_offset if row_offset else own_M
    if tile is not None:
        made = tile.new_empty(own_M.shape[0], tile.shape[1])
        torch.ops.tilerec.random_rows_.default(made, own_M, key, column_offset, "uniform", low, high)
        _indexable(tile).index_copy_(0, local_M, _indexable(made))
    for tensor, number in zip(beside, numbers, strict=True):
        if tensor.dtype in (torch.float32, torch.float64):
            tensor.index_fill_(0, local_M, number)
            continue
        value = _indexable(torch.tensor(number, dtype=tensor.dtype, device="cpu"))
        _indexable(tensor).index_fill_(0, local_M, value.item())


def _rows_in_tile(rows_N: Tensor, row_offset: int, held: int) -> Tensor:
    """Return the rows inside the tile, int64 [M]. If all are (usual on the CPU), return `rows_N` without a copy."""
    first, last = max(row_offset, 0), row_offset + held
    if rows_N.numel() and rows_N.is_cpu:
        least, most = rows_N.aminmax()
        if least.item() >= first and most.item() < last:
            return rows_N
    return rows_N[(rows_N >= first) & (rows_N < last)]


def _indexable(tensor: Tensor) -> Tensor:
    """Return a view in a dtype that torch can write by index: fp8 as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
