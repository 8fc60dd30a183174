"""`.metadata` of a checkpoint of `torch.distributed.checkpoint` (DCP): its tensors and values, and where each lies.

    .metadata       pickle of torch's `Metadata`: for each tensor its dtype, shape and boxes; for each box and value
                    the file, the first byte and the number of bytes
    __0_0.distcp    the boxes and values of a rank, each written by `torch.save`

The pickle is read as data (pickle_data.py). Everything that it states is checked before a byte of a `.distcp` file is
read: boxes hold each cell once, and no box is larger than its bytes in the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from tilerec.checkpoint.box_cover import hold_each_cell_once
from tilerec.checkpoint.dtypes import DTYPE_NAMES
from tilerec.checkpoint.pickle_data import Global, Made, parse_pickle
from tilerec.checkpoint.pieces import Box
from tilerec.errors import InputError

METADATA = ".metadata"
MOST_BYTES = 1 << 28
"""Most bytes of `.metadata`; a box takes about 100."""
MOST_CELLS = 1 << 60
MOST_DIMS = 16

_PLACE = "torch.distributed.checkpoint.metadata."
_STORAGE_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_PATHS = {f"pathlib{module}.{name}" for module in ("", "._local") for name in ("PosixPath", "PurePosixPath", "Path")}
_PATHS |= {f"pathlib{module}.{name}" for module in ("", "._local") for name in ("WindowsPath", "PureWindowsPath")}
_DTYPES = {
    f"torch.{name}": value
    for name, value in ((name, getattr(torch, name)) for name in dir(torch))
    if isinstance(value, torch.dtype)
}
ADMITTED = frozenset(
    {
        *(f"{_PLACE}{name}" for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )),
        _STORAGE_INFO,
        "torch.Size",
        "torch.serialization._get_layout",
        *_DTYPES,
        *_PATHS,
    }
)  # fmt: skip
"""Globals that a `.metadata` file may name. None of them is imported or called."""

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class StoredItem(NamedTuple):
    """Bytes of a file that `torch.save` wrote: a box of a tensor, or a value (box: None)."""

    file: str
    start: int
    size: int
    box: Box | None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a DCP checkpoint; its items hold each cell once. Empty boxes are left out."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    items: tuple[StoredItem, ...]


@dataclass(frozen=True)
class DcpMetadata:
    """Contents of a DCP checkpoint.

    Args:
        tensors, values: by their full names.
        paths: keys that lead to each in the nested state; an int is a place in a list.
    """

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, StoredItem]
    paths: Mapping[str, tuple[str | int, ...]]


def parse_metadata(data: bytes, what: str, sizes: Mapping[str, int]) -> DcpMetadata:
    """Return the contents that a `.metadata` file states.

    Args:
        what: the file, for errors. sizes: bytes of each file of the checkpoint, filled on demand.

    Raises:
        InputError: it is none, or states something impossible.
    """
    return _Reader(what, sizes).metadata(parse_pickle(data, what, ADMITTED))


class _Reader:
    """Checks and converts the records of one file."""

    def __init__(self, what: str, sizes: Mapping[str, int]) -> None:
        self._what, self._sizes = what, sizes

    def metadata(self, root: Any) -> DcpMetadata:
        found = self._state(root, f"{_PLACE}Metadata")
        stored = self._dict(found.get("storage_data"), "storage_data")
        items: dict[tuple[str, tuple[int, ...] | None], Made] = {}
        for index, info in stored.items():
            key = self._state(index, f"{_PLACE}MetadataIndex")
            offset = key.get("offset")
            items[self._name(key.get("fqn")), None if offset is None else self._size(offset)] = info
        tensors: dict[str, StoredTensor] = {}
        values: dict[str, StoredItem] = {}
        for name, record in self._dict(found.get("state_dict_metadata"), "state_dict_metadata").items():
            self._name(name)
            if type(record) is Made and record.kind == f"{_PLACE}BytesStorageMetadata":
                values[name] = self._item(name, items.get((name, None)), None)
            else:
                tensors[name] = self._tensor(name, record, items)
        self._check_bytes([*(item for tensor in tensors.values() for item in tensor.items), *values.values()])
        paths = self._paths(found.get("planner_data"), [*tensors, *values])
        return DcpMetadata(tensors, values, paths)

    def _tensor(self, name: str, record: Any, items: Mapping[Any, Any]) -> StoredTensor:
        found = self._state(record, f"{_PLACE}TensorStorageMetadata")
        properties = self._made(found.get("properties"), f"{_PLACE}TensorProperties").state
        if isinstance(properties, dict):
            properties = (properties.get("dtype"),)
        dtype = properties[0] if isinstance(properties, tuple) and properties else None
        if not isinstance(dtype, Global) or _DTYPES.get(dtype.name) not in DTYPE_NAMES:
            got = dtype.name if isinstance(dtype, Global) else repr(dtype)
            self._refuse(f"{got:.50} of {name!r}", f"a dtype among {', '.join(DTYPE_NAMES.values())}")
        shape = self._size(found.get("size"))
        chunks = found.get("chunks")
        if type(chunks) is not list:
            self._refuse(f"no list of boxes of {name!r}", "its boxes")
        own = []
        for chunk in chunks:
            parts = self._state(chunk, f"{_PLACE}ChunkStorageMetadata")
            box = Box(self._size(parts.get("offsets")), self._size(parts.get("sizes")))
            inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
                first + size <= whole for first, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
            )
            if not inside:
                self._refuse(f"the box {box} of {name!r}", f"a box inside of the shape {list(shape)}")
            if box.cells:
                item = self._item(name, items.get((name, box.offsets)), box)
                if box.cells * _DTYPES[dtype.name].itemsize > item.size:
                    self._refuse(f"{item.size:,} bytes for the box {box} of {name!r}", "the bytes of all its cells")
                own.append(item)
        if not hold_each_cell_once([item.box for item in own if item.box is not None], shape):
            self._refuse(f"boxes of {name!r} with holes or overlaps", "boxes that hold each of its cells once")
        return StoredTensor(_DTYPES[dtype.name], shape, tuple(own))

    def _item(self, name: str, info: Any, box: Box | None) -> StoredItem:
        if info is None:
            self._refuse(f"no place of {name!r}", "the file and bytes of each box")
        found = self._state(info, _STORAGE_INFO)
        file, start, size = (found.get(key) for key in ("relative_path", "offset", "length"))
        if found.get("transform_descriptors"):
            self._refuse(f"transformed bytes of {name!r}", "bytes as torch.save wrote them; save without extensions")
        if type(file) is not str or not _FILE_NAME.fullmatch(file):
            self._refuse(f"the file {file!r:.80} of {name!r}", "the name of a file in the checkpoint's folder")
        if type(start) is not int or type(size) is not int or start < 0 or size < 0:
            self._refuse(f"the bytes {start!r:.30} and {size!r:.30} of {name!r}", "whole numbers")
        if start + size > self._sizes[file]:
            self._refuse(f"{self._sizes[file]:,} bytes in {file}", f"{start + size:,} for {name!r}")
        return StoredItem(file, start, size, box)

    def _check_bytes(self, items: list[StoredItem]) -> None:
        """Raise if items share bytes: a small file could otherwise fill a disk."""
        end: dict[str, int] = {}
        for item in sorted(items, key=lambda item: (item.file, item.start)):
            if item.start < end.get(item.file, 0):
                self._refuse(f"two values that share bytes of {item.file}", "bytes of their own")
            end[item.file] = item.start + item.size

    def _paths(self, given: Any, names: list[str]) -> dict[str, tuple[str | int, ...]]:
        """Return the path of each name; the name itself where the checkpoint was saved without nesting."""
        known = given if type(given) is dict else {}
        paths: dict[str, tuple[str | int, ...]] = {}
        for name in names:
            path = known.get(name, (name,))
            if type(path) is not tuple or not path or any(type(key) not in (str, int) for key in path):
                self._refuse(f"the path {path!r:.80} of {name!r}", "a tuple of keys")
            if any(type(key) is int and not 0 <= key <= len(names) for key in path):
                self._refuse(f"the path {path!r:.80} of {name!r}", "places in lists of its values")
            paths[name] = path
        twice = [path for path, count in Counter(paths.values()).items() if count > 1]
        if twice:
            self._refuse(f"two values at {twice[0]!r:.80}", "one value at each path")
        return paths

    def _size(self, value: Any) -> tuple[int, ...]:
        """Return the numbers of a `torch.Size`."""
        made = self._made(value, "torch.Size")
        items = made.arguments[0] if len(made.arguments) == 1 else ()
        if type(items) not in (tuple, list) or any(type(item) is not int or item < 0 for item in items):
            self._refuse("a torch.Size of something else", "whole numbers")
        cells = Box((), tuple(max(1, item) for item in items[:MOST_DIMS])).cells
        if len(items) > MOST_DIMS or cells > MOST_CELLS:
            self._refuse(f"a size of {len(items)} dimensions", f"at most {MOST_DIMS}, and 2^60 cells")
        return tuple(items)

    def _made(self, value: Any, kind: str) -> Made:
        if type(value) is not Made or value.kind != kind:
            got = value.kind if type(value) is Made else type(value).__name__
            self._refuse(f"a {got}", f"a {kind}")
        return value

    def _state(self, value: Any, kind: str) -> dict[Any, Any]:
        state = self._made(value, kind).state
        return {} if state is None else self._dict(state, kind)

    def _dict(self, value: Any, what: str) -> dict[Any, Any]:
        if type(value) is not dict:
            self._refuse(f"no dict for {what}", "a dict")
        return value

    def _name(self, value: Any) -> str:
        if type(value) is not str or not value:
            self._refuse(f"a name {value!r:.50}", "text")
        return value

    def _refuse(self, got: str, expected: str) -> NoReturn:
        raise InputError(f"{self._what}: got {got}; expected {expected}. Save it again, or import another checkpoint.")
