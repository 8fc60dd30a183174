"""`RowNumbers`: the numbers of listed rows of a checkpoint, in segments: a list of any length takes little memory.

list      3 7 8 | 20 31 40 | 55 60        int64 ascending, in a file
segments  first numbers 3, 20, 55: known after the first pass, so later ones read just the segments that they need
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from torch import Tensor

from tilerec.checkpoint.blocks import BlockReader
from tilerec.checkpoint.manifest import RowList
from tilerec.checkpoint.scratch_memory import scratch_tensor
from tilerec.errors import InputError

_WIDTH = 8  # bytes of a number


class Segment(NamedTuple):
    """Numbers of consecutive rows of a list, int64 `[N]` ascending; the first is number `at` of the list."""

    at: int
    numbers: Tensor


@final
class RowNumbers:
    """Reads the numbers of lists, and keeps the segments that it read last.

    Args:
        most_bytes: of the segments in memory: two that are kept, and one that a caller may still hold.
    """

    def __init__(self, most_bytes: int) -> None:
        self._size = max(1, most_bytes // 3 // _WIDTH)
        self._firsts: dict[tuple[str, int], Tensor] = {}  # first number of each segment, by path and byte of the list
        self._kept: OrderedDict[tuple[str, int, int], Tensor] = OrderedDict()

    def between(self, reader: BlockReader, path: str, rows: RowList, low: int, high: int) -> Iterator[Segment]:
        """Yield the numbers of a list in [low, high), by segments.

        Args:
            reader, path: of the file with the list.

        Raises:
            InputError: the file is damaged, or the numbers do not ascend inside of the list's box.
        """
        place = path, rows.numbers[1]
        known = self._firsts.get(place)
        parts = range(-(-rows.count // self._size))
        if known is not None:
            start, end = torch.searchsorted(known, torch.tensor([low + 1, high])).tolist()
            parts = range(max(0, start - 1), end)
        firsts, before = [], rows.box.offsets[0] - 1
        for part in parts:
            numbers = self._segment(reader, path, rows, part)
            if known is None:
                _check(numbers, before, rows, path)
                firsts.append(int(numbers[0]))
                before = int(numbers[-1])
            first, last = torch.searchsorted(numbers, torch.tensor([low, high])).tolist()
            if first < last:
                yield Segment(part * self._size + first, numbers[first:last])
        if known is None:
            self._firsts[place] = torch.tensor(firsts)

    def _segment(self, reader: BlockReader, path: str, rows: RowList, part: int) -> Tensor:
        key = path, rows.numbers[1], part
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        first = part * self._size
        size = min(self._size, rows.count - first)
        # Segments of short lists take less, so more of them are kept.
        while self._kept and sum(map(len, self._kept.values())) + size > 2 * self._size:
            self._kept.popitem(last=False)
        found = scratch_tensor((size,), torch.int64)
        reader.read_into(rows.numbers[1] + first * _WIDTH, found.view(torch.uint8).numpy().data)
        self._kept[key] = found
        return found


def _check(numbers: Tensor, before: int, rows: RowList, path: str) -> None:
    """Raise `InputError` for numbers that do not ascend from the one before them, inside of the list's box."""
    first, last = rows.box.offsets[0], rows.box.offsets[0] + rows.box.sizes[0]
    ascending = int(numbers[0]) > before and bool((numbers[1:] > numbers[:-1]).all())
    if not ascending or int(numbers[-1]) >= last:
        raise InputError(
            f"Checkpoint {path}: got row numbers from {int(numbers[0])} to {int(numbers[-1])}; expected ascending "
            f"numbers in [{first}, {last}). Load an earlier checkpoint."
        )
