"""Repeated ids travel once: a rank asks for each distinct row of a key once, and copies it to all of its occurrences.

    ids of a key      7 3 7 7            its rows     r7 r3 r7 r7       gradients    g0 g1 g2 g3
    sent              7 3       ->       received     r7 r3       ->    sent back    g0 + g2 + g3, g1

Only this rank knows of it: owners look up the ids that they receive, whatever bags they stand for. So each rank decides
for each key of each batch, by counts. Sums of gradients are added up in the order of the batch.

This is done for unpooled ids, and for pooled keys whose bags have at most one id. Not with sample weights, and not in
exact mode, where gradients must be added up in one order whatever the tiling.

Legend: S slots, I items (ids, or bags with at most one id), U distinct ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from tilerec.errors import ConfigError
from tilerec.ops.runtime.upload import upload
from tilerec.sharding.layout import ExchangeLayout
from tilerec.sharding.repeats import Repeats
from tilerec.sharding.route import RouteInput

_OPS = torch.ops.tilerec

GAIN = 0.07
"""Least share of a key's rows that need not travel if ids are sent once each (docs/sharding.md)."""


def largest_percent(remote: float, forced: bool | None) -> int:
    """Return the largest share of distinct ids with which ids are sent once each, in percent of all; 0: never.

    The planner predicts bytes by the same rule.

    Args:
        remote: share of the table's cells that other ranks look up for this one.
        forced: `Wire.distinct`.
    """
    if forced is not None:
        return 100 if forced and remote > 0 else 0
    return int(100 * (1 - GAIN / remote)) if remote > GAIN else 0


class DistinctIds:
    """Decides which keys of a batch are sent without repetitions, and lists their distinct ids.

    Args:
        layout: of this rank.
        each_id: the module reads ids one by one.
    """

    def __init__(self, layout: ExchangeLayout, *, each_id: bool) -> None:
        self._each_id = each_id
        self._slots = [route.slot for route in layout.routes]
        self._rows = [layout.tables[slot.table].tiling.held.rows for slot in layout.slots]
        self._forced = [layout.tables[slot.table].wire.distinct for slot in layout.slots]
        self._shares = [0.0] * len(layout.slots)  # of each slot's cells that other ranks look up
        if layout.size > 1 and not layout.alone:
            self._shares = _remote_shares(layout)
        self._percents = [
            largest_percent(share, forced) for share, forced in zip(self._shares, self._forced, strict=True)
        ]

    def __call__(self, batch: RouteInput, keys: Sequence[int]) -> RouteInput:
        """Return the batch that is routed: this one, or one with distinct ids and `repeats`.

        Args:
            keys: per route, the position of its key in the batch.
        """
        if batch.weights is not None or not batch.ids.numel() or not any(self._percents):
            return batch
        batches = list(batch.batches)
        if len(batches) == 1:
            bags = batches[0]
            batches *= (batch.offsets.numel() - 1) // bags if bags > 0 else 0
        key_of_slot = dict(zip(reversed(self._slots), reversed(keys), strict=True))
        rows, percents = self._limits(batch, key_of_slot, len(batches))
        if not any(percents):
            return batch
        try:
            ids, offsets, items, starts, counts = _OPS.distinct_ids(
                batch.ids, batch.offsets, batches, rows, percents, self._each_id
            )
        except ConfigError:  # offsets that routing refuses, with its own error
            return batch
        found: list[int] = counts.tolist()
        if _BAD_ID in found or max(found) < 0:
            return batch
        ends = list(accumulate([max(0, count) for count in found], initial=0))
        if self._each_id:
            sent_batches, all_items = [1] * len(batches), 0
        else:
            sent_batches = [own if count < 0 else count for own, count in zip(batches, found, strict=True)]
            all_items = sum([own for own, count in zip(batches, found, strict=True) if count >= 0])
        sent, firsts = list(batch.bags), [-1] * len(batch.bags)
        edges = starts[upload(ends, starts.device)].tolist()  # the host has waited for the counts already
        of_slot: dict[int, tuple[int, int]] = {}
        for slot, key in key_of_slot.items():
            if found[key] >= 0:
                sent[slot], firsts[slot] = found[key], ends[key]
                of_slot[slot] = edges[key + 1] - edges[key], found[key]
        repeats = Repeats(items, starts, firsts, all_items > items.numel(), of_slot)
        return replace(
            batch,
            ids=ids,
            offsets=offsets,
            batches=sent_batches,
            bags=sent,
            samples=list(batch.batches),
            repeats=repeats,
        )  # fmt: skip

    def _limits(self, batch: RouteInput, key_of_slot: dict[int, int], count: int) -> tuple[list[int], list[int]]:
        """Return per key the rows of its tables, and the largest percentage of distinct ids that are sent as such."""
        by_key = defaultdict[int, list[int]](list)
        for slot, key in key_of_slot.items():
            by_key[key].append(slot)
        rows, percents = [0] * count, [0] * count
        waits = batch.ids.device.type != "cpu"  # the host would wait for counts: only if a plan asks for it
        for key, slots in by_key.items():
            if key >= count or (waits and not all(self._forced[slot] for slot in slots)):
                continue
            percents[key] = min(self._percents[slot] for slot in slots)
            rows[key] = min(self._rows[slot] for slot in slots) if percents[key] else 0
        return rows, percents


_BAD_ID = -2


def _remote_shares(layout: ExchangeLayout) -> list[float]:
    """Return per slot the share of its table's cells that another rank looks up for this one."""
    cells = [0] * len(layout.slots)
    remote = [0] * len(layout.slots)
    for owner, parts in enumerate(layout.sent):
        for p in parts:
            part = layout.parts[p]
            own = (part.r1 - part.r0) * sum(unit.width for unit in part.units)
            cells[part.slot] += own
            remote[part.slot] += own if owner != layout.rank else 0
    return [there / max(1, own) for there, own in zip(remote, cells, strict=True)]
