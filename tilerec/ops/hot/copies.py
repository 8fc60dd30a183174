"""Copies of hot rows after an update: which of them changed, and how they reach the table's rows on this rank.

    head   the copies of a table's hot rows, in the order of the rows' numbers in the table
    tile   a range of the table's rows

    head of rows [3, 7, 8], updated ids [2, 0, 2], tile of rows [6, 10):   row 2 of the head is row 2 of the tile

Legend: N ids, H hot rows, U updated rows of all tiles, T tiles, K pairs of tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.cache.definition import copy_rows
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.runtime.upload import upload

_TABLE_BITS = 40
"""Bits of a row's number, beside that of its table in one number."""


def _check_found(
    ids_N: Tensor, heads: Sequence[int], begins: Sequence[int], ends: Sequence[int], names: Sequence[Tensor],
    tiles: Sequence[int], first_rows: Sequence[int], end_rows: Sequence[int],
) -> None:  # fmt: skip
    if ids_N.dtype not in (torch.int32, torch.int64) or ids_N.dim() != 1:
        raise ConfigError(
            f"updated_hot_rows: got ids {ids_N.dtype} {list(ids_N.shape)}; expected int32 or int64 [N]. Convert them."
        )
    if any([own.dtype != torch.int64 or own.dim() != 1 for own in names]):  # noqa: C419 - a list takes a third of a generator's time
        raise ConfigError(
            f"updated_hot_rows: got row numbers {[str(own.dtype) for own in names]}; expected int64 [H]. Convert them."
        )
    if not len(heads) == len(begins) == len(ends) or not len(tiles) == len(first_rows) == len(end_rows):
        raise ConfigError(
            f"updated_hot_rows: got {len(heads)}, {len(begins)} and {len(ends)} numbers of ranges of ids, "
            f"{len(tiles)}, {len(first_rows)} and {len(end_rows)} of tiles; expected one of each per range and tile. "
            "Pass one of each."
        )
    most = max([0, *ends])
    if min([0, *begins]) < 0 or most > ids_N.numel() or any(b > e for b, e in zip(begins, ends, strict=True)):
        raise ConfigError(
            f"updated_hot_rows: got ranges of ids from {begins} to {ends}; expected ranges of [0, {ids_N.numel()}]. "
            "Correct them."
        )
    if any([not 0 <= h < len(names) for h in (*heads, *tiles)]):  # noqa: C419 - as above
        raise ConfigError(
            f"updated_hot_rows: got heads {heads} and {tiles}; expected numbers in [0, {len(names)}). Correct them."
        )


def _fake_found(
    ids_N: Tensor, heads: Sequence[int], begins: Sequence[int], ends: Sequence[int], names: Sequence[Tensor],
    tiles: Sequence[int], first_rows: Sequence[int], end_rows: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    size = torch.library.get_ctx().new_dynamic_size()
    sources_U, targets_U = (ids_N.new_empty(size, dtype=torch.int64) for _ in range(2))
    return sources_U, targets_U, torch.empty(len(tiles), dtype=torch.int64, device="cpu")


@LIBRARY.op(
    "updated_hot_rows(Tensor ids_N, int[] heads, int[] begins, int[] ends, Tensor[] names, int[] tiles, "
    "int[] first_rows, int[] end_rows) -> (Tensor, Tensor, Tensor)",
    _fake_found,
    check=_check_found,
)
def updated_hot_rows_reference(
    ids_N: Tensor, heads: Sequence[int], begins: Sequence[int], ends: Sequence[int], names: Sequence[Tensor],
    tiles: Sequence[int], first_rows: Sequence[int], end_rows: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the updated rows of heads that lie in tiles, each once: number in the head, and in the tile.

    Rows of all heads are found at once, as positions in one list of all hot rows.

    Args:
        ids_N: numbers in heads, int32 or int64; repeats are allowed, numbers outside of the head are skipped.
        heads, begins, ends: of each range of ids, its head and its place in `ids_N`.
        names: of each head, int64 [H] ascending: the rows' numbers in the table.
        tiles: of each tile, the head of its table.
        first_rows, end_rows: of each tile, its rows in the table.

    Returns:
        sources_U, targets_U: int64, ascending, tile after tile. counts_T: int64 on the CPU, rows of each tile.
    """
    device, nothing = ids_N.device, ids_N.new_empty(0, dtype=torch.int64)
    starts = list(itertools.accumulate([own.numel() for own in names], initial=0))
    changed_R = torch.zeros(starts[-1] + 1, dtype=torch.bool, device=device)  # the last one: outside of the head
    for h, begin, end in zip(heads, begins, ends, strict=True):
        own_N = ids_N[begin:end].long()
        inside_N = (own_N >= 0) & (own_N < names[h].numel())
        changed_R[torch.where(inside_N, own_N + starts[h], starts[-1])] = True
    updated_U = changed_R[:-1].nonzero()[:, 0]
    keys = torch.cat([nothing, *[own + (h << _TABLE_BITS) for h, own in enumerate(names)]])
    edges = [(h << _TABLE_BITS) + row for h, *own in zip(tiles, first_rows, end_rows, strict=True) for row in own]
    bounds = torch.searchsorted(updated_U, torch.searchsorted(keys, upload(edges, device))).tolist()
    rows_U = torch.cat([nothing, *names])[updated_U]
    sources, targets, counts = [nothing], [nothing], list[int]()
    for h, first, begin, end in zip(tiles, first_rows, bounds[::2], bounds[1::2], strict=True):
        sources.append(updated_U[begin:end] - starts[h])
        targets.append(rows_U[begin:end] - first)
        counts.append(end - begin)
    return torch.cat(sources), torch.cat(targets), upload(counts, torch.device("cpu"))


def _check_copied(
    targets: Sequence[Tensor], sources: Sequence[Tensor], targets_U: Tensor, sources_U: Tensor, begins: Sequence[int],
    ends: Sequence[int], columns: Sequence[int],
) -> None:  # fmt: skip
    if not len(targets) == len(sources) == len(begins) == len(ends) == len(columns):
        raise ConfigError(
            f"copy_rows_: got {len(targets)} targets, {len(sources)} sources, {len(begins)} and {len(ends)} ends of "
            f"ranges and {len(columns)} columns; expected one of each per pair of tensors. Pass one of each."
        )
    if targets_U.dtype != torch.int64 or sources_U.dtype != torch.int64 or targets_U.shape != sources_U.shape:
        raise ConfigError(
            f"copy_rows_: got rows {targets_U.dtype} {list(targets_U.shape)} and {sources_U.dtype} "
            f"{list(sources_U.shape)}; expected int64 [U] both. Convert them."
        )
    for target, source, begin, end, column in zip(targets, sources, begins, ends, columns, strict=True):
        width = target.shape[1] if target.dim() == 2 else 1
        most = source.shape[1] if source.dim() == 2 else 1
        fits = 0 <= begin <= end <= targets_U.numel() and 0 <= column <= most - width
        if target.dtype != source.dtype or target.dim() != source.dim() or target.dim() not in (1, 2) or not fits:
            raise ConfigError(
                f"copy_rows_: got rows {target.dtype} {list(target.shape)} from {source.dtype} {list(source.shape)}, "
                f"column {column}, numbers [{begin}, {end}) of {targets_U.numel()}; expected one dtype, [rows] or "
                "[rows, columns] both, and a range of the source's columns and of the numbers. Correct them."
            )


@LIBRARY.op(
    "copy_rows_(Tensor(a!)[] targets, Tensor[] sources, Tensor targets_U, Tensor sources_U, int[] begins, int[] ends, "
    "int[] columns) -> ()",
    check=_check_copied,
)
def copy_rows_reference_(
    targets: Sequence[Tensor], sources: Sequence[Tensor], targets_U: Tensor, sources_U: Tensor, begins: Sequence[int],
    ends: Sequence[int], columns: Sequence[int],
) -> None:  # fmt: skip
    """Copy rows of several tensors: `targets[k][targets_U[b:e]] = sources[k][sources_U[b:e]]`.

    Args:
        targets, sources: of one dtype, `[rows]` or `[rows, columns]`; sources may have more columns.
        columns: of each pair, the first column of the source to copy.
        targets_U, sources_U: int64, row numbers. Target rows of a pair are distinct.
        begins, ends: of each pair, its range b:e of row numbers.

    Raises:
        IndexError: a number outside of its tensor. On a GPU that is a device-side assertion.

    targets [[0, 0], [0, 0]], sources [[1, 2, 3], [4, 5, 6]], rows [0] from [1], columns [1]: [[5, 6], [0, 0]].
    """
    for target, source, begin, end, column in zip(targets, sources, begins, ends, columns, strict=True):
        own = source if source.dim() == 1 else source[:, column : column + target.shape[1]]
        copy_rows(target, targets_U[begin:end], own, sources_U[begin:end])
