"""`ThroughputMetric`: samples per second, from the samples that each rank counts.

    lifetime    since the job began, over restarts     (samples - samples of warm-up steps) / seconds after warm-ups
    attempt     since this process began
    window      the last seconds

The first steps after a start are warm-up: compilation, caches and readers make them slow, so they do not count in
rates. A rate uses the mean of the ranks' clocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from tilerec.errors import ConfigError


@final
class ThroughputMetric:
    """Counts of samples and seconds of one rank.

    Args:
        window_seconds: length of the window.
        warmup_steps: steps after a start without rates; at least 1, as the first step has no beginning.
        clock: returns seconds; may start anywhere.
    """

    def __init__(
        self,
        *,
        window_seconds: float = 100,
        warmup_steps: int = 100,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not window_seconds > 0 or warmup_steps < 1:
            raise ConfigError(
                f"ThroughputMetric: got window_seconds={window_seconds}, warmup_steps={warmup_steps}; expected a "
                "positive number of seconds and at least 1 step."
            )
        self._window_seconds = window_seconds
        self._warmup_steps = warmup_steps
        self._clock = clock
        self._earlier = [0, 0]  # samples, and samples of warm-up steps, of earlier attempts
        self._earlier_seconds = 0.0
        self._steps = 0
        self._samples = [0, 0]  # of this attempt
        self._seconds = 0.0
        self._last = 0.0  # time of the last update
        self._window: deque[tuple[float, float, int]] = deque()  # time, seconds and samples of a step

    def update(self, samples: int) -> None:
        """Count a step that ends now, with this rank's number of samples."""
        now = self._clock()
        self._steps += 1
        self._samples[0] += samples
        if self._steps <= self._warmup_steps:
            self._samples[1] += samples
        else:
            self._seconds += now - self._last
            self._window.append((now, now - self._last, samples))
        self._last = now
        while self._window and self._window[0][0] <= now - self._window_seconds:
            self._window.popleft()

    def numbers(self) -> Tensor:
        """Return this rank's counts and seconds, float64, whose sums over ranks `values` takes."""
        window = [sum(part) for part in zip(*self._window, strict=True)] or [0, 0, 0]
        seconds = [self._earlier_seconds, self._seconds, window[1]]
        return torch.tensor([*self._earlier, *self._samples, window[2], *seconds], dtype=torch.float64)

    def values(self, sums: Tensor, ranks: int) -> dict[str, Tensor]:
        """Return counts and rates by TorchRec's names, without rates during warm-up.

        Args:
            sums: of the `numbers` of all ranks.
            ranks: number of ranks.
        """
        earlier, earlier_warm, own, own_warm, in_window, *seconds = sums.tolist()
        earlier_seconds, own_seconds, window_seconds = (part / ranks for part in seconds)
        values = {
            "total_examples": torch.tensor(int(earlier + own)),
            "attempt_examples": torch.tensor(int(own)),
        }
        rates = {
            "lifetime_throughput": (
                earlier + own - earlier_warm - own_warm,
                earlier_seconds + own_seconds,
            ),
            "window_throughput": (in_window, window_seconds),
            "attempt_throughput": (own - own_warm, own_seconds),
        }
        for name, (samples, elapsed) in rates.items():
            if elapsed > 0:
                values[name] = torch.tensor(samples / elapsed, dtype=torch.float64)
        return values

    def state(self, sums: Tensor, ranks: int) -> dict[str, Any]:
        """Return the lifetime's counts and seconds, given `numbers` or their sums over ranks."""
        earlier, earlier_warm, own, own_warm, _, *seconds = sums.tolist()
        return {
            "samples": torch.tensor([int(earlier + own), int(earlier_warm + own_warm)]),
            "seconds": torch.tensor((seconds[0] + seconds[1]) / ranks, dtype=torch.float64),
        }

    def load(self, state: Mapping[str, Any], *, empty: bool) -> None:
        """Begin an attempt after the lifetime of a state; with `empty`, without samples of this rank before."""
        self._earlier = [0, 0] if empty else state["samples"].tolist()
        self._earlier_seconds = state["seconds"].item()
        self._steps, self._samples, self._seconds = 0, [0, 0], 0.0
        self._window.clear()
