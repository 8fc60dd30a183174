"""Marks of rows, one bit per row: bit `row % 32` of word `row // 32`.

Legend: N entries, W words of a table, U marked rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.runtime.library import LIBRARY

WORD = 32


def empty_marks(rows: int, device: torch.device | str) -> Tensor:
    """Return the marks of a table without a marked row, int32 [W]."""
    return torch.zeros(-(-rows // WORD), dtype=torch.int32, device=device)


def check_marks(marks: Sequence[Tensor], rows: Sequence[Tensor], counts: Sequence[int]) -> None:
    """Raise `ConfigError` for arguments that do not fit."""
    if not len(marks) == len(rows) == len(counts):
        raise ConfigError(
            f"mark_rows_: got {len(marks)} marks, {len(rows)} lists of rows and {len(counts)} counts; expected as many "
            "of each. Pass one of each per table."
        )
    for words_W, rows_N, count in zip(marks, rows, counts, strict=True):
        if words_W.dtype != torch.int32 or words_W.shape != (-(-count // WORD),):
            raise ConfigError(
                f"mark_rows_: got marks {words_W.dtype} {list(words_W.shape)} for {count} rows; expected int32 "
                f"[{-(-count // WORD)}]. Make them with empty_marks."
            )
        if rows_N.dtype not in (torch.int32, torch.int64) or rows_N.dim() != 1:
            raise ConfigError(
                f"mark_rows_: got rows {rows_N.dtype} {list(rows_N.shape)}; expected int32 or int64 [N]. Convert them."
            )


@LIBRARY.op(
    "mark_rows_(Tensor(a!)[] marks, Tensor[] rows, int[] counts) -> ()",
    check=check_marks,
    check_fake=True,
)
def mark_rows_reference_(marks: Sequence[Tensor], rows: Sequence[Tensor], counts: Sequence[int]) -> None:
    """Mark rows of several tables.

    Args:
        marks: of each table, int32 [W].
        rows: of each table, int32 or int64 [N]; numbers outside of the table are skipped, and may repeat.
        counts: rows of each table.

    A table of 40 rows without marks, rows [3, 33, -1, 3, 40]: its words are [8, 2].
    """
    for words_W, rows_N, count in zip(marks, rows, counts, strict=True):
        own_N = rows_N[(rows_N >= 0) & (rows_N < count)].long()
        hit = torch.zeros(words_W.shape[0], WORD, dtype=torch.int64, device=words_W.device)
        hit.view(-1).index_fill_(0, own_N, 1)
        words_W |= (hit << torch.arange(WORD, device=words_W.device)).sum(1).to(torch.int32)


def marked_rows(words_W: Tensor, count: int) -> Tensor:
    """Return the marked rows of a table of `count` rows, int64 [U], ascending. Waits for the marks' device."""
    if words_W.device.type == "cpu":  # NumPy unpacks bits in a tenth of torch's time
        bits = np.unpackbits(words_W.numpy().view(np.uint8), bitorder="little", count=count)
        return torch.from_numpy(np.flatnonzero(bits))
    bits_R = (words_W[:, None] >> torch.arange(WORD, device=words_W.device)) & 1
    return bits_R.view(-1)[:count].nonzero()[:, 0]
