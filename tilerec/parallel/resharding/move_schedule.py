"""Schedule of a move: its batches, its message size and its predicted seconds. `Mover` runs it, `rebalance` prices it.

    extra(rank)  =  bytes held while tables move  -  max(bytes held before the move, bytes held after it)

While a table moves, its old and its new tiles both exist. If a rank ends with more bytes than it has at the start, it
has memory for new tiles. A rank that frees one table before it receives another needs less extra memory. The order and
the batches of the tables are chosen to need little of it.

    seconds  =  sum over batches of the busiest rank's (sends + receives + new memory)  +  calls  +  tables

A message cut by columns costs one more copy. New memory costs a copy, because the system clears it. Memory beyond the
largest amount that the process has held so far costs more (`Speeds.fresh`).

Legend: T tables, R ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilerec.errors import ConfigError
from tilerec.parallel.resharding.chunked_transfer import TableTransfer, directions, sent_by_rank
from tilerec.spec.speeds import Speeds
from tilerec.spec.topology import Topology

Bytes = NDArray[np.int64]

LEAST_TRANSIT, MOST_TRANSIT, TRANSIT_PART = 1 << 20, 64 << 20, 4
"""Bytes of a rank's messages in one round: largest tile / TRANSIT_PART, within the two bounds or less by the budget."""

LEAST_TOGETHER, MOST_TOGETHER = 4 << 20, 16 << 20
"""Extra bytes up to which tables move in one batch without a budget: the largest tile's, within the two bounds."""

SECONDS_PER_TABLE = 1e-3
"""Seconds per table at any size: to collect and exchange its facts, and to replace its tiles."""

CALLS, CALLS_OF_BATCH = 14, 2
"""Number of collectives of a move outside its batches, and of a batch without its messages."""


@dataclass(frozen=True)
class Schedule:
    """Batches and message size of a move.

    Attributes:
        most: largest bytes of a message.
        batches: tables by number; the tables of a batch move at once.
        extra: bytes that a rank may need beyond max(its tables before the move, its tables after it), messages
            included.
    """

    most: int
    batches: tuple[tuple[int, ...], ...]
    extra: int


def schedule(loads: Sequence[TableTransfer], ranks: int, budget: int | None) -> Schedule:
    """Return a schedule with little extra memory.

    Raises:
        ConfigError: the budget is less than the move needs.
    """
    before = [load.bytes_held(load.old, ranks) for load in loads]
    after = [load.bytes_held(load.new, ranks) for load in loads]
    peers = max(1, directions(loads))
    largest = max((max(own) for own in (*before, *after)), default=0)
    out, into, _ = sent_by_rank(loads, ranks)
    busiest = max((a + b for a, b in zip(out, into, strict=True)), default=0)
    transit = min(MOST_TRANSIT, max(LEAST_TRANSIT, largest // TRANSIT_PART), busiest)
    # Each message is in a buffer of its own, and once more in the joint buffer of the collective call.
    least = 2 * peers * max((load.row_bytes() for load in loads), default=0) if busiest else 0
    single = order_of(before, after, None).extra
    if budget is None:
        # Larger batches would only need memory that the process has not held so far.
        together = max(LEAST_TOGETHER, min(largest, MOST_TOGETHER))
        budget = max(single, together) + max(transit, least)
    elif budget < single + least:
        raise ConfigError(
            f"reshard: budget_bytes: got {budget:,}, but a rank needs {single + least:,} bytes beside its tables "
            f"during this move (the old and new tiles of a table both exist until it has moved). Give at least that, "
            f"or plan for smaller tiles."
        )
    transit = max(least, min(transit, budget - single))
    order = order_of(before, after, budget - transit)
    return Schedule(max(1, transit // (2 * peers)), order.batches, _extra(before, after, order.batches) + transit)


def seconds_of(loads: Sequence[TableTransfer], plan: Schedule, topology: Topology, speeds: Speeds) -> float:
    """Return the predicted seconds of a move at a machine's speeds."""
    if not loads:
        return 0.0
    ranks = topology.world_size
    fresh = speeds.copy if speeds.fresh is None else speeds.fresh
    begin = [sum(load.bytes_held(load.old, ranks)[rank] for load in loads) for rank in range(ranks)]
    held, had = list(begin), list(begin)
    call = speeds.call + speeds.call_peer * max(0, ranks - 2)
    total = CALLS * call + SECONDS_PER_TABLE * len(loads)
    for batch in plan.batches:
        spent, sending, receiving = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
        between: defaultdict[tuple[int, int], int] = defaultdict(int)
        new = [0] * ranks
        for t in batch:
            load = loads[t]
            new = [a + b for a, b in zip(new, load.bytes_held(load.new, ranks), strict=True)]
            for (source, target), (size, packed, unpacked) in load.packed_between().items():
                if source == target:
                    spent[source] += size * speeds.copy
                    continue
                between[(source, target)] += size
                near = topology.host_of(source) == topology.host_of(target)
                sending[source] += size * (speeds.link_out if near else speeds.network_out)
                receiving[target] += size * (speeds.link_in if near else speeds.network_in)
                spent[source] += packed * speeds.copy
                spent[target] += unpacked * speeds.copy
        for rank in range(ranks):
            both = sending[rank], receiving[rank]
            spent[rank] += max(both) if speeds.duplex else sum(both)
            grown = max(0, held[rank] + new[rank] - had[rank])
            had[rank] += grown
            spent[rank] += new[rank] * speeds.copy + grown * max(0.0, fresh - speeds.copy)
            held[rank] += new[rank] - sum(loads[t].bytes_held(loads[t].old, ranks)[rank] for t in batch)
        rounds = max((-(-size // plan.most) for size in between.values()), default=0)
        total += max(spent) + (CALLS_OF_BATCH + rounds) * call
    return total


@dataclass(frozen=True)
class MoveOrder:
    """Order of a move.

    Attributes:
        batches: tables by number; the tables of a batch move at once.
        extra: largest extra bytes of any rank if tables move one by one, without message buffers.
    """

    batches: tuple[tuple[int, ...], ...]
    extra: int


def order_of(before_TR: Sequence[Sequence[int]], after_TR: Sequence[Sequence[int]], most: int | None) -> MoveOrder:
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


def _extra(
    before_TR: Sequence[Sequence[int]], after_TR: Sequence[Sequence[int]], batches: Sequence[Sequence[int]]
) -> int:
    """Return the largest bytes that any rank holds beyond max(before the move, after it)."""
    before, after = np.array(before_TR, np.int64), np.array(after_TR, np.int64)
    if not len(before):
        return 0
    held, most = before.sum(0), 0
    baseline = np.maximum(held, after.sum(0))
    for batch in map(list, batches):
        most = max(most, int((held + after[batch].sum(0) - baseline).max()))
        held = held + (after[batch] - before[batch]).sum(0)
    return most
