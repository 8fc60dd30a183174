"""In which order tables move, and how many at once, so that no rank needs much memory beside.

    extra(rank)  =  held while tables move  -  max(held before all, held after all)

While a table moves, its old and its new tiles are both there. A rank that ends with more than it began with has room
for what comes; one that gives a table before it takes another needs less than one that takes first.

Legend: T tables, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class Order:
    """Tables by number, in batches that move at once; `extra`: the most that any rank holds beside, of values on their
    way apart."""

    batches: tuple[tuple[int, ...], ...]
    extra: int


def order_of(
    before_TR: Sequence[Sequence[int]], after_TR: Sequence[Sequence[int]], most: int | None
) -> Order:
    """An order with little extra memory: the next table is always the one that needs the least.

    Args:
        before_TR, after_TR: bytes of each table on each rank.
        most: bytes of extra memory up to which tables move together; None: what the largest single move needs.

    Two tables of 2 bytes go from rank 0 to 1, one of 4 from rank 1 to 0. One of 2, then that of 4, then the other of 2:
    no rank holds more than 6 where 4 is the most that it has before or after, so extra is 2; the one of 4 first: 4.
    """
    before, after = np.array(before_TR, np.int64), np.array(after_TR, np.int64)
    if not len(before):
        return Order((), 0)
    held = before.sum(0)
    room = np.maximum(held, after.sum(0))
    left = list(range(len(before)))
    order: list[int] = []
    extra = 0
    while left:
        needs = (held + after[left] - room).max(1)
        # Of equals, the one that frees the most for the rank that is fullest.
        freed = (after[left] - before[left]).max(1)
        i = int(np.lexsort((freed, needs))[0])
        table = left.pop(i)
        extra = max(extra, int(needs[i]))
        order.append(table)
        held = held + after[table] - before[table]
    return Order(_batches(order, before, after, room, extra if most is None else most), max(0, extra))


def _batches(
    order: Sequence[int], before: Bytes, after: Bytes, room: Bytes, most: int
) -> tuple[tuple[int, ...], ...]:
    """Neighbours in the order, together as long as the extra memory stays within `most`."""
    held = before.sum(0)
    batches: list[list[int]] = []
    coming = np.zeros_like(held)
    for table in order:
        together = coming + after[table]
        if batches and int((held + together - room).max()) <= most:
            batches[-1].append(table)
            coming = together
            continue
        if batches:
            done = batches[-1]
            held = held + (after[done] - before[done]).sum(0)
        batches.append([table])
        coming = after[table].copy()
    return tuple(map(tuple, batches))
