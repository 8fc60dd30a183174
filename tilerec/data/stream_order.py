"""`StreamOrder`: order of the rows of a pass over a stream, found while the stream is read.

    windows      consecutive groups of the stream, with `shuffle_rows` rows or a little more
    rows         of a window in a random permutation, which depends on (seed, epoch, window)
    batches      batch i has the positions [i B, (i + 1) B)

Windows end at the same samples in every pass, so the order is a pure function of (seed, epoch, position), as in
`order.py`. A batch is planned when the stream has been read to its end, because its size follows from that. So a pass
holds the rows of one window, and those of the batch that begins in it and ends after it.

Legend: B samples of a global batch, W ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from tilerec.data.hold_out import HeldOutRows, HoldOut
from tilerec.data.order import BatchOrder, RankPart, Window, part_of_lane
from tilerec.data.stream_groups import StreamGroups
from tilerec.errors import InputError


class StreamOrder(BatchOrder):
    """The order of one pass.

    Args:
        source: the stream.
        columns: names of the columns to read.
        rule: the rows that are held out of the pass.
        seed, epoch: of the random permutations.
        shuffle_rows: the least number of samples of a window, except for the last one.
        start: position of the first batch.
    """

    def __init__(
        self,
        source: StreamGroups,
        columns: Sequence[str],
        rule: HoldOut,
        *,
        seed: int,
        epoch: int,
        shuffle_rows: int,
        start: int,
    ) -> None:
        self._groups_per_window = -(-shuffle_rows // source.rows_per_group)
        self._seed, self._epoch, self._start = seed, epoch, start
        skipped, self._read = self._windows_before(start, rule, self._groups_per_window * source.rows_per_group)
        self._first_group = skipped * self._groups_per_window
        self.groups = source.begin(columns, epoch=epoch, skip=self._first_group)
        self.held = HeldOutRows(rule, self.groups)
        self._windows: deque[Window] = deque()
        self._number, self._window_start, self._ended = skipped, self._read, False

    def has(self, position: int) -> bool:
        self._read_to(position + 1)
        if not self._read:
            raise InputError(
                f"{self.groups.name}: got no samples to train on; expected some. Hold out less, or add data."
            )
        if position > self._read:
            raise InputError(
                f"{self.groups.name}: got {self._read:,} samples to train on; expected more than {position:,}, "
                "where the pass continues. Continue with the data set that the run began with."
            )
        return position < self._read

    def rank_part(self, start: int, batch_size: int, rank: int, world_size: int) -> RankPart:
        self._read_to(start + batch_size)
        # A window that is still needed has rows of this batch, or of the one before it. A rank without rows of a
        # window never takes it by `window_at`.
        self._drop_windows(start - batch_size)
        return part_of_lane(start, min(start + batch_size, self._read), rank, world_size)

    def window_at(self, lane: int, position: int) -> Window:
        self._drop_windows(position)
        while not (self._windows and self._windows[-1].end > position):
            self._read_group()
        return next(window for window in self._windows if window.start <= position < window.end)

    def generator(self, window: Window) -> np.random.Generator:
        return np.random.default_rng([self._seed, self._epoch, window.lane, window.index])

    def _windows_before(self, start: int, rule: HoldOut, samples: int) -> tuple[int, int]:
        """Return the number of windows of so many samples that end before a position, and their training rows."""
        if not start or rule.column:  # the rows that are held out are known when they are read
            return 0, 0

        def rows_of(windows: int) -> int:
            return windows * samples - (windows * samples // rule.every if rule.every else 0)

        count = (start - 1) // samples  # at least, since a window has at most `samples` training rows
        while rows_of(count + 1) < start:
            count += 1
        return count, rows_of(count)

    def _drop_windows(self, position: int) -> None:
        """Free the windows that end at or before a position."""
        while self._windows and self._windows[0].end <= position:
            self.groups.drop(self._windows.popleft().groups)

    def _read_to(self, position: int) -> None:
        """Read the stream until `position` training rows are known, or to its end."""
        while self._read < position and not self._ended:
            self._read_group()

    def _read_group(self) -> None:
        group = len(self.groups.group_rows)
        self._ended = not self.groups.fetch()
        if not self._ended:
            self._read += self.groups.group_rows[group] - self.held.count(group)
            group += 1
        if group > self._first_group and (self._ended or group - self._first_group == self._groups_per_window):
            self._end_window(group)

    def _end_window(self, group: int) -> None:
        """Make a window of the groups since the last one; one without rows, or before the position, is left out."""
        groups, rows = tuple(range(self._first_group, group)), self._read - self._window_start
        if rows and self._read > self._start:
            self._windows.append(Window(0, self._number, groups, self._window_start, rows))
        else:
            self.groups.drop(groups)
        self._number, self._first_group, self._window_start = self._number + 1, group, self._read
