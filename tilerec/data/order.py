"""Order of the rows of a pass: a pure function of (seed, epoch, position).

    row groups   in a random permutation, dealt to L lanes in turn:   lane l reads groups l, l + L, l + 2 L, ...
    windows      consecutive row groups of a lane with `shuffle_rows` rows or more together
    rows         of a window in a random permutation
    batches      batch i has the positions [i B, (i + 1) B); each lane gives it rows in proportion to the lane's length

Worked example, L = 2 lanes of 6 and 3 rows, B = 3: every batch takes 2 rows of lane 0 and then 1 row of lane 1.

Nothing depends on the number of ranks. Ranks divide a batch: with one lane, each rank takes an equal part of the lane's
rows; with several, each rank takes whole lanes, and so decodes only their row groups.

Legend: G row groups, L lanes, n rows of a window, N rows of the pass, B samples of a global batch, W ranks.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tilerec.data.share import bounds
from tilerec.errors import ConfigError

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Window:
    """Consecutive row groups of a lane, shuffled together.

    Attributes:
        lane: number of the lane.
        index: number of the window in its lane.
        groups: numbers of the row groups.
        start: position of the first row in the lane.
        rows: n.
    """

    lane: int
    index: int
    groups: tuple[int, ...]
    start: int
    rows: int

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.rows


@dataclass(frozen=True)
class LanePart:
    """Rows [start, end) of one lane, which a rank contributes to a batch."""

    lane: int
    start: int
    end: int


@dataclass(frozen=True)
class RankPart:
    """A rank's rows of one global batch.

    Attributes:
        first: position of the first of them in the pass.
        total: samples of the global batch, of all ranks.
        end: position after the global batch.
        lanes: the rows, in the order of the batch.
    """

    first: int
    total: int
    end: int
    lanes: tuple[LanePart, ...]


class BatchOrder(ABC):
    """Windows and batches of one pass, by position."""

    @abstractmethod
    def has(self, position: int) -> bool:
        """Return True if the pass has a row at a position."""

    @abstractmethod
    def window_at(self, lane: int, position: int) -> Window:
        """Return the window that holds a position of a lane."""

    @abstractmethod
    def generator(self, window: Window) -> np.random.Generator:
        """Return the generator of the permutation of a window's rows."""

    @abstractmethod
    def rank_part(self, start: int, batch_size: int, rank: int, world_size: int) -> RankPart:
        """Return a rank's rows of the global batch that begins at position `start`."""


class PassOrder(BatchOrder):
    """The order of one pass over row groups that can be read in any order.

    Args:
        group_rows: rows of each row group that take part in the pass [G]; 0 leaves a group out.
        seed, epoch: of the random permutations.
        shuffle_rows: the least number of rows of a window (except for the last one of a lane).
        lanes: L.
    """

    def __init__(self, group_rows: Sequence[int], *, seed: int, epoch: int, shuffle_rows: int, lanes: int = 1) -> None:
        self.rows = sum(group_rows)
        self._seed, self._epoch = seed, epoch
        used = np.flatnonzero(np.asarray(group_rows))
        order = np.random.default_rng([seed, epoch]).permutation(used)
        self._windows = [
            _windows(lane, [int(group) for group in order[lane::lanes]], group_rows, shuffle_rows)
            for lane in range(lanes)
        ]
        self._lane_rows = [windows[-1].end if windows else 0 for windows in self._windows]

    def has(self, position: int) -> bool:
        return position < self.rows

    def window_at(self, lane: int, position: int) -> Window:
        starts = self._starts[lane]
        return self._windows[lane][int(np.searchsorted(starts, position, side="right")) - 1]

    @cached_property
    def _starts(self) -> list[Ints]:
        return [np.array([window.start for window in windows], np.int64) for windows in self._windows]

    def generator(self, window: Window) -> np.random.Generator:
        return np.random.default_rng([self._seed, self._epoch, window.lane, window.index])

    def rank_part(self, start: int, batch_size: int, rank: int, world_size: int) -> RankPart:
        end = min(start + batch_size, self.rows)
        lanes = len(self._windows)
        if lanes == 1:
            return part_of_lane(start, end, rank, world_size)
        before, after = self.lane_positions(start), self.lane_positions(end)
        low, high = bounds(lanes, rank, world_size)
        first = start + sum(after[lane] - before[lane] for lane in range(low))
        parts = [LanePart(lane, before[lane], after[lane]) for lane in range(low, high)]
        return RankPart(first, end - start, end, tuple(part for part in parts if part.end > part.start))

    def lane_positions(self, position: int) -> list[int]:
        """Return the number of rows of each lane among the first `position` rows of the pass [L].

        Row k of a lane of n rows comes at the time (2 k + 1) / (2 n), so every lane ends at about the same time; lanes
        with equal times take turns in their order. Only integers are compared, so the result is exact.
        """
        lanes, total = len(self._lane_rows), max(self.rows, 1)
        # At most N t + L / 2 rows have a time below t. So all rows with a time below (position - L / 2) / N are among
        # the first `position` rows; the heap adds the others, about two per lane.
        counts = [max((rows * (2 * position - lanes) - total) // (2 * total), 0) for rows in self._lane_rows]
        lacking = [
            (_Time(2 * count + 1, 2 * rows), lane)
            for lane, (count, rows) in enumerate(zip(counts, self._lane_rows, strict=True))
            if count < rows
        ]
        heapq.heapify(lacking)
        for _ in range(position - sum(counts)):
            _, lane = heapq.heappop(lacking)
            counts[lane] += 1
            if counts[lane] < self._lane_rows[lane]:
                heapq.heappush(lacking, (_Time(2 * counts[lane] + 1, 2 * self._lane_rows[lane]), lane))
        return counts


def part_of_lane(start: int, end: int, rank: int, world_size: int) -> RankPart:
    """Return a rank's rows of the global batch [start, end) of a pass with one lane."""
    low, high = bounds(end - start, rank, world_size)
    lanes = (LanePart(0, start + low, start + high),) if high > low else ()
    return RankPart(start + low, end - start, end, lanes)


@dataclass(frozen=True, eq=True)
class _Time:
    """A fraction, compared exactly."""

    over: int
    under: int

    def __lt__(self, other: _Time) -> bool:
        return self.over * other.under < other.over * self.under

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Time) and self.over * other.under == other.over * self.under

    __hash__ = None  # type: ignore[assignment]


def check_lanes(lanes: int, world_size: int) -> None:
    """Raise `ConfigError` unless every rank gets a lane, or all share one."""
    if lanes > 1 and lanes < world_size:
        raise ConfigError(
            f"lanes: got {lanes} on {world_size} ranks; expected 1, or at least one lane per rank. Use a multiple of "
            "the largest number of ranks, since another number of lanes gives another order of the rows."
        )


def _windows(lane: int, groups: list[int], group_rows: Sequence[int], shuffle_rows: int) -> list[Window]:
    windows: list[Window] = []
    start, held, rows = 0, [], 0
    for number, group in enumerate(groups):
        held.append(group)
        rows += group_rows[group]
        if rows >= shuffle_rows or number == len(groups) - 1:
            windows.append(Window(lane, len(windows), tuple(held), start, rows))
            start, held, rows = start + rows, [], 0
    return windows
