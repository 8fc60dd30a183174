"""Files in memory: a state that a process leaves to the one that takes its place on the same machine.

A file is a safetensors file (`data_file.py`): the tensors of a state, and its tree as bytes. It is mapped, not read:
the reader's changes stay its own, and cost memory only for the pages that they touch.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tilerec.atomic_file import open_replacement
from tilerec.checkpoint.data_file import Entry, bytes_of, chunks_of, starts_of
from tilerec.checkpoint.dtypes import DTYPES
from tilerec.checkpoint.pieces import Box
from tilerec.checkpoint.tree import flatten, unflatten
from tilerec.json_document import JsonValue

_TREE = "tree of the state"


def memory_folder() -> str:
    """Make a folder for files in memory and return its path; on systems without such folders it is on disk."""
    shared = Path("/dev/shm")
    return tempfile.mkdtemp(prefix="tilerec-", dir=shared if os.access(shared, os.W_OK) else None)


def bytes_in(folder: str) -> int:
    """Return the bytes of all files in a folder, those that are being written included."""
    size = 0
    with os.scandir(folder) as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # it has its final name by now
                size += file.stat().st_size
    return size


@torch.no_grad()
def write_memory(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state to a file, which appears as a whole or not at all. Raises FileError."""
    tree, tensors = flatten(state)
    tensors[_TREE] = torch.frombuffer(bytearray(json.dumps(tree).encode()), dtype=torch.uint8)
    # In this order, each tensor begins at a multiple of its item size.
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    head, _ = starts_of([Entry(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in names])
    with open_replacement(path, "Memory") as file:
        file.write(head)
        for name in names:
            _write(file, tensors[name])


def _write(file: BinaryIO, tensor: Tensor) -> None:
    """Write the bytes of a tensor in parts, so copies from a device take little memory."""
    whole = Box((0,) * tensor.dim(), tuple(tensor.shape))
    for box in chunks_of(whole, tensor.dtype) if tensor.numel() else ():
        file.write(bytes_of(whole.within(tensor, box)))


def read_memory(path: Path) -> dict[str, Any]:
    """Return the state of a file; its tensors lie in the mapped file. Raises OSError."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    start = 8 + size
    memory = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)

    def tensor_of(name: str, place: JsonValue | None = None) -> Tensor:
        entry = header[name]
        low, high = entry["data_offsets"]
        return memory[start + low : start + high].view(DTYPES[entry["dtype"]]).view(entry["shape"])

    tree = json.loads(bytes(tensor_of(_TREE).numpy()))
    found: dict[str, Any] = unflatten(JsonValue.of(tree, f"Memory {path}"), tensor_of)
    return found
