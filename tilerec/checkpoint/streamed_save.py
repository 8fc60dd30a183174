"""`save_streamed`: writes a checkpoint whose tensors are read box by box, from a checkpoint of another format.

    boxes of each tensor  ->  chunks of at most 64 MB  ->  one data file after the other  ->  manifest

One process writes all. One box is in memory at a time, so its size bounds the memory.
"""

from __future__ import annotations

import binascii
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.checkpoint.blocks import BlockWriter
from tilerec.checkpoint.data_file import Entry, bytes_of, chunks_of, key_of, starts_of
from tilerec.checkpoint.folder import CheckpointFolder, folder_at
from tilerec.checkpoint.manifest import Chunk, SavedFile, SavedTensor, manifest_text
from tilerec.checkpoint.pieces import Box
from tilerec.checkpoint.saving import FILE_BYTES, file_errors, versions
from tilerec.checkpoint.tree import Json


class StreamedBox(NamedTuple):
    """A box of a tensor, and a function that returns its values on the CPU."""

    box: Box
    read: Callable[[], Tensor]


class StreamedTensor(NamedTuple):
    """A tensor of logical shape; its boxes hold each cell once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[StreamedBox, ...]


class _Planned(NamedTuple):
    """A chunk of a tensor, and the box that it is cut from."""

    name: str
    chunk: Box
    entry: Entry
    source: StreamedBox


def save_streamed(
    path: str | Path, state: Json, tensors: Mapping[str, StreamedTensor], metadata: Mapping[str, Json]
) -> None:
    """Write a checkpoint, as a whole or not at all.

    Args:
        path: of the checkpoint, which must not exist: a folder, or a URL of fsspec.
        state: its tree (tree.py). tensors: those of the tree, by name. metadata: JSON values by name.

    Raises:
        FileError: the checkpoint exists, or cannot be written. No part of it remains.
    """
    folder, nonce = folder_at(path), binascii.hexlify(os.urandom(8)).decode()
    try:
        with file_errors(folder):
            folder.begin(nonce, first=True)
        files, saved = write_streamed(folder, tensors, folder.file_name("rank0"))
        with file_errors(folder):
            text = manifest_text(state, saved, files, {**metadata, "versions": versions()}, nonce)
            folder.commit(text)
    except BaseException:
        folder.abandon()
        raise


def write_streamed(
    folder: CheckpointFolder, tensors: Mapping[str, StreamedTensor], prefix: str
) -> tuple[dict[str, SavedFile], dict[str, SavedTensor]]:
    """Write the data files `<prefix>-0.safetensors` and so on; return them, and the places of the tensors.

    Raises:
        FileError: a file cannot be written.
    """
    files: dict[str, SavedFile] = {}
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    for i, planned in enumerate(_files(tensors)):
        name = f"{prefix}-{i}.safetensors"
        with file_errors(folder):
            files[name] = _write(folder, name, planned, chunks)
    return files, {name: SavedTensor(t.dtype, t.shape, tuple(chunks[name])) for name, t in tensors.items()}


def _files(tensors: Mapping[str, StreamedTensor]) -> Iterator[list[_Planned]]:
    """Yield the chunks of each file. The bytes of each chunk begin at a multiple of its dtype's size."""
    part: list[_Planned] = []
    size = 0
    for name, tensor in sorted(tensors.items(), key=lambda pair: -pair[1].dtype.itemsize):
        for source in tensor.boxes:
            for chunk in chunks_of(source.box, tensor.dtype):
                entry = Entry(key_of(name, tensor.shape, chunk), tensor.dtype, chunk.sizes)
                if part and size + entry.bytes > FILE_BYTES:
                    yield part
                    part, size = [], 0
                part.append(_Planned(name, chunk, entry, source))
                size += entry.bytes
    if part:
        yield part


def _write(folder: CheckpointFolder, name: str, planned: list[_Planned], chunks: dict[str, list[Chunk]]) -> SavedFile:
    """Write one data file, and add its chunks."""
    head, starts = starts_of([each.entry for each in planned])
    held: tuple[StreamedBox, Tensor] | None = None
    with folder.create(name) as file, BlockWriter(file) as writer:
        writer.write(head)
        for (tensor, chunk, _, source), start in zip(planned, starts, strict=True):
            if held is None or held[0] is not source:
                held = None  # frees the memory of the box before
                held = source, source.read()
            writer.write(bytes_of(source.box.within(held[1], chunk)))
            chunks[tensor].append(Chunk(name, start, chunk))
    return SavedFile(writer.size, tuple(writer.crcs))
