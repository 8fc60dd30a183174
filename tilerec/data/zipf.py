"""Fit of Zipf's law to a stream of ids, from its sketches.

    the k-th most frequent of D ids has the share k^-s / H_D(s),        H_b(s) = sum_{k=1..b} k^-s

Exponent: the counts c_1 >= ... >= c_m of the most frequent ids are known; the other n - sum c ids of the stream have
unknown ranks above m. `exponent` maximises the likelihood of these data (maximum likelihood, censored after rank m):

    L(s) = -s sum c_k ln k + (n - sum c) ln (H_D(s) - H_m(s)) - n ln H_D(s)

Population: rare ids may not have occurred yet. `fit` returns the D for which n draws, with the exponent fitted to D,
are expected to show as many distinct ids as were counted.

Limits
    exponent    ranks come from the counts themselves, so random differences look like skew. Only counts from 30 are
                used, and an even stream still gets an exponent up to about 0.1
    other laws  a stream without a power law gets the law with the right share of frequent ids; `distance` is the
                largest error of its shares
    population  an extrapolation, at most 64 times the distinct ids. Above exponents of about 1.5 the data hardly
                determine it, and it hardly matters. If (nearly) every id occurs once, it is those 64 times: the data
                do not determine the number, but batches will not repeat ids

Legend: m known counts, B buckets of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LARGEST_EXPONENT = 8.0
MIN_COUNT = 30
MOST_COUNTS = 256
MAX_EXTRAPOLATION = 64
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class ZipfFit:
    """A law and its goodness of fit.

    Attributes:
        exponent: s, from 0 to 8.
        population: D; at least the number of distinct ids in the stream.
        distance: the largest difference between the law's and the counted share of the first k ids, over k <= m (the
            Kolmogorov-Smirnov distance, on the head).
        counts_used: m; below 2 the data do not determine the exponent, and it is 0.
    """

    exponent: float
    population: int
    distance: float
    counts_used: int


def fit(counts_m: npt.NDArray[np.int64], total: int, distinct: float) -> ZipfFit:
    """Return the law of a stream.

    Args:
        counts_m: counts of the most frequent ids, descending.
        total: n, the number of ids in the stream.
        distinct: number of distinct ids in the stream.
    """
    seen = max(round(distinct), len(counts_m), 1)
    head_m = counts_m[:MOST_COUNTS].astype(np.float64)
    head_m = head_m[head_m >= MIN_COUNT]
    if len(head_m) < 2 or seen < 2:
        return ZipfFit(0.0, _population(head_m, total, seen, fixed=0.0), 0.0, 0)
    population = _population(head_m, total, seen)
    power = exponent(head_m, total, population)
    law_m = np.cumsum(np.arange(1, len(head_m) + 1) ** -power) / harmonic(power, 1, population)
    distance = float(np.abs(law_m - np.cumsum(head_m) / total).max())
    return ZipfFit(round(power, 4), population, round(distance, 6), len(head_m))


def exponent(counts_m: Floats, total: float, population: int) -> float:
    """Return the s of maximum likelihood (see the top of this file), by golden-section search: L has one maximum.

    Forty steps narrow [0, 8] to 1e-7.
    """
    m = len(counts_m)
    logs = float(np.sum(counts_m * np.log(np.arange(1, m + 1))))
    head, rest = float(counts_m.sum()), max(0.0, total - float(counts_m.sum()))

    def likelihood(s: float) -> float:
        first, tail = harmonic(s, 1, m), harmonic(s, m + 1, population)
        value = -s * logs - (head + rest) * math.log(first + tail)
        return value + rest * math.log(tail) if rest and tail > 0 else value

    low, high = 0.0, LARGEST_EXPONENT
    for _ in range(40):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if likelihood(left) < likelihood(right):
            low = left
        else:
            high = right
    return (low + high) / 2.0


def harmonic(s: float, first: int, last: int) -> float:
    """Return the sum of k^-s over first <= k <= last: term by term to rank 2,000, beyond by a midpoint integral.

    The integral's error is below s (s + 1) / 24 k^-(s+1) at k = 2,000: 1e-8 of the first term for s = 1.
    """
    if last < first:
        return 0.0
    near = min(last, max(first - 1, 2000))
    total = float(np.sum(np.arange(first, near + 1, dtype=np.float64) ** -s))
    if last > near:
        low, high = near + 0.5, last + 0.5
        if abs(s - 1.0) < 1e-9:
            total += math.log(high / low)
        else:
            total += (high ** (1.0 - s) - low ** (1.0 - s)) / (1.0 - s)
    return total


def expected_distinct(s: float, population: int, draws: float) -> float:
    """Return the expected number of distinct ids in `draws` draws, sum_k 1 - (1 - p_k)^draws.

    Ranks are grouped in buckets that grow by 5%.
    """
    edges = [1]
    while edges[-1] <= population:
        edges.append(max(edges[-1] + 1, int(edges[-1] * 1.05)))
    low_B = np.array(edges[:-1], np.float64)
    high_B = np.minimum(np.array(edges[1:], np.float64), population + 1.0)
    size_B = high_B - low_B
    share_B = ((low_B + high_B - 1.0) / 2.0) ** -s
    share_B /= float(np.sum(share_B * size_B))
    return float(np.sum(size_B * -np.expm1(draws * np.log1p(-np.minimum(share_B, 1.0 - 1e-12)))))


def _population(head_m: Floats, total: int, seen: int, fixed: float | None = None) -> int:
    """Return the smallest D >= seen for which `total` draws are expected to show `seen` ids or more, by bisection."""

    def shown(population: int) -> float:
        s = exponent(head_m, total, population) if fixed is None else fixed
        return expected_distinct(s, population, total)

    low, high = seen, seen * MAX_EXTRAPOLATION
    if not total or shown(low) >= seen * 0.999:
        return seen
    for _ in range(24):
        middle = math.isqrt(low * high)
        if middle <= low or high <= low * 1.001:
            break
        if shown(middle) < seen:
            low = middle
        else:
            high = middle
    return high
