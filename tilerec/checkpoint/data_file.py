"""Data files of a checkpoint: safetensors files, written from start to end.

    8 bytes with the size of the header | header (JSON: dtype, shape and bytes of each entry) | the entries' bytes

entry of a chunk      named like its tensor, if it is the whole tensor; else with its rows and columns:
                      `model.table.weight[0:1000, 0:64]`
entries of some rows  the rows' numbers, `model.table.weight[0:1000, 0:64].rows`, and their values, `….values`

So any reader of safetensors files can use them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.checkpoint.blocks import BlockWriter
from tilerec.checkpoint.dtypes import DTYPE_NAMES
from tilerec.checkpoint.pieces import Box

CHUNK_BYTES = 1 << 26  # most bytes of a chunk, unless one row is larger
_ALIGNMENT = 8


class Entry(NamedTuple):
    """A tensor of a data file.

    Args:
        key: its name in the file.
        data: yields its bytes, row by row; None: the caller writes them.
    """

    key: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    data: Callable[[], Iterable[memoryview]] | None = None

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return Box((), self.sizes).cells * self.dtype.itemsize


def key_of(name: str, shape: tuple[int, ...], box: Box) -> str:
    """Return the key of a box of a tensor."""
    if box.sizes == shape:
        return name
    spans = (f"{low}:{low + size}" for low, size in zip(box.offsets, box.sizes, strict=True))
    return f"{name}[{', '.join(spans)}]"


def chunks_of(box: Box, dtype: torch.dtype, row_bytes: int = 0) -> Iterator[Box]:
    """Yield a box cut into chunks of whole rows of at most `CHUNK_BYTES`.

    Args:
        row_bytes: bytes that are read for a row; 0: those of the row.
    """
    if not box.sizes or not box.cells:
        yield box
        return
    step = max(1, CHUNK_BYTES // max(row_bytes, box.cells // box.sizes[0] * dtype.itemsize))
    for first in range(0, box.sizes[0], step):
        rows = min(step, box.sizes[0] - first)
        yield Box((box.offsets[0] + first, *box.offsets[1:]), (rows, *box.sizes[1:]))


def starts_of(entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> tuple[bytes, list[int]]:
    """Return the header of a file with these entries and further metadata, and the byte at which each entry starts."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    starts, at = [], 0
    for entry in entries:
        starts.append(at)
        header[entry.key] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": entry.sizes,
            "data_offsets": (at, at + entry.bytes),
        }
        at += entry.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return head, [start + len(head) for start in starts]


def write_entries(writer: BlockWriter, entries: Sequence[Entry], head: bytes) -> None:
    """Write a file with these entries, which have `data`."""
    writer.write(head)
    for entry in entries:
        for part in entry.data() if entry.bytes and entry.data is not None else ():
            writer.write(part)


def bytes_of(memory: Tensor) -> memoryview:
    """Return the bytes of a tensor, row by row; a view if the tensor is contiguous on the CPU."""
    return memory.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
