"""Rows that a backward needs, with the values that the forward read, even if they are overwritten in between.

The gradient of an id's sample weight is the product of its row and its bag's gradient, so it needs the row that the
forward read. Rows may change meanwhile: another lookup's backward updates them, a checkpoint is loaded, a row is reset.

Terms
  reader  one lookup whose backward reads rows; it lives from the forward to the backward
  copies  the rows that the reader needs, one per id: made only for tables that are about to be written before its
          backward

    forward 1, forward 2, backward 1    before its update, reader 2 copies its rows
    backward 2                          reads the copies

tilerec announces each of its own writes (`GradientSink.about_to_write`). torch's optimizers do so as well: `step()`
calls hooks before it writes, also with `fused=True`. Other writes (`weight.copy_()`) change torch's version counters,
and the backward raises an error. Writes through `weight.data` stay undetected: torch does not count them for its own
ops either. Tables are handled one by one: a table's outcome does not depend on the other tables of a rank, so ranks
that do the same raise the same errors.

Legend: N ids, D columns of a table, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.torch_private import keeps_graph, version_of


@final
class SavedRows:
    """Rows that one lookup's backward reads.

    The backward keeps the reader alive and releases it. Sinks, which announce writes of rows, hold only weak
    references to it.

    Args:
        tables: the table of each feature.
        leaves: by table, the tensor that other code may write to. Cached tables are left out: writing a line back to
            its table would count as a write, too.
        name: returns a table's name, for messages.
        copy: returns copies of the current rows of these features, `[ids of the feature, D]` each.
    """

    def __init__(
        self, tables: Sequence[int], leaves: Mapping[int, Tensor], name: Callable[[int], str],
        copy: Callable[[Sequence[int]], list[Tensor]],
    ) -> None:  # fmt: skip
        self._tables, self._leaves, self._name = tuple(tables), dict(leaves), name
        self._versions = {t: version_of(leaf) for t, leaf in self._leaves.items()}
        self._copy = copy
        self._copies: dict[int, Tensor] = {}  # by feature
        self._kept: set[int] = set()  # tables with saved rows, which may be written

    @torch.no_grad()
    def keep(self, table: int) -> None:
        """Copy the rows of a table that is about to be written."""
        if not self._written(table):  # otherwise `rows` raises an error, if it is ever called
            self._kept.add(table)
            self._take([f for f, t in enumerate(self._tables) if t == table and f not in self._copies])

    def _take(self, features: Sequence[int]) -> None:
        if features:
            self._copies.update(zip(features, self._copy(features), strict=True))

    def _written(self, table: int) -> bool:
        leaf = self._leaves.get(table)
        return leaf is not None and version_of(leaf) != self._versions[table]

    @torch.no_grad()
    def rows(self) -> list[Tensor] | None:
        """Return the rows of each feature as the forward read them; None if all tables still hold them.

        Raises:
            InputError: a table was written without a preceding call of `keep`.
        """
        for table in self._leaves:
            if table not in self._kept and self._written(table):
                raise InputError(
                    f"Table '{self._name(table)}': its rows were written between a lookup and its backward, but not by "
                    "an optimizer (weight.copy_() ...). The gradient of the lookup's sample weights needs the rows as "
                    "they were. Run the backward before rows are written, or pass weights that need no gradient "
                    "(weights.detach())."
                )
        if not self._copies:
            return None
        self._take([f for f in range(len(self._tables)) if f not in self._copies])
        return [self._copies[f] for f in range(len(self._tables))]


def kept_for_retained_graph(reader: SavedRows | None) -> SavedRows | None:
    """Return the reader if the backward may run again (`retain_graph=True`), else None."""
    return reader if keeps_graph() else None


def copy_rows(weight: Tensor, ids_n: Tensor) -> Tensor:
    """Copy the rows of some ids, `[n, D]`. Bad ids give any rows: they count as zeros, and kernels report them."""
    if not weight.shape[0]:
        return weight.new_zeros(ids_n.numel(), weight.shape[1])
    return weight.detach()[ids_n.long().clamp(0, weight.shape[0] - 1)]


def positions_in_copies(ids: Tensor, segments: Sequence[tuple[int, int]]) -> Tensor:
    """Return the position of each id's row [N] among its feature's copies. Two segments are equal or disjoint.

    Example: two features with the ids (0, 1) and (1, 3) of three -> (0, 0, 1).
    """
    places = torch.zeros_like(ids)
    for begin, end in segments:
        places[begin:end] = torch.arange(end - begin, dtype=ids.dtype, device=ids.device)
    return places


def id_segments(offsets: Tensor, starts: Sequence[int], bags: Sequence[int]) -> list[tuple[int, int]]:
    """Return the range of each feature's ids. On a GPU this synchronizes.

    Example: offsets (0, 2, 3, 3, 7), features of 2 bags from bag 2 and from bag 0 -> (3, 7), (0, 3).
    """
    # The start of a feature without bags may be out of bounds.
    first = [start if count else 0 for start, count in zip(starts, bags, strict=True)]
    edges = torch.tensor([*first, *[s + b for s, b in zip(first, bags, strict=True)]], dtype=torch.int64)
    bounds = offsets[edges.to(offsets.device)].tolist()
    return list(zip(bounds[: len(starts)], bounds[len(starts) :], strict=True))
