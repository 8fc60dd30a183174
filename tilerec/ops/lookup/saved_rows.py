"""Rows that a backward reads: as the forward read them, whatever is written in between.

The gradient of an id's weight is the product of its row and of its bag's gradient, so it is about the row that the
forward read. Rows move meanwhile: another lookup's backward updates them, a checkpoint is loaded, a row is reset.

Nouns
  reader  one lookup whose backward reads rows; it lives from the forward to the backward
  copies  of the rows that it wants, one per id: made only of tables that are about to be written while it waits

    forward 1, forward 2, backward 1    its update says that it is about to write: reader 2 copies its rows
    backward 2                          reads the copies

Whoever writes rows here says so first (`GradientSink.about_to_write`), and so do optimizers of torch: `step()` calls
hooks before it writes, with `fused=True`, too. What others write (`weight.copy_()`) shows in torch's version counters,
and the backward refuses; but for writes through `weight.data`, which torch does not count for its own ops either.
Table by table: what is known of one does not depend on which others a rank holds, so ranks
that do the same refuse the same.

Legend: N ids, D columns of a table, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.torch_private import keeps_graph


@final
class Reader:
    """One lookup whose backward reads rows. Its backwards keep it alive, and let it go; what writes rows only knows
    of it.

    Args:
        tables: per feature, its table.
        leaves: by table, what others may write to. Those of cached tables are left out: lines that go back to their
            table are written there, too.
        name: a table's, for messages.
        copy: copies of the rows of these features, `[ids of the feature, D]` each, as they are now.
    """

    def __init__(
        self, tables: Sequence[int], leaves: Mapping[int, Tensor], name: Callable[[int], str],
        copy: Callable[[Sequence[int]], list[Tensor]],
    ) -> None:  # fmt: skip
        self._tables, self._leaves, self._name = tuple(tables), dict(leaves), name
        self._versions = {t: _version(leaf) for t, leaf in self._leaves.items()}
        self._copy = copy
        self._copies: dict[int, Tensor] = {}  # by feature
        self._kept: set[int] = set()  # tables that may be written, of which what is read is copied

    @torch.no_grad()
    def keep(self, table: int) -> None:
        """A table's rows are about to be written."""
        if not self._written(table):  # else `rows` will say so, to whom it concerns
            self._kept.add(table)
            self._take([f for f, t in enumerate(self._tables) if t == table and f not in self._copies])

    def _take(self, features: Sequence[int]) -> None:
        if features:
            self._copies.update(zip(features, self._copy(features), strict=True))

    def _written(self, table: int) -> bool:
        leaf = self._leaves.get(table)
        return leaf is not None and _version(leaf) != self._versions[table]

    @torch.no_grad()
    def rows(self) -> list[Tensor] | None:
        """Per feature, the rows as they were. None: they are where they were, all of them.

        Raises:
            InputError: they are not, and nobody has said so before.
        """
        for table in self._leaves:
            if table not in self._kept and self._written(table):
                raise InputError(
                    f"Table '{self._name(table)}': its rows were written between a lookup and its backward, and not by "
                    "an optimizer, whose updates are known (weight.copy_() ...); the gradient of the lookup's sample "
                    "weights needs the rows as they were. Run the backward before rows are written, or pass weights "
                    "that need no gradient (weights.detach())."
                )
        if not self._copies:
            return None
        self._take([f for f in range(len(self._tables)) if f not in self._copies])
        return [self._copies[f] for f in range(len(self._tables))]


def let_go(reader: Reader | None) -> Reader | None:
    """What a backward that has read keeps: the reader if it may come again (`retain_graph=True`), else nothing."""
    return reader if keeps_graph() else None


def copied(weight: Tensor, ids_n: Tensor) -> Tensor:
    """Rows of some ids `[n, D]`. Bad ids count as zeros and are told elsewhere; here they may be anything."""
    if not weight.shape[0]:
        return weight.new_zeros(ids_n.numel(), weight.shape[1])
    return weight.detach()[ids_n.long().clamp(0, weight.shape[0] - 1)]


def places_in_copies(ids: Tensor, segments: Sequence[tuple[int, int]]) -> Tensor:
    """Where the row of each id [N] is among its feature's copies. Two segments are the same, or apart.

    Example: features' ids at (0, 1) and (1, 3) of three -> (0, 0, 1).
    """
    places = torch.zeros_like(ids)
    for begin, end in segments:
        places[begin:end] = torch.arange(end - begin, dtype=ids.dtype, device=ids.device)
    return places


def id_segments(offsets: Tensor, starts: Sequence[int], bags: Sequence[int]) -> list[tuple[int, int]]:
    """Where the ids of each feature lie. On a GPU this waits.

    Example: offsets (0, 2, 3, 3, 7), features of 2 bags from bag 2 and from bag 0 -> (3, 7), (0, 3).
    """
    # Features without bags may begin anywhere.
    first = [start if count else 0 for start, count in zip(starts, bags, strict=True)]
    edges = torch.tensor([*first, *[s + b for s, b in zip(first, bags, strict=True)]], dtype=torch.int64)
    bounds = offsets[edges.to(offsets.device)].tolist()
    return list(zip(bounds[: len(starts)], bounds[len(starts) :], strict=True))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
