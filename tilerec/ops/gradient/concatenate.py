"""Concatenation of several lookups' gradient records, without sums and without synchronization.

Tables that several lookups of one backward pass read are updated once, by the sum of all. If each lookup's rows were
summed first, the host would wait for the number of distinct rows. But the length of each record is available on the
host. So gradients, ids, offsets and weights are concatenated, and starts are shifted by the elements before them. One
sum then runs over (lookup, feature, occurrence).

    lookup 0   ids (5, 7)      offsets (0, 1, 2)    a feature with bags 0, 1
    lookup 1   ids (7, 5, 5)   offsets (0, 3)       a feature with bag 0
    joined     ids (5, 7, 7, 5, 5)   offsets (0, 1, 2 | 2, 5)   features with bags 0, 1 and with bag 3

If any lookup has offsets, lookups without them (every id is its own bag) get some. If any has sample weights, the
others get weights of 1. Dtypes are promoted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tilerec.ops.gradient.record import GradientRecord

ALIGNED = 8
"""Alignment of gradient blocks, in elements: the number that a GPU reads at once."""
_LOOKUP = 1 << 32
"""Positions that one lookup takes in the sum over ranks (`GradientRecord.order`)."""


def joined(records: Sequence[GradientRecord]) -> GradientRecord:
    """Return the concatenation of records, each of which may contain a part of its lookup (`GradientRecord.only`)."""
    first = records[0]
    has_offsets = any(record.offsets is not None for record in records)
    weighted = next((r.sample_weights for r in records if r.sample_weights is not None), None)
    grads: list[Tensor] = []
    starts: list[int] = []
    places: list[int] = []
    strides: list[int] = []
    order: list[int] = []
    ids_before = bags_before = grads_before = 0
    seen: Counter[int] = Counter()
    for record in records:
        starts += [start + (bags_before if has_offsets else ids_before) for start in record.starts]
        for block, own_places, own_strides in _blocks(record):
            places += [place + grads_before for place in own_places]
            strides += own_strides
            grads.append(block)
            grads_before += block.numel()
            if block.numel() % ALIGNED:
                gap = ALIGNED - block.numel() % ALIGNED  # never read
                grads.append(block.new_empty(gap))
                grads_before += gap
        own_order = record.order or range(len(record.sinks))
        order += [seen[sink] * _LOOKUP + at for sink, at in zip(record.sinks, own_order, strict=True)]
        seen.update(set(record.sinks))
        ids_before += record.ids.numel()
        bags_before += record.ids.numel() + 1 if record.offsets is None else record.offsets.numel()
    return replace(
        first,
        grad=torch.cat(grads),
        ids=torch.cat([record.ids for record in records]),
        offsets=_offsets(records, ids_before) if has_offsets else None,
        sample_weights=None if weighted is None else torch.cat([_weights(r, weighted) for r in records]),
        sinks=_concatenated(record.sinks for record in records),
        dims=_concatenated(record.dims for record in records),
        starts=tuple(starts),
        bags=_concatenated(record.bags for record in records),
        grad_starts=tuple(places),
        grad_strides=tuple(strides),
        means=_concatenated(record.means for record in records),
        order=tuple(order) if any(record.order for record in records) else (),
        distinct=_distinct(records),
        agreed=all(record.agreed for record in records),
    )


def _concatenated(parts: Iterator[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple([number for part in parts for number in part])


def _distinct(records: Sequence[GradientRecord]) -> tuple[bool, ...]:
    if not any(record.distinct for record in records):
        return ()
    return tuple([own for record in records for own in record.distinct or (False,) * len(record.sinks)])


def _blocks(record: GradientRecord) -> Iterator[tuple[Tensor, list[int], list[int]]]:
    """Yield the record's gradients as flat blocks, with the starts and strides of the features in each.

    Yields the whole gradient at once; or each feature's part, if together they are less than half of it (a lookup of
    many tables of which one is shared).
    """
    flat = record.grad.contiguous().view(-1)  # `reshape` may return a strided view
    read = sum(dim * count for dim, count in zip(record.dims, record.bags, strict=True))
    if 2 * read >= flat.numel():
        yield flat, list(record.grad_starts), list(record.grad_strides)
        return
    per_feature = zip(record.dims, record.bags, record.grad_starts, record.grad_strides, strict=True)
    for dim, count, place, stride in per_feature:
        if count == 0:  # its place may be out of bounds
            yield flat[:0], [0], [dim]
        else:
            rows = flat.as_strided((count, dim), (stride, 1), flat.storage_offset() + place)
            yield rows.reshape(-1), [0], [dim]


def _offsets(records: Sequence[GradientRecord], ids_count: int) -> Tensor:
    """Return the concatenated offsets, shifted; int64 if the ids are too many for the records' offset type."""
    parts: list[Tensor] = []
    before = 0
    for record in records:
        count = record.ids.numel()
        if record.offsets is None:
            parts.append(torch.arange(before, before + count + 1, device=record.ids.device))
        else:
            own = record.offsets if ids_count < 1 << 31 else record.offsets.to(torch.int64)
            parts.append(own + before if before else own)
        before += count
    return torch.cat(parts)


def _weights(record: GradientRecord, like: Tensor) -> Tensor:
    if record.sample_weights is not None:
        return record.sample_weights
    return like.new_ones(record.ids.numel())
