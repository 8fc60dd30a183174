"""`PartIds`: the ids of some rows, feature by feature in one array, as a `KeyedJaggedTensor` holds them.

Rows of a column are gathered into their place in the batch, so ids are moved once. Before a feature is gathered, its
number of ids is unknown: the array has room for an estimate, and grows if there are more.

Legend: b rows, F features, N ids of a column, n rows of a column, M ids of the part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch

from tilerec.data.chosen_rows import ChosenRows
from tilerec.data.fields import BagIds, Floats, Ints
from tilerec.data.pooled_memory import Blocks, joined, tensor_of
from tilerec.ops.jagged.definition import take_segments


@final
class PartIds:
    """Ids of b rows; features are added one by one.

    Attributes:
        lengths_Fb: ids of each row, int32; 1 for features that were not yet added.
        ends: end of each added feature in the array.
        count: M, of the features so far.

    Args:
        features: F.
        rows: b.
        room: estimate of M.
        weighted: ids have weights.
        blocks: memory.
    """

    def __init__(self, features: int, rows: int, room: int, *, weighted: bool, blocks: Blocks) -> None:
        self.lengths_Fb = blocks.empty(features * rows, np.int32).reshape(features, rows)
        np.copyto(self.lengths_Fb, 1)
        self.ends: list[int] = []
        self.count = 0
        self._blocks = blocks
        self._values: Ints = blocks.empty(room, np.int64)
        self._values_tensor = torch.from_numpy(self._values)
        self._weights: Floats | None = blocks.empty(room, np.float32) if weighted else None

    @property
    def values(self) -> Ints:
        """Ids, int64 [M]."""
        return self._values[: self.count]

    @property
    def weights(self) -> Floats | None:
        """Weights of ids, float32 [M], or None."""
        return None if self._weights is None else self._weights[: self.count]

    @property
    def bytes(self) -> int:
        """Bytes of memory."""
        return sum(one.nbytes for one in (self.lengths_Fb, self._values, self._weights) if one is not None)

    @property
    def counts(self) -> list[int]:
        """Number of ids of each feature [F]."""
        return [end - start for start, end in zip([0, *self.ends], self.ends, strict=False)]

    def feature(self, place: int) -> BagIds:
        """Return the ids of a feature, by its number."""
        own = slice(self.ends[place - 1] if place else 0, self.ends[place])
        offsets_b1 = np.zeros(self.lengths_Fb.shape[1] + 1, np.int64)
        np.cumsum(self.lengths_Fb[place], out=offsets_b1[1:])
        return BagIds(self._values[own], offsets_b1, None if self._weights is None else self._weights[own])

    def _reserve(self, more: int) -> None:
        """Make room for the ids of a feature."""
        if self.count + more <= len(self._values):
            return
        room = max(self.count + more, len(self._values) * 3 // 2)
        values = self._blocks.empty(room, np.int64)
        values[: self.count] = self.values
        if self._weights is not None:
            weights = self._blocks.empty(room, np.float32)
            weights[: self.count] = self.weights
            self._weights = weights
        self._values, self._values_tensor = values, torch.from_numpy(values)

    def _end_feature(self, count: int, weights: Floats | None = None) -> None:
        """Count the ids of a feature, which are in their place; None as weights: they weigh 1."""
        end = self.count + count
        if self._weights is not None:
            self._weights[self.count : end] = 1 if weights is None else weights
        self.ends.append(end)
        self.count = end


def gather_ids(found: Sequence[BagIds], parts: Sequence[PartIds], chosen: ChosenRows) -> None:
    """Add a feature to parts of batches.

    Args:
        found: the feature's ids in consecutive row groups.
        parts: the parts.
        chosen: the rows of each part, among those of the row groups.
    """
    if all(one.offsets is None for one in found):
        _gather_single(_joined(found), parts, chosen)
        return
    found = [one.with_rows() for one in found]
    # A row group without missing ids has no offsets, another one of the same column may have some.
    offsets = [tensor_of(np.arange(len(one.values) + 1) if one.offsets is None else one.offsets) for one in found]
    values = [tensor_of(one.values) for one in found]
    weights = [tensor_of(one.weights) for one in found if one.weights is not None]
    orders = [torch.from_numpy(rows_b) for rows_b in chosen.by_part]
    lengths = [torch.from_numpy(part.lengths_Fb[len(part.ends)]) for part in parts]
    rooms = [part._values_tensor[part.count :] for part in parts]
    take_segments(values, offsets, orders, rooms, lengths)
    counts = [int(part.lengths_Fb[len(part.ends)].sum()) for part in parts]
    for place, (part, count) in enumerate(zip(parts, counts, strict=True)):
        if count > len(rooms[place]):
            part._reserve(count)
            again = [part._values_tensor[part.count :]]
            take_segments(values, offsets, orders[place : place + 1], again, lengths[place : place + 1])
    if weights:
        rooms = [torch.from_numpy(part._weights[part.count :]) for part in parts if part._weights is not None]
        take_segments(weights, offsets, orders, rooms, lengths)
    for part, count in zip(parts, counts, strict=True):
        own = slice(part.count, part.count + count)
        part._end_feature(count, part._weights[own] if weights and part._weights is not None else None)


def _gather_single(bags: BagIds, parts: Sequence[PartIds], chosen: ChosenRows) -> None:
    """Add a feature with one id in each row; the lengths are 1 already."""
    for part, count in zip(parts, chosen.counts, strict=True):
        if part.count + count > len(part._values):
            part._reserve(count)
    starts = [part.count for part in parts]
    chosen.take(bags.values, [part._values_tensor for part in parts], starts, bags.row_hash)
    weights = [None] * len(parts) if bags.weights is None else chosen.pieces(bags.weights)
    for part, count, weights_b in zip(parts, chosen.counts, weights, strict=True):
        part._end_feature(count, weights_b)


def join_ids(parts: Sequence[PartIds]) -> PartIds:
    """Return the ids of consecutive rows as one; a single part stays where it is."""
    if len(parts) == 1:
        return parts[0]
    features = len(parts[0].ends)
    rows = sum(part.lengths_Fb.shape[1] for part in parts)
    whole = PartIds(features, rows, 0, weighted=False, blocks=Blocks())
    np.concatenate([part.lengths_Fb for part in parts], axis=1, out=whole.lengths_Fb)
    pieces = [
        (part, part.ends[place - 1] if place else 0, part.ends[place]) for place in range(features) for part in parts
    ]
    if pieces:
        whole._values = joined([part._values[start:end] for part, start, end in pieces])
        whole._values_tensor = torch.from_numpy(whole._values)
        weights = [part._weights[start:end] for part, start, end in pieces if part._weights is not None]
        whole._weights = joined(weights) if weights else None
    whole.ends = [sum(part.ends[place] for part in parts) for place in range(features)]
    whole.count = sum(part.count for part in parts)
    return whole


def _joined(found: Sequence[BagIds]) -> BagIds:
    """Return the ids of consecutive row groups as one; each row has one."""
    if len(found) == 1:
        return found[0]
    if len({one.row_hash for one in found}) > 1:  # a row group with missing ids has rows already
        found = [one.with_rows() for one in found]
    weights = [one.weights for one in found if one.weights is not None]
    values = joined([one.values for one in found])
    return BagIds(values, None, joined(weights) if weights else None, found[0].row_hash)
