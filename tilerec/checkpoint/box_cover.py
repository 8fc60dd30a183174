"""Checks of boxes in time linear in their number, whatever an untrusted file states: cover and bytes.

Cover. Each coordinate x of an edge gets a random number r(x), by dimension. The measure of a box is the product over
its dimensions of r(end) - r(start), mod p = 2^61 - 1. The measures of boxes that hold each cell once add up to that of
the whole tensor. Those of other boxes do with a probability below dimensions / p. The numbers are new for each check.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from secrets import randbelow
from typing import NamedTuple

from tilerec.checkpoint.pieces import Box

_P = 2**61 - 1


class Span(NamedTuple):
    """Bytes [start, end) of a file."""

    file: str
    start: int
    end: int


def hold_each_cell_once(boxes: Iterable[Box], shape: tuple[int, ...]) -> bool:
    """Return True if boxes, which lie inside of the shape, hold each of its cells once."""
    r: list[defaultdict[int, int]] = [defaultdict(lambda: randbelow(_P)) for _ in shape]

    def measure(box: Box) -> int:
        product = 1
        for numbers, first, size in zip(r, box.offsets, box.sizes, strict=True):
            product = product * (numbers[first + size] - numbers[first]) % _P
        return product

    return (sum(map(measure, boxes)) - measure(Box((0,) * len(shape), shape))) % _P == 0


def shared_bytes(spans: Iterable[Span]) -> Span | None:
    """Return a span that shares bytes with another one; None if there is none."""
    for one, other in pairwise(sorted(span for span in spans if span.start < span.end)):
        if one.file == other.file and other.start < one.end:
            return other
    return None
