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
from tilerec.checkpoint.data_file import PlannedChunk, bytes_of, chunks_of, starts_of
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
    """A chunk, and the box that it is cut from."""

    chunk: PlannedChunk
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
    folder = folder_at(path)
    try:
        with file_errors(folder):
            folder.begin(binascii.hexlify(os.urandom(8)).decode(), first=True)
        files: dict[str, SavedFile] = {}
        chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
        for i, planned in enumerate(_files(tensors)):
            name = folder.file_name(f"rank0-{i}.safetensors")
            with file_errors(folder):
                files[name] = _write(folder, name, planned, chunks)
        saved = {name: SavedTensor(t.dtype, t.shape, tuple(chunks[name])) for name, t in tensors.items()}
        with file_errors(folder):
            folder.commit(manifest_text(state, saved, files, {**metadata, "versions": versions()}))
    except BaseException:
        folder.abandon()
        raise


def _files(tensors: Mapping[str, StreamedTensor]) -> Iterator[list[_Planned]]:
    """Yield the chunks of each file. The bytes of each chunk begin at a multiple of its dtype's size."""
    part: list[_Planned] = []
    size = 0
    for name, tensor in sorted(tensors.items(), key=lambda pair: -pair[1].dtype.itemsize):
        for source in tensor.boxes:
            like = torch.empty(source.box.sizes, dtype=tensor.dtype, device="meta")
            for chunk in chunks_of(name, tensor.shape, source.box, like):
                if part and size + chunk.bytes > FILE_BYTES:
                    yield part
                    part, size = [], 0
                part.append(_Planned(chunk, source))
                size += chunk.bytes
    if part:
        yield part


def _write(folder: CheckpointFolder, name: str, planned: list[_Planned], chunks: dict[str, list[Chunk]]) -> SavedFile:
    """Write one data file, and add its chunks."""
    head, starts = starts_of([chunk for chunk, _ in planned])
    held: tuple[StreamedBox, Tensor] | None = None
    with folder.create(name) as file, BlockWriter(file) as writer:
        writer.write(head)
        for (chunk, source), start in zip(planned, starts, strict=True):
            if held is None or held[0] is not source:
                held = None  # frees the memory of the box before
                held = source, source.read()
            writer.write(bytes_of(source.box.within(held[1], chunk.box)))
            chunks[chunk.name].append(Chunk(name, start, chunk.box))
    return SavedFile(writer.size, tuple(writer.crcs))
