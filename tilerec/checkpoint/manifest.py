"""The manifest of a checkpoint: its state tree, its tensors with the boxes in each file, and the files' checksums.

    {"crc32": "89abcdef", "manifest": {
        "format": "tilerec checkpoint", "version": 1, "id": "0123456789abcdef",
        "metadata": {...},
        "state": <tree.py>,
        "files": {"rank0-0.safetensors": {"bytes": 4194816, "crc32": "<8 digits for each block>"}},
        "tensors": {"model.table.weight": {"dtype": "F32", "shape": [1000, 64],
                    "chunks": [["rank0-0.safetensors", 512, [0, 0], [1000, 64]]]}}}}

A chunk is a box of a tensor, row by row, at a byte of a file. The manifest is written last: files without one are no
checkpoint. Its own checksum covers the text of "manifest". A reader checks everything that it states before any
memory is taken: names of files, boxes that hold each cell once, and bytes inside of the files.

An incremental checkpoint has a base in the folder beside it. Tensors may lack cells, which the base has:

    "base": {"name": "step-100", "id": "..."}
    "model.table.weight": {..., "chunks": [], "rows": [[["rank0-0.safetensors", 128], ["rank0-0.safetensors", 4096],
                           20, [0, 0], [1000, 64]]]}

This means 20 rows of the box [0:1000, 0:64]: their numbers in the tensor, int64 ascending, and their values, each at a
byte of a file.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from tilerec.checkpoint.blocks import BLOCK
from tilerec.checkpoint.box_cover import Span, hold_each_cell_once, shared_bytes
from tilerec.checkpoint.dtypes import DTYPE_NAMES, DTYPES
from tilerec.checkpoint.pieces import Box
from tilerec.checkpoint.tree import Json
from tilerec.errors import ConfigError, InputError
from tilerec.json_document import MOST_NUMBER, JsonValue, check_version

MANIFEST = "manifest.json"
FORMAT, VERSION = "tilerec checkpoint", 1
MOST_BYTES = 1 << 30
BASE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors")
_MOST_DIMS = 64  # of a tensor of PyTorch
_HEAD = '{"crc32": "%08x", "manifest": '


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor in a file, from byte `start` on."""

    file: str
    start: int
    box: Box


@dataclass(frozen=True)
class RowList:
    """Some rows of a box of a tensor: their numbers in the tensor, int64 ascending, and their values.

    Args:
        numbers, values: file and byte. count: number of rows.
    """

    numbers: tuple[str, int]
    values: tuple[str, int]
    count: int
    box: Box


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint; its chunks hold each cell once, unless a base has the others."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    rows: tuple[RowList, ...] = ()

    @property
    def is_whole(self) -> bool:
        """True if the chunks hold every cell."""
        return sum(chunk.box.cells for chunk in self.chunks) == Box((), self.shape).cells


@dataclass(frozen=True)
class SavedFile:
    """Bytes of a file, and the CRC-32 of each of its blocks."""

    size: int
    crcs: tuple[int, ...]


@dataclass(frozen=True)
class Base:
    """The checkpoint that an incremental one continues: its name in the same folder, and its id."""

    name: str
    id: str


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint.

    Args:
        state: tree of the job's state, for `tree.unflatten`.
        metadata: JSON values by name, of the caller.
        id: random; "" in checkpoints of earlier versions.
        base: None for a whole checkpoint.
        checksum: of the text.
    """

    state: JsonValue
    tensors: Mapping[str, SavedTensor]
    files: Mapping[str, SavedFile]
    metadata: Mapping[str, Json]
    id: str = ""
    base: Base | None = None
    checksum: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of all data files."""
        return sum(file.size for file in self.files.values())


def manifest_text(
    state: Json, tensors: Mapping[str, SavedTensor], files: Mapping[str, SavedFile], metadata: Mapping[str, Json],
    id: str = "", base: Base | None = None,
) -> bytes:  # fmt: skip
    """Return the bytes of a manifest.

    Raises:
        ConfigError: no reader would read it, because it is larger than `MOST_BYTES`.
    """
    inner = {
        "format": FORMAT,
        "version": VERSION,
        "id": id,
        **({} if base is None else {"base": {"name": base.name, "id": base.id}}),
        "metadata": dict(metadata),
        "state": state,
        "files": {
            name: {"bytes": file.size, "crc32": "".join(f"{crc:08x}" for crc in file.crcs)}
            for name, file in files.items()
        },
        "tensors": {
            name: {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": tensor.shape,
                "chunks": [[c.file, c.start, c.box.offsets, c.box.sizes] for c in tensor.chunks],
                **({"rows": [_rows_text(rows) for rows in tensor.rows]} if tensor.rows else {}),
            }
            for name, tensor in tensors.items()
        },
    }
    text = json.dumps(inner).encode()
    if len(text) + len(_HEAD) > MOST_BYTES:
        raise ConfigError(
            f"Checkpoint: got a manifest of {len(text):,} bytes; expected at most {MOST_BYTES:,}. Keep long lists as "
            "tensors."
        )
    return (_HEAD % zlib.crc32(text)).encode() + text + b"}"


def _rows_text(rows: RowList) -> list[Json]:
    return [rows.numbers, rows.values, rows.count, rows.box.offsets, rows.box.sizes]


def parse_manifest(data: bytes, what: str) -> Manifest:
    """Return the manifest of some bytes.

    Args:
        what: the checkpoint, for errors.

    Raises:
        InputError: the bytes are damaged, or state something impossible.
    """
    head = (_HEAD % 0).encode()
    inner = data[len(head) : -1]
    if data[: len(head)] != (_HEAD % zlib.crc32(inner)).encode() or data[-1:] != b"}":
        raise InputError(
            f"{what}: got a {MANIFEST} of {len(data):,} bytes with a wrong checksum; expected an undamaged one. Load "
            "an earlier checkpoint."
        )
    try:
        record = JsonValue.of(json.loads(inner), f"{what}/{MANIFEST}")
        names = ("format", "version", "id", "base", "metadata", "state", "files", "tensors")
        found = record.record(names, ("format", "version"))
        if found["format"].text() != FORMAT:
            raise found["format"].error(FORMAT)
        check_version(found, VERSION, "Load it with a newer tilerec.")
        files = {name: _file(name, value) for name, value in found["files"].members().items()}
        base = _base(found["base"]) if "base" in found else None
        tensors = {name: _tensor(value, files, base) for name, value in found["tensors"].members().items()}
        _check_bytes(found["tensors"], tensors)
        found["state"].record(("dict",), ("dict",))
        metadata = {name: value.value for name, value in found["metadata"].members().items()}
        id = found["id"].text() if "id" in found else ""
        return Manifest(found["state"], tensors, files, metadata, id, base, zlib.crc32(inner))
    except (ValueError, KeyError, RecursionError) as error:
        raise InputError(f"{what}: {error} This is no usable checkpoint: load another one.") from error


def _file(name: str, value: JsonValue) -> SavedFile:
    if not _FILE_NAME.fullmatch(name):
        raise value.error("a file name of letters, digits, _ and -, ending in .safetensors")
    parts = value.record(("bytes", "crc32"), ("bytes", "crc32"))
    size, crcs = parts["bytes"].whole(), parts["crc32"].text()
    if len(crcs) != 8 * -(-size // BLOCK) or re.fullmatch("[0-9a-f]*", crcs) is None:
        raise parts["crc32"].error("8 hexadecimal digits for each block of the file")
    return SavedFile(size, tuple(int(crcs[i : i + 8], 16) for i in range(0, len(crcs), 8)))


def _base(value: JsonValue) -> Base:
    parts = value.record(("name", "id"), ("name", "id"))
    name = parts["name"].text()
    if not BASE_NAME.fullmatch(name):
        raise parts["name"].error("the name of a checkpoint in the same folder")
    return Base(name, parts["id"].text())


def _tensor(value: JsonValue, files: Mapping[str, SavedFile], base: Base | None) -> SavedTensor:
    parts = value.record(("dtype", "shape", "chunks", "rows"), ("dtype", "shape", "chunks"))
    name = parts["dtype"].text()
    if name not in DTYPES:
        raise parts["dtype"].error(f"one of {', '.join(DTYPES)}")
    dtype = DTYPES[name]
    shape = _numbers(parts["shape"])
    if prod(max(1, size) for size in shape) * dtype.itemsize > MOST_NUMBER:
        raise parts["shape"].error("a tensor of less than 2^63 bytes")
    chunks = tuple(_chunk(chunk, shape, dtype, files) for chunk in parts["chunks"].items())
    rows = tuple(_row_list(each, shape, dtype, files) for each in parts["rows"].items()) if "rows" in parts else ()
    if rows and base is None:
        raise parts["rows"].error("no rows, as the checkpoint has no base")
    saved = SavedTensor(dtype, shape, chunks, rows)
    # With a base, boxes need not hold all cells.
    if (base is None or saved.is_whole) and not hold_each_cell_once((chunk.box for chunk in chunks), shape):
        raise parts["chunks"].error("boxes that hold each cell of the tensor once")
    return saved


def _row_list(value: JsonValue, shape: tuple[int, ...], dtype: torch.dtype, files: Mapping[str, SavedFile]) -> RowList:
    parts = value.items()
    if len(parts) != 5 or not shape:
        raise value.error("places of numbers and values, a count, offsets and sizes of a tensor with rows")
    box = Box(_numbers(parts[3]), _numbers(parts[4]))
    count = parts[2].whole()
    if not _is_inside(box, shape) or not 0 < count <= box.sizes[0]:
        raise value.error(f"rows of a box inside of the shape {list(shape)}")
    widths = 8, box.cells // box.sizes[0] * dtype.itemsize
    numbers, values = (_place(part, count * width, files) for part, width in zip(parts[:2], widths, strict=True))
    return RowList(numbers, values, count, box)


def _place(value: JsonValue, size: int, files: Mapping[str, SavedFile]) -> tuple[str, int]:
    parts = value.items()
    if len(parts) != 2:
        raise value.error("a file and a byte")
    file, start = parts[0].text(), parts[1].whole()
    if file not in files or start + size > files[file].size:
        raise value.error("bytes inside of a file of the checkpoint")
    return file, start


def _chunk(value: JsonValue, shape: tuple[int, ...], dtype: torch.dtype, files: Mapping[str, SavedFile]) -> Chunk:
    parts = value.items()
    if len(parts) != 4:
        raise value.error("a file, a byte, offsets and sizes")
    file, start = parts[0].text(), parts[1].whole()
    box = Box(_numbers(parts[2]), _numbers(parts[3]))
    if not _is_inside(box, shape):
        raise value.error(f"a box inside of the shape {list(shape)}")
    if file not in files or start + box.cells * dtype.itemsize > files[file].size:
        raise value.error("bytes inside of a file of the checkpoint")
    return Chunk(file, start, box)


def _is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    return len(box.offsets) == len(box.sizes) == len(shape) and all(
        first + size <= whole for first, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
    )


def _numbers(value: JsonValue) -> tuple[int, ...]:
    numbers = tuple(item.whole() for item in value.items("a list of whole numbers"))
    if len(numbers) > _MOST_DIMS:
        raise value.error(f"at most {_MOST_DIMS} dimensions")
    return numbers


def _check_bytes(record: JsonValue, tensors: Mapping[str, SavedTensor]) -> None:
    """Raise if two boxes share bytes: a small file could then stand for tensors of any size."""
    spans: list[Span] = []
    numbers: set[Span] = set()  # weights and slots share them
    for tensor in tensors.values():
        size = tensor.dtype.itemsize
        spans += [Span(c.file, c.start, c.start + c.box.cells * size) for c in tensor.chunks]
        for rows in tensor.rows:
            (file, start), row = rows.values, rows.box.cells // rows.box.sizes[0] * size
            spans.append(Span(file, start, start + rows.count * row))
            numbers.add(Span(*rows.numbers, rows.numbers[1] + 8 * rows.count))
    shared = shared_bytes([*spans, *numbers])
    if shared is not None:
        raise record.error(f"boxes with bytes of their own, unlike byte {shared.start:,} of {shared.file}")
