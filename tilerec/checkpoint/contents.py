"""Contents of a checkpoint, read in bounded memory: damage, digests, differences, and one file for other programs.

A digest does not depend on how a tensor is cut: with c_i the bits of cell i in row-major order,

    digest = sum over i of odd(i) * (c_i + 1)  mod 2^64        odd(i): splitmix64 of i, made odd
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilerec.atomic_file import open_replacement
from tilerec.checkpoint.blocks import BLOCK, BlockReader, Part
from tilerec.checkpoint.chain import Wanted, open_chain, unreadable
from tilerec.checkpoint.data_file import Entry, bytes_of, starts_of
from tilerec.checkpoint.dtypes import DTYPE_NAMES
from tilerec.checkpoint.folder import folder_at
from tilerec.checkpoint.manifest import Manifest
from tilerec.checkpoint.pieces import Box, Piece
from tilerec.errors import InputError
from tilerec.file_kind import CHECKPOINT_EXPORT, check_kind

PART_BYTES = 1 << 24  # bytes of a tensor in memory at a time
Words = npt.NDArray[np.uint64]


class SavedContents:
    """A checkpoint on disk. path: as given. chain: the checkpoint and its bases. manifest: its own.

    Raises:
        FileError, InputError: it is no complete checkpoint.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.chain = open_chain(folder_at(path))
        self.manifest: Manifest = self.chain.manifest

    @property
    def bytes(self) -> int:
        """Bytes of its own data files."""
        return self.manifest.bytes

    def verify(self, *, bases: bool = True) -> int:
        """Read every byte of it and of its bases, and compare the checksums; return the number of bytes.

        Args:
            bases: False leaves its bases out.

        Raises:
            InputError: bytes are damaged. FileError: a file cannot be read.
        """
        total = 0
        for folder, manifest in self.chain.links if bases else self.chain.links[:1]:
            for name, file in manifest.files.items():
                path = f"{folder.path}/{name}"
                try:
                    with folder.open(name) as opened, BlockReader(opened, path, file.size, file.crcs) as reader:
                        reader.read(
                            Part(first, memoryview(bytearray(min(BLOCK, file.size - first))))
                            for first in range(0, file.size, BLOCK)
                        )
                except OSError as error:
                    raise unreadable(folder, error, name) from error
                total += file.size
        return total

    def parts_of(self, name: str) -> Iterator[tuple[Box, Tensor]]:
        """Yield a tensor in boxes of whole rows of at most `PART_BYTES`, in order, with their values."""
        saved = self.manifest.tensors[name]
        rows = saved.shape[0] if saved.shape else 1
        cells = Box((), saved.shape).cells
        step = max(1, PART_BYTES // max(1, cells // max(1, rows) * saved.dtype.itemsize))
        if not saved.shape or not cells:
            yield self._box(name, Box((0,) * len(saved.shape), saved.shape))
            return
        for first in range(0, rows, step):
            sizes = (min(step, rows - first), *saved.shape[1:])
            yield self._box(name, Box((first, *(0,) * (len(sizes) - 1)), sizes))

    def box_of(self, name: str, box: Box) -> Tensor:
        """Return the values of one box of a tensor."""
        return self._box(name, box)[1]

    def _box(self, name: str, box: Box) -> tuple[Box, Tensor]:
        out = torch.empty(box.sizes, dtype=self.manifest.tensors[name].dtype)
        if box.cells:
            try:
                self.chain.read([Wanted(Piece(box, out), name)])
            except OSError as error:
                raise unreadable(self.chain.links[0].folder, error) from error
        return box, out

    def tensor_digest(self, name: str) -> str:
        """Return 16 hexadecimal digits of a tensor's dtype, shape and values."""
        saved, total, first = self.manifest.tensors[name], 0, 0
        for _, values in self.parts_of(name):
            total += _digest(_bits(values), first)
            first += values.numel()
        text = f"{DTYPE_NAMES[saved.dtype]} {list(saved.shape)} {total % 2**64:016x}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def digest(self) -> str:
        """Return 16 hexadecimal digits of the whole state; equal for equal states under any plan and world size."""
        lines = [f"{name} {self.tensor_digest(name)}" for name in sorted(self.manifest.tensors)]
        text = "\n".join([*lines, json.dumps(self.manifest.state.value, sort_keys=True)])
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def export(self, path: str | Path, names: Sequence[str]) -> None:
        """Write whole tensors under their names to one safetensors file, as a whole or not at all.

        Args:
            path: the file; it replaces an earlier one of this function, and no other file.

        Raises:
            InputError: a name is unknown, or bytes are damaged. FileError: the file cannot be written.
            ConfigError: another file is there.
        """
        check_kind("--out", path, CHECKPOINT_EXPORT)
        unknown = [name for name in names if name not in self.manifest.tensors]
        if unknown:
            raise InputError(
                f"Checkpoint {self.path}: got the name {unknown[0]!r}; expected the name of one of its tensors. List "
                "them with tilerec checkpoint inspect."
            )
        order = sorted(names, key=lambda name: -self.manifest.tensors[name].dtype.itemsize)
        tensors = self.manifest.tensors
        entries = [Entry(name, tensors[name].dtype, tensors[name].shape) for name in order]
        head, _ = starts_of(entries, {"tilerec": CHECKPOINT_EXPORT.command})
        with open_replacement(path, "Export") as file:
            file.write(head)
            for name in order:
                for _, values in self.parts_of(name):
                    if values.numel():
                        file.write(bytes_of(values))


def _bits(values: Tensor) -> Words:
    """Return the cells' bits as uint64 [N]."""
    size = values.dtype.itemsize
    raw = values.contiguous().reshape(-1).view(torch.uint8).numpy().view(f"<u{size}")
    return raw.astype(np.uint64)


def _digest(bits: Words, first: int) -> int:
    """Return the sum of the digest for cells from number `first` on."""
    total = 0
    for low in range(0, len(bits), 1 << 18):
        part = bits[low : low + (1 << 18)]
        mixed = np.arange(first + low, first + low + len(part), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed ^= mixed >> np.uint64(shift)
            mixed *= np.uint64(factor)
        mixed |= np.uint64(1)
        total += int((mixed * (part + np.uint64(1))).sum(dtype=np.uint64))
    return total % 2**64


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor differs between two checkpoints.

    Args:
        name: of the tensor. what: "only in the first", "only in the second", "shape", "dtype" or "values".
        cells: number of different cells, if only values differ. largest: largest absolute difference of numbers.
        text: shapes or dtypes, for people.
    """

    name: str
    what: str
    cells: int = 0
    largest: float = 0.0
    text: str = ""


def differences(first: SavedContents, second: SavedContents) -> Iterator[TensorDifference]:
    """Yield the tensors that differ, by name. NaN cells with equal bits are equal."""
    one, two = first.manifest.tensors, second.manifest.tensors
    for name in sorted({*one, *two}):
        if name not in two:
            yield TensorDifference(name, "only in the first")
        elif name not in one:
            yield TensorDifference(name, "only in the second")
        elif one[name].shape != two[name].shape:
            yield TensorDifference(name, "shape", text=f"{list(one[name].shape)} and {list(two[name].shape)}")
        elif one[name].dtype != two[name].dtype:
            yield TensorDifference(name, "dtype", text=f"{one[name].dtype} and {two[name].dtype}")
        else:
            cells, largest = 0, 0.0
            for (_, a), (_, b) in zip(first.parts_of(name), second.parts_of(name), strict=True):
                unequal = torch.from_numpy(_bits(a) != _bits(b))
                if count := int(unequal.sum()):
                    cells += count
                    gap = (a.reshape(-1)[unequal].double() - b.reshape(-1)[unequal].double()).abs().max()
                    largest = max(largest, float(gap))
            if cells:
                yield TensorDifference(name, "values", cells, largest)


def value_differences(first: SavedContents, second: SavedContents) -> list[str]:
    """Return lines `path: value and value` for the numbers and texts of the state that differ."""
    one, two = dict(leaves("", first.manifest.state.value)), dict(leaves("", second.manifest.state.value))
    lines = []
    for path in sorted({*one, *two}):
        a, b = (json.dumps(side[path]) if path in side else "nothing" for side in (one, two))
        if a != b:
            lines.append(f"{path}: {a:.60} and {b:.60}")
    return lines


def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and texts of a state tree (tree.py), each with its path; tensors are left out."""
    if isinstance(value, dict) and "tensor" not in value:
        ((kind, inner),) = value.items()
        if kind == "dict":
            for key, item in inner.items():
                yield from leaves(f"{path}.{key}" if path else key, item)
        elif kind == "pairs":
            for key, item in inner:
                yield from leaves(f"{path}.{key}", item)
        elif kind == "tuple":
            yield from leaves(path, inner)
        else:
            yield path, inner
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from leaves(f"{path}.{i}", item)
    elif not isinstance(value, dict):
        yield path, value
