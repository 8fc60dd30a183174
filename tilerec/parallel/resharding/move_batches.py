"""Order and batches in which tables move, chosen to need little extra memory on every rank.

    extra(rank)  =  bytes held while tables move  -  max(bytes held before the move, bytes held after it)

While a table moves, its old and its new tiles both exist. If a rank ends with more bytes than it has at the start, it
has memory for new tiles. A rank that frees one table before it receives another needs less extra memory.

Legend: T tables, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class MoveOrder:
    """Order of a move.

    Attributes:
        batches: tables by number; the tables of a batch move at once.
        extra: largest extra bytes of any rank if tables move one by one, without message buffers.
    """

    batches: tuple[tuple[int, ...], ...]
    extra: int


def order_of(
    before_TR: Sequence[Sequence[int]], after_TR: Sequence[Sequence[int]], most: int | None
) -> MoveOrder:
    """Return an order with little extra memory, greedily: the next table is the one that needs the least.

    Args:
        before_TR, after_TR: bytes of each table on each rank.
        most: extra bytes up to which tables move in one batch. None: the bytes that the largest single move needs.

    Example: two tables of 2 bytes move from rank 0 to 1, one of 4 bytes from rank 1 to 0. Each rank holds 4 bytes
    before and after. In the order 2, 4, 2 no rank holds more than 6 bytes, so extra is 2. With the table of 4 bytes
    first, extra is 4.
    """
    before, after = np.array(before_TR, np.int64), np.array(after_TR, np.int64)
    if not len(before):
        return MoveOrder((), 0)
    held = before.sum(0)
    baseline = np.maximum(held, after.sum(0))
    left = list(range(len(before)))
    order: list[int] = []
    extra = 0
    while left:
        needs = (held + after[left] - baseline).max(1)
        # Among equals, the table whose tiles grow least on any rank.
        freed = (after[left] - before[left]).max(1)
        i = int(np.lexsort((freed, needs))[0])
        table = left.pop(i)
        extra = max(extra, int(needs[i]))
        order.append(table)
        held = held + after[table] - before[table]
    return MoveOrder(_batches(order, before, after, baseline, extra if most is None else most), max(0, extra))


def _batches(
    order: Sequence[int], before: Bytes, after: Bytes, baseline: Bytes, most: int
) -> tuple[tuple[int, ...], ...]:
    """Return batches of consecutive tables of the order, each as large as `most` extra bytes allow."""
    held = before.sum(0)
    batches: list[list[int]] = []
    coming = np.zeros_like(held)
    for table in order:
        together = coming + after[table]
        if batches and int((held + together - baseline).max()) <= most:
            batches[-1].append(table)
            coming = together
            continue
        if batches:
            done = batches[-1]
            held = held + (after[done] - before[done]).sum(0)
        batches.append([table])
        coming = after[table].copy()
    return tuple(map(tuple, batches))
