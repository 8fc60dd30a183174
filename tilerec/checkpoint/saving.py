"""`save`: writes a checkpoint of a whole job, as a whole or not at all.

    state of every part  ->  tree and tensors  ->  boxes, each assigned to one rank that holds it
        ->  a rank's data files  ->  manifest, by rank 0

Ranks write at the same time, each from its own memory, in chunks. Nothing is gathered. Plain tensors are the same on
all ranks; the rank with the fewest bytes writes each.
"""

from __future__ import annotations

import binascii
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilerec.checkpoint.blocks import BlockWriter
from tilerec.checkpoint.data_file import PlannedChunk, chunks_of, starts_of, write_chunks
from tilerec.checkpoint.folder import CheckpointFolder, folder_at
from tilerec.checkpoint.manifest import Chunk, SavedFile, SavedTensor, manifest_text
from tilerec.checkpoint.parts import ranks_of_job, states_of
from tilerec.checkpoint.pieces import Box, check_tensor, is_spread, pieces_of, written_boxes
from tilerec.checkpoint.tree import Json, flatten
from tilerec.comms.agreement import agreeing, on_all_ranks
from tilerec.comms.group import Group
from tilerec.errors import ConfigError, FileError, TilerecError

FILE_BYTES = 1 << 32  # a rank begins another file above this size


class _Written(NamedTuple):
    """A rank's files, and the boxes in them by tensor."""

    files: dict[str, SavedFile]
    chunks: dict[str, list[Chunk]]


@torch.no_grad()
def save(
    path: str | Path,
    parts: Mapping[str, Any],
    *,
    group: Group | dist.ProcessGroup | None = None,
    metadata: Mapping[str, Json] | None = None,
) -> None:
    """Write a checkpoint. Collective: all ranks call it with the same parts.

        save("run/step-100", {"model": model, "optimizer": optimizer, "position": {"epoch": 1, "samples": 4096}})

    Args:
        path: of the checkpoint, which must not exist: a folder that all ranks see, or a URL of fsspec.
        parts: by name: objects with `state_dict` and `load_state_dict`, or values. States consist of tensors, numbers,
            strings, None, lists, tuples and dicts. All but spread tensors must be the same on all ranks.
        group: the ranks; None for those of the default process group, or for this process alone.
        metadata: JSON values by name, kept in the manifest.

    Raises:
        FileError: the checkpoint exists, or cannot be written; on the ranks that fail, `ConfigError` on the others. No
            part of it remains.
        ConfigError: a state holds something that a checkpoint cannot, or states differ between ranks.
    """
    ranks = ranks_of_job(group)
    with agreeing(ranks, "the checkpoint's state") as found:
        tree, tensors = flatten(states_of(parts))
        for name, tensor in tensors.items():
            check_tensor(name, tensor)
        found["tree"] = tree
        found["tensors"] = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}
    folder = folder_at(path)
    chunks = _chunks_of_rank(tensors, ranks)
    nonce = str(ranks.all_gather_object(binascii.hexlify(os.urandom(8)).decode())[0])
    try:
        with on_all_ranks(ranks, "the checkpoint", "its folder"), file_errors(folder):
            folder.begin(nonce, first=ranks.rank == 0)
        with on_all_ranks(ranks, "the checkpoint", "its files"), file_errors(folder):
            written = _write(folder, chunks, ranks.rank)
        every = ranks.all_gather_object(written)
        with on_all_ranks(ranks, "the checkpoint", "its manifest"), file_errors(folder):
            if ranks.rank == 0:
                _commit(folder, tree, tensors, every, dict(metadata or {}))
    except BaseException:
        folder.abandon()
        raise


@contextmanager
def file_errors(folder: CheckpointFolder) -> Iterator[None]:
    """Raise `FileError` for an `OSError` of the block."""
    try:
        yield
    except TilerecError:
        raise
    except OSError as error:
        move = "Free space, or choose another path; earlier checkpoints are unchanged."
        if isinstance(error, FileExistsError):
            move = "Choose another path, or remove it."
        raise FileError(
            f"Checkpoint {folder.path}: got '{error.strerror or error}'; expected a new folder that can be written. "
            f"{move}",
            error.errno,
        ) from error


def _chunks_of_rank(tensors: Mapping[str, Tensor], ranks: Group) -> list[PlannedChunk]:
    """Return the chunks that this rank writes. Collective."""
    spread = {name: tensor for name, tensor in tensors.items() if is_spread(tensor)}
    offers: Sequence[Any] = ranks.all_gather_object({name: written_boxes(name, t) for name, t in spread.items()})
    loads = [0] * ranks.size
    own: list[PlannedChunk] = []

    def assign(name: str, box: Box, holders: Sequence[int]) -> None:
        tensor = tensors[name]
        rank = min(holders, key=lambda rank: (loads[rank], rank))
        loads[rank] += box.cells * tensor.dtype.itemsize
        if rank == ranks.rank:
            memory = next(piece.memory for piece in pieces_of(name, tensor) if piece.box == box)
            own.extend(chunks_of(name, tuple(tensor.shape), box, memory))

    for name in spread:
        holders: dict[Box, list[int]] = {}
        for rank, offered in enumerate(offers):
            for box in offered[name]:
                holders.setdefault(Box(*box), []).append(rank)
        for box, some in sorted(holders.items()):
            assign(name, box, some)
    plain = (name for name in tensors if name not in spread)
    for name in sorted(plain, key=lambda name: (-tensors[name].nbytes, name)):
        for box in written_boxes(name, tensors[name]):
            assign(name, box, range(ranks.size))
    # The bytes of each chunk then begin at a multiple of its dtype's size.
    return sorted(own, key=lambda chunk: -chunk.memory.dtype.itemsize)


def _write(folder: CheckpointFolder, chunks: Sequence[PlannedChunk], rank: int) -> _Written:
    """Write this rank's files."""
    written = _Written({}, {})
    for i, part in enumerate(_files_of(chunks)):
        name = folder.file_name(f"rank{rank}-{i}.safetensors")
        head, starts = starts_of(part)
        with folder.create(name) as file, BlockWriter(file) as writer:
            write_chunks(writer, part, head)
        written.files[name] = SavedFile(writer.size, tuple(writer.crcs))
        for chunk, start in zip(part, starts, strict=True):
            written.chunks.setdefault(chunk.name, []).append(Chunk(name, start, chunk.box))
    return written


def _files_of(chunks: Sequence[PlannedChunk]) -> list[list[PlannedChunk]]:
    """Return the chunks of each file."""
    files: list[list[PlannedChunk]] = []
    size = FILE_BYTES
    for chunk in chunks:
        if size + chunk.bytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(chunk)
        size += chunk.bytes
    return files


def _commit(
    folder: CheckpointFolder,
    tree: Json,
    tensors: Mapping[str, Tensor],
    every: Sequence[Any],
    metadata: dict[str, Json],
) -> None:
    """Write the manifest, once the files of all ranks are seen here."""
    files = {name: file for written in every for name, file in written.files.items()}
    for name, file in files.items():
        try:
            size = folder.size(name)
        except OSError as error:
            raise ConfigError(
                f"Checkpoint {folder.path}: got no file {name} on rank 0; expected a folder that all ranks share. "
                "Choose such a path."
            ) from error
        if size != file.size:
            raise ConfigError(
                f"Checkpoint {folder.path}: got {size:,} bytes in {name} on rank 0; expected {file.size:,}. Choose a "
                "folder that all ranks share."
            )
    saved = {
        name: SavedTensor(
            tensor.dtype,
            tuple(tensor.shape),
            tuple(chunk for written in every for chunk in written.chunks.get(name, ())),
        )
        for name, tensor in tensors.items()
    }
    folder.commit(manifest_text(tree, saved, files, {**metadata, "versions": versions()}))


def versions() -> dict[str, str]:
    """Return the versions of the software that writes a checkpoint."""
    own = next((found.version for found in distributions(name="tilerec")), "unknown")
    return {"tilerec": own, "torch": str(torch.__version__), "python": platform.python_version()}
