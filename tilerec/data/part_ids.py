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

from tilerec.data.fields import BagIds, Floats, Ints
from tilerec.data.pooled_memory import Blocks, joined, take, tensor_of
from tilerec.ops.jagged.definition import take_segments


@final
class PartIds:
    """Ids of b rows; features are added one by one.

    Attributes:
        lengths_Fb: ids of each row, int32; rows of features that were not yet added are arbitrary.
        ends: end of each added feature in the array.

    Args:
        features: F.
        rows: b.
        room: estimate of M.
        weighted: ids have weights.
        blocks: memory.
    """

    def __init__(self, features: int, rows: int, room: int, *, weighted: bool, blocks: Blocks) -> None:
        self.lengths_Fb = blocks.empty(features * rows, np.int32).reshape(features, rows)
        self.ends: list[int] = []
        self._blocks = blocks
        self._values: Ints = blocks.empty(room, np.int64)
        self._weights: Floats | None = blocks.empty(room, np.float32) if weighted else None

    @property
    def count(self) -> int:
        """M, of the features so far."""
        return self.ends[-1] if self.ends else 0

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
        self._values = values

    def _add_single(self, bags: BagIds, rows_b: Ints) -> None:
        count = len(rows_b)
        self._reserve(count)
        own = slice(self.count, self.count + count)
        take(bags.values, rows_b, self._values[own])
        self.lengths_Fb[len(self.ends)].fill(1)
        if self._weights is not None and bags.weights is not None:
            take(bags.weights, rows_b, self._weights[own])
        elif self._weights is not None:
            self._weights[own] = 1
        self.ends.append(own.stop)


def gather_ids(found: Sequence[BagIds], parts: Sequence[PartIds], chosen: Sequence[Ints]) -> None:
    """Add a feature to parts of batches.

    Args:
        found: the feature's ids in consecutive row groups.
        parts: the parts.
        chosen: int64 [b] for each part: numbers of its rows among those of the row groups.
    """
    if all(one.offsets is None for one in found):
        bags = _joined(found)
        for part, rows_b in zip(parts, chosen, strict=True):
            part._add_single(bags, rows_b)
        return
    # A row group without missing ids has no offsets, another one of the same column may have some.
    offsets = [tensor_of(np.arange(len(one.values) + 1) if one.offsets is None else one.offsets) for one in found]
    values = [tensor_of(one.values) for one in found]
    weights = [tensor_of(one.weights) for one in found if one.weights is not None]
    orders = [torch.from_numpy(rows_b) for rows_b in chosen]
    lengths = [torch.from_numpy(part.lengths_Fb[len(part.ends)]) for part in parts]
    rooms = [torch.from_numpy(part._values[part.count :]) for part in parts]
    take_segments(values, offsets, orders, rooms, lengths)
    counts = [int(part.lengths_Fb[len(part.ends)].sum()) for part in parts]
    for place, (part, count) in enumerate(zip(parts, counts, strict=True)):
        if count > len(rooms[place]):
            part._reserve(count)
            again = [torch.from_numpy(part._values[part.count :])]
            take_segments(values, offsets, orders[place : place + 1], again, lengths[place : place + 1])
    if weights:
        rooms = [torch.from_numpy(part._weights[part.count :]) for part in parts if part._weights is not None]
        take_segments(weights, offsets, orders, rooms, lengths)
    else:
        for part, count in zip(parts, counts, strict=True):
            if part._weights is not None:
                part._weights[part.count : part.count + count] = 1
    for part, count in zip(parts, counts, strict=True):
        part.ends.append(part.count + count)


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
        weights = [part._weights[start:end] for part, start, end in pieces if part._weights is not None]
        whole._weights = joined(weights) if weights else None
    whole.ends = [sum(part.ends[place] for part in parts) for place in range(features)]
    return whole


def _joined(found: Sequence[BagIds]) -> BagIds:
    """Return the ids of consecutive row groups as one; each row has one."""
    if len(found) == 1:
        return found[0]
    weights = [one.weights for one in found if one.weights is not None]
    return BagIds(joined([one.values for one in found]), None, joined(weights) if weights else None)
