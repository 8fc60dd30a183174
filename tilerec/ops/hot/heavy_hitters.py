"""The most frequent values of a stream, with bounds on their counts.

The summary of Misra and Gries (Finding repeated elements, 1982), block by block as in Agarwal et al. (Mergeable
summaries, 2012). A block's exact counts are added to the k counters. If more than k counters result, the (k + 1)-th
largest count is subtracted from all, and counters at 0 or below are dropped. The sum of all subtractions is `error`:

    counted <= true count <= counted + error        error <= (values seen - sum of counters) / (k + 1)

So every value with more than 1 / (k + 1) of the stream has a counter.

Legend: n distinct values of a block, k counters.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tilerec.errors import ConfigError

Keys = npt.NDArray[np.int64]


class HeavyHitters:
    """Counters of the most frequent 64-bit keys.

    Args:
        counters: k, the number of counters.

    Attributes:
        error: maximum difference between the true count and the counted one.

    Worked example, k = 2: the block {a: 5, b: 3, c: 2} leaves {a: 3, b: 1} and error 2.
    """

    def __init__(self, counters: int = 2048) -> None:
        if counters < 1:
            raise ConfigError(f"HeavyHitters: got counters={counters}; expected at least 1. Raise it.")
        self._most = counters
        self.keys: Keys = np.zeros(0, np.int64)  # ascending
        self.counts: Keys = np.zeros(0, np.int64)
        self.error = 0

    def add(self, keys_n: Keys, counts_n: Keys) -> None:
        """Add a block: its distinct keys, ascending, and the count of each."""
        place_k = np.searchsorted(keys_n, self.keys)
        known_k = np.zeros(len(self.keys), np.bool_)
        if len(keys_n):
            place_k = np.minimum(place_k, len(keys_n) - 1)
            known_k = keys_n[place_k] == self.keys
        new_n = np.ones(len(keys_n), np.bool_)
        new_n[place_k[known_k]] = False
        counts_k = self.counts.copy()
        counts_k[known_k] += counts_n[place_k[known_k]]
        keys = np.concatenate([self.keys, keys_n[new_n]])
        counts = np.concatenate([counts_k, counts_n[new_n]])
        if len(keys) > self._most:
            # The (k + 1)-th largest count.
            least = int(np.partition(counts, len(counts) - self._most - 1)[len(counts) - self._most - 1])
            kept = counts > least
            keys, counts = keys[kept], counts[kept] - least
            self.error += least
        order = np.argsort(keys, kind="stable")
        self.keys, self.counts = keys[order], counts[order]

    def top(self, most: int) -> tuple[Keys, Keys]:
        """Return up to `most` keys and counts, the most frequent first; equal counts by key."""
        order = np.lexsort((self.keys, -self.counts))[:most]
        return self.keys[order], self.counts[order]
