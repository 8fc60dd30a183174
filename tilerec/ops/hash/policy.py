"""Eviction policies, and the outcomes of an assignment. Terms as in `definition.py`."""

from __future__ import annotations

import enum
import math
from typing import TypeAlias

Score: TypeAlias = "tuple[float, ...] | tuple[int, ...]"


class Policy(enum.IntEnum):
    """Eviction policies of a full window: the least score is evicted first; of ties, the first in probing order."""

    LRU = 0  # last
    LFU = 1  # hits, then last
    DISTANCE_LFU = 2  # hits / (step - last) ** exponent, in float64; the exponent in steps of 1/256
    TTL = 3  # expires; only slots with expires <= now


class IdOutcome(enum.IntEnum):
    """Outcome of an assignment for one id."""

    HIT = 0  # it had a row
    INSERTED = 1  # it took an empty slot
    EVICTED = 2  # it took the row of an evicted id
    REJECTED = 3  # its window is full, and no row in it may be evicted
    NOT_ADMITTED = 4  # fewer occurrences than the threshold
    MISSING = 5  # not found, and insertion is disabled


def power(age: int, exponent: float) -> float:
    """Return age ** exponent, with the exponent rounded to 1/256.

    It uses only products and square roots, which every machine rounds alike. 9 ** 1.5 -> 9 * sqrt(9) = 27
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


def score(policy: int, *, step: int, last: int, hits: int, expires: int = 0, exponent: float = 1.0) -> Score:
    """Return a row's score under a policy; the row with the least score is evicted first.

    LFU, last 3, hits 2 -> (2, 3); DISTANCE_LFU, step 7, last 3, hits 2, exponent 1 -> (0.5,)
    """
    if policy == Policy.LRU:
        return (last,)
    if policy == Policy.LFU:
        return (hits, last)
    if policy == Policy.DISTANCE_LFU:
        return (float(hits) / power(max(step - last, 1), exponent),)
    return (expires,)
