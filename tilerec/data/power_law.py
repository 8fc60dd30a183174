"""Ranks and ids that follow a power law.

    P(rank = r)  is proportional to  the integral of x^-a over [r + 1, r + 2],   r in [0, n)

This is the continuous power law truncated at n + 1 and rounded down, close to Zipf's law with the same exponent. Its
quantile function has a closed form, so drawing needs no table of n numbers. a = 0 is uniform.

`scattered_ids` spreads the ranks over the table, so that frequent rows are not all at its start.

Legend: N draws, n rows of a table, a exponent.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tilerec.errors import ConfigError

_LARGEST = 1 << 31  # rank * multiplier must fit in int64


def check_power_law(num_rows: int, exponent: float) -> None:
    """Raise for sizes and exponents for which the formulas do not hold."""
    if not 1 <= num_rows <= _LARGEST:
        raise ConfigError(f"num_rows: got {num_rows}; expected 1 to {_LARGEST:,}. Change it.")
    if not 0 <= exponent <= 20:
        raise ConfigError(f"exponent: got {exponent}; expected 0 (uniform) to 20. Change it.")


def power_law_ranks(uniform_N: npt.NDArray[np.float64], num_rows: int, exponent: float) -> npt.NDArray[np.int64]:
    """Return the ranks in [0, num_rows) at the quantiles `uniform_N` in [0, 1).

    Worked example, n = 3 and a = 1: the ranks change at log 2 / log 4 = 0.5 and log 3 / log 4 = 0.792, so the quantiles
    0.4, 0.6, 0.9 give ranks 0, 1, 2.
    """
    end = num_rows + 1.0
    if abs(exponent - 1.0) < 1e-9:
        place_N = np.exp(uniform_N * math.log(end))
    else:
        power = 1.0 - exponent
        place_N = (uniform_N * (end**power - 1.0) + 1.0) ** (1.0 / power)
    return np.clip(place_N.astype(np.int64) - 1, 0, num_rows - 1)


def power_law_probabilities(num_rows: int, exponent: float) -> npt.NDArray[np.float64]:
    """Return the probability of every rank, float64 [n]; they sum to 1."""
    edges = np.arange(1, num_rows + 2, dtype=np.float64)
    if abs(exponent - 1.0) < 1e-9:
        below = np.log(edges)
    else:
        below = (edges ** (1.0 - exponent) - 1.0) / (1.0 - exponent)
    return np.diff(below) / below[-1]


def scattered_ids(ranks_N: npt.NDArray[np.int64], num_rows: int) -> npt.NDArray[np.int64]:
    """Map ranks to ids by a bijection of [0, n): id = (rank * m + n // 3) mod n, with m near 0.618 n and prime to n."""
    multiplier = max(1, int(num_rows * 0.6180339887498949))
    while math.gcd(multiplier, num_rows) != 1:
        multiplier += 1
    return (ranks_N * multiplier + num_rows // 3) % num_rows
