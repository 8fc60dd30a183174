"""`Batching`: how requests become batches (batcher.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilerec.errors import ConfigError


@dataclass(frozen=True)
class Batching:
    """Sizes of batches.

    Attributes:
        max_samples: most samples of a batch of several requests; a larger request runs alone.
        wait_ms: milliseconds that the first request of a batch waits for others.
        max_waiting: most requests that wait; more are refused (status 503).
    """

    max_samples: int = 1024
    wait_ms: float = 0.0
    max_waiting: int = 1000

    def __post_init__(self) -> None:
        if self.max_samples < 1 or not 0 <= self.wait_ms < math.inf or self.max_waiting < 1:
            raise ConfigError(
                f"Batching: got {self}; expected max_samples and max_waiting from 1, a finite wait_ms from 0. Correct "
                "it."
            )
