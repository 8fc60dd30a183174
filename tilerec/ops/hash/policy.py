"""Whom a full window evicts, and what can become of an id.

Nouns as in `definition.py`.
"""

from __future__ import annotations

import enum
import math
from typing import TypeAlias

Score: TypeAlias = "tuple[float, ...] | tuple[int, ...]"


class Policy(enum.IntEnum):
    """Whom a full window evicts: the least of, and of equals the first in the order of probing."""

    LRU = 0  # last
    LFU = 1  # hits, then last
    DISTANCE_LFU = 2  # hits / (step - last) ** exponent, in float64; the exponent in steps of 1/256
    TTL = 3  # expires; only slots with expires <= now


class Outcome(enum.IntEnum):
    """What became of one id."""

    HIT = 0  # it had a row
    INSERTED = 1  # it took an empty slot
    EVICTED = 2  # it took the row of an evicted id
    REJECTED = 3  # its window is full, and nobody in it was to be evicted
    NOT_ADMITTED = 4  # not seen often enough yet
    MISSING = 5  # not there, and not to be inserted


def power(age: int, exponent: float) -> float:
    """age ** exponent, taken to the nearest 1/256, by products and square roots: every machine rounds them alike.

    9 ** 1.5 -> 9 * sqrt(9) = 27
    """
    whole, part = divmod(int(exponent * 256 + 0.5), 256)
    result, base, root = 1.0, float(age), float(age)
    while whole:
        result *= base if whole & 1 else 1.0
        whole >>= 1
        base *= base if whole else 1.0
    while part:
        root = math.sqrt(root)
        result *= root if part & 128 else 1.0
        part = (part << 1) & 255
    return result


def score_of(policy: int, exponent: float, step: int, last: int, hits: int, expires: int) -> Score:
    """What a policy compares: the least goes first."""
    if policy == Policy.LRU:
        return (last,)
    if policy == Policy.LFU:
        return (hits, last)
    if policy == Policy.DISTANCE_LFU:
        return (float(hits) / power(max(step - last, 1), exponent),)
    return (expires,)
