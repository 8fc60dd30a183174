"""Powers and expectations made of +, -, * and / alone: the same bits on every machine.

Mathematics libraries differ in the last digit of exp, log and pow, and a planner that rounds such a digit to a whole
picosecond would now and then plan otherwise on one machine than on another. Elementwise +, -, * and / are exact to
rounding by IEEE 754 everywhere. Sums over an axis are not used: their order differs too.

Legend: arrays of float64 that broadcast.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LN2 = 0.6931471805599453


def power(base: Any, exponent: Any) -> Floats:
    """base ** exponent for whole exponents from 0, by squaring. `power(0.5, 3) == 0.125`."""
    base, left = np.broadcast_arrays(np.asarray(base, np.float64), np.asarray(exponent, np.int64))
    result, square = np.ones(base.shape), base.copy()
    left = left.copy()
    while np.any(left):
        result = np.where(left & 1, result * square, result)
        left >>= 1
        square = square * square
    return result


def exponential(x: Any) -> Floats:
    """e ** x for -700 <= x <= 700, to about 1e-12 of it: x = n ln 2 + r, and a series of r."""
    x = np.clip(np.asarray(x, np.float64), -700.0, 700.0)
    n = np.floor(x / LN2 + 0.5)
    r = (x - n * LN2) / (1 << 3)
    series = np.ones_like(r)
    for k in range(9, 0, -1):
        series = 1.0 + r * series / k
    for _ in range(3):
        series = series * series
    return np.ldexp(series, n.astype(np.int64))


def missed(share: Any, draws: Any) -> Floats:
    """Chance that none of `draws` independent ids falls where a `share` of them falls.

        (1 - share) ** draws;  2.5 draws are two or three, each half of the time

    `missed(0.5, 1.5) == 0.375`: half of (0.5 + 0.25).
    """
    draws = np.minimum(np.asarray(draws, np.float64), 2.0**62)  # a whole number of 64 bits below
    whole = np.floor(draws)
    rest = draws - whole
    share = np.asarray(share, np.float64)
    return power(1.0 - share, whole.astype(np.int64)) * (1.0 - rest * share)


def distinct_uniform(rows: Any, draws: Any) -> Floats:
    """Expected distinct ids among `draws` even ones of `rows`: rows (1 - (1 - 1/rows) ** draws).

    `distinct_uniform(2, 2) == 1.5`.
    """
    rows = np.asarray(rows, np.float64)
    found = rows * (1.0 - missed(1.0 / rows, draws))
    # Where rows are many, 1 - (1 - tiny) has lost its digits: nearly every draw is new.
    return np.where(rows > 1e12, np.asarray(draws, np.float64), np.minimum(found, draws))
