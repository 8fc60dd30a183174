"""`StepSums`: sums of every step of a window, and one sum of all earlier steps.

    retired                 entries, oldest first                        open entry
    [all earlier steps]     [step 8] [step 9] [step 10] [step 11] ...    [step 42]
    |<------------------------------ lifetime -------------------------------------->|
                                     |<------------- window -------------------->|

An update adds a batch's sums to the open entry, in place. Values of a window are sums of its entries, so nothing is
subtracted and rounding does not accumulate. An entry that left the window is added to `retired`.

The number of entries is fixed. When all are in use, neighbours are merged: each entry then covers twice as many steps.
The window keeps its length, and its start moves in steps of one entry.

The counts of samples are host numbers. Merging depends on the number of steps only, so entries of all ranks cover the
same steps as long as every rank makes one update per step.

Legend: E entries, T tasks, K sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from tilerec.errors import InputError


def latest_within(counts: Sequence[int], limit: int) -> int:
    """Return how many of the latest entries have at most `limit` samples together; at least one if there is one."""
    covered = 0
    for count, samples in enumerate(reversed(counts)):
        covered += samples
        if covered > limit:
            return max(count, 1)
    return len(counts)


@final
class StepSums:
    """Sums of the steps of a window, on one device.

    Args:
        tasks, sums: T and K.
        window: number of samples, over all ranks; 0 for no window.
        entries: E, at least 2. The window's start is exact to 2 / E of the window or one step, whichever is larger.
        dtype: of the sums of an entry. Sums of several entries are float64.
        lifetime: keep the sums of earlier steps; False: drop them.

    Attributes:
        has_lifetime: see `lifetime`.
    """

    def __init__(
        self,
        tasks: int,
        sums: int,
        window: int,
        entries: int,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float64,
        lifetime: bool = True,
    ) -> None:
        self._window = window
        self._entries = entries if window else 1
        self.has_lifetime = lifetime
        self.tensor_ETK = torch.zeros(self._entries if window else 0, tasks, sums, dtype=dtype, device=device)
        self.retired_TK = torch.zeros(tasks, sums if lifetime else 0, dtype=torch.float64, device=device)
        self.steps: list[int] = []  # per entry in use
        self.samples: list[int] = []  # per entry, of this rank
        self._held = 0  # samples of all entries
        self._per_entry = 1
        self._first = 0  # position of the oldest entry

    @property
    def has_window(self) -> bool:
        """True if there are sums of a window."""
        return self._window > 0 and self.tensor_ETK.shape[2] > 0

    def to(self, device: torch.device) -> None:
        """Move the sums."""
        self.tensor_ETK = self.tensor_ETK.to(device)
        self.retired_TK = self.retired_TK.to(device)

    def open(self, samples: int, *, drop: bool) -> Tensor:
        """Count a step and return the sums to which its sums are added, [T, K].

        Args:
            samples: number of samples of this rank.
            drop: whether entries may leave the window now; on several ranks they leave it in a report.
        """
        if not self._window:
            return self.retired_TK
        if not self.steps or self.steps[-1] >= self._per_entry:
            self._begin_entry(drop)
        self.steps[-1] += 1
        self.samples[-1] += samples
        self._held += samples
        return self.tensor_ETK[(self._first + len(self.steps) - 1) % self._entries]

    def latest(self, count: int) -> Tensor:
        """Return the sums of the latest `count` entries, float64 [T, K]."""
        start = len(self.steps) - count
        total_TK = torch.zeros(self.tensor_ETK.shape[1:], dtype=torch.float64, device=self.tensor_ETK.device)
        return sum((part_ETK.sum(0, dtype=torch.float64) for part_ETK in self._parts(start, count)), total_TK)

    def lifetime(self) -> Tensor:
        """Return the sums of all steps, float64 [T, K]; not a copy if there is no window."""
        return self.retired_TK + self.latest(len(self.steps)) if self._window else self.retired_TK

    def keep_latest(self, count: int) -> None:
        """Add all but the latest `count` entries to the lifetime's earlier steps."""
        drop = len(self.steps) - count
        if drop > 0:
            for old_DTK in self._parts(0, drop) if self.tensor_ETK.numel() else ():
                if self.has_lifetime:
                    self.retired_TK += old_DTK.sum(0, dtype=torch.float64)
                old_DTK.zero_()
            self._first = (self._first + drop) % self._entries
            self._held -= sum(self.samples[:drop])
            del self.steps[:drop], self.samples[:drop]

    def reset(self) -> None:
        """Set all sums and counts to 0."""
        self.tensor_ETK.zero_()
        self.retired_TK.zero_()
        self.steps, self.samples = [], []
        self._per_entry, self._first, self._held = 1, 0, 0

    def state(self) -> dict[str, Tensor]:
        """Return copies of the sums and counts; `window` has only the entries in use."""
        return {
            "earlier": self.retired_TK.clone(),
            "window": self._in_order(),
            "counts": torch.tensor([self.steps, self.samples], dtype=torch.int64),
            "steps_per_entry": torch.tensor(self._per_entry),
        }

    def load(self, state: Mapping[str, Any], *, empty: bool) -> None:
        """Replace all sums and counts.

        Args:
            state: from `state`, possibly of another window's length or number of entries.
            empty: take over the steps only, with all sums and counts of samples of this rank 0.
        """
        shape = tuple(self.retired_TK.shape)
        if tuple(state["earlier"].shape) != shape:
            raise InputError(
                f"Metric state: got sums of shape {list(state['earlier'].shape)}; expected {list(shape)}, tasks x "
                "sums. Load it into metrics with the same tasks and measures."
            )
        self.reset()
        steps, samples = (row.tolist() for row in state["counts"].cpu())
        window_ETK = state["window"].to(self.tensor_ETK)
        if empty:
            window_ETK, samples = torch.zeros_like(window_ETK), [0] * len(samples)
        else:
            self.retired_TK.copy_(state["earlier"])
        kept = min(len(steps), self._entries) if self._window else 0
        start = len(steps) - kept
        if start and self.has_lifetime:
            self.retired_TK += window_ETK[:start].sum(0, dtype=torch.float64)
        self.tensor_ETK[:kept] = window_ETK[start:]
        self.steps, self.samples = steps[start:], samples[start:]
        self._held = sum(self.samples)
        self._per_entry = int(state["steps_per_entry"])

    def _begin_entry(self, drop: bool) -> None:
        """Append an entry without steps; retire or merge entries before if there is no place for it."""
        if drop:
            # An entry outside of the window never fits again: the window only gains samples at its other end.
            excess, out = self._held - self._window, 0
            while excess > 0 and out < len(self.samples) - 1:
                excess -= self.samples[out]
                out += 1
            self.keep_latest(len(self.samples) - out)
        if len(self.steps) == self._entries:
            self._merge()
        elif self._per_entry > 1 and len(self.steps) <= self._entries // 8:
            self._per_entry //= 2
        self.steps.append(0)
        self.samples.append(0)

    def _merge(self) -> None:
        """Add each entry to its neighbour, from the oldest; an odd last entry stays alone."""
        sums_UTK = self._in_order()
        used, pairs = len(self.steps), len(self.steps) // 2
        self.tensor_ETK.zero_()
        self.tensor_ETK[:pairs] = sums_UTK[: 2 * pairs : 2] + sums_UTK[1 : 2 * pairs : 2]
        if used % 2:
            self.tensor_ETK[pairs] = sums_UTK[-1]
        self._first = 0
        self._per_entry *= 2
        self.steps = _pairs(self.steps)
        self.samples = _pairs(self.samples)

    def _parts(self, start: int, count: int) -> list[Tensor]:
        """Return `count` entries from the `start`-th oldest as one or two views, in order."""
        begin = (self._first + start) % self._entries
        stop = begin + count
        if stop <= self._entries:
            return [self.tensor_ETK[begin:stop]]
        return [self.tensor_ETK[begin:], self.tensor_ETK[: stop - self._entries]]

    def _in_order(self) -> Tensor:
        """Return a copy of the entries in use, oldest first."""
        return torch.cat(self._parts(0, len(self.steps)))


def _pairs(counts: list[int]) -> list[int]:
    """Return sums of neighbours."""
    return [sum(counts[at : at + 2]) for at in range(0, len(counts), 2)]
