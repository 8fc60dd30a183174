"""Eviction from a full window on a GPU: the scores of `tilerec/ops/hash/policy.py`, bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from tilerec.ops.hash.policy import Policy
from tilerec.ops.hash.triton.place import FAR, wrapped

MOST = tl.constexpr(2**63 - 1)
LRU, LFU, DISTANCE_LFU, TTL = (tl.constexpr(int(policy)) for policy in Policy)


@triton.jit
def power(age, EXPONENT: tl.constexpr):
    """Return age ** (EXPONENT / 256) in float64, by the reference's products and square roots.

    9, 384 -> 9 * sqrt(9) = 27
    """
    base = age.to(tl.float64)
    root = base
    result = base * 0 + 1
    for bit in tl.static_range(5):
        if (EXPONENT >> (8 + bit)) & 1:
            result *= base
        base *= base
    for bit in tl.static_range(8):
        if EXPONENT & (255 >> bit):
            root = tl.sqrt(root)
            if EXPONENT & (128 >> bit):
                result *= root
    return result


@triton.jit
def score_of(last, hits_at, expires_at, mask, step, POLICY: tl.constexpr, EXPONENT: tl.constexpr):
    """Return int64 in the order of the rows' scores; of LFU the hits, whose ties go by `last`.

    DISTANCE_LFU: the score's bits, which are in its order, since no score is negative zero or NaN.
    """
    score = last
    if POLICY == TTL:
        score = tl.load(expires_at, mask=mask, other=MOST)
    elif POLICY != LRU:
        score = tl.load(hits_at, mask=mask, other=0)
    if POLICY == DISTANCE_LFU:
        ratio = score.to(tl.float64) / power(tl.maximum(step - last, 1), EXPONENT)
        bits = ratio.to(tl.int64, bitcast=True)
        score = tl.where(bits < 0, bits ^ MOST, bits)
    return score


@triton.jit
def victim(
    last_E, hits_E, expires_E, base, start, slots, window, step, now,
    POLICY: tl.constexpr, EXPONENT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the distance from `start` of the slot that the policy evicts; FAR: none. Of equal slots the nearest.

    LFU, hits [7, 2, 2], last [4, 6, 5], step 6: the second slot is touched; the third is evicted -> 2.
    """
    lane = tl.arange(0, WIDTH)
    done = start * 0
    found = done + FAR
    least, least_last = found * 0, found * 0
    while done < window:
        distance = done + lane
        row = base + wrapped(start + distance, slots)
        inside = distance < window
        last = tl.load(last_E + row, mask=inside, other=MOST)
        score = score_of(last, hits_E + row, expires_E + row, inside, step, POLICY, EXPONENT)
        free = inside & (last < step)
        if POLICY == TTL:
            free = free & (score <= now)
        here = tl.min(tl.where(free, score, MOST), axis=0)
        free = free & (score == here)
        here_last = least_last
        if POLICY == LFU:
            here_last = tl.min(tl.where(free, last, MOST), axis=0)
            free = free & (last == here_last)
        nearest = tl.min(tl.where(free, distance, FAR), axis=0)
        better = (found == FAR) | (here < least)
        if POLICY == LFU:
            better = better | ((here == least) & (here_last < least_last))
        better = better & (nearest < FAR)
        found = tl.where(better, nearest, found)
        least = tl.where(better, here, least)
        least_last = tl.where(better, here_last, least_last)
        done += WIDTH
    return found


def exponent_of(policy: int, exponent: float) -> int:
    """Return the exponent in steps of 1/256, as in `power`; 0 for other policies, so that all share one kernel."""
    return int(exponent * 256 + 0.5) if policy == Policy.DISTANCE_LFU else 0
