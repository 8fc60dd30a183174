"""`save`: writes a checkpoint of a whole job, as a whole or not at all.

    state of every part  ->  tree and tensors  ->  boxes, each assigned to one rank that holds it
        ->  a rank's data files  ->  manifest, by rank 0

Ranks write at the same time, each from its own memory, in chunks. Nothing is gathered. Plain tensors are the same on
all ranks; the rank with the fewest bytes writes each.
"""

from __future__ import annotations

import binascii
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tilerec.checkpoint.blocks import BlockWriter
from tilerec.checkpoint.data_file import Entry, starts_of, write_entries
from tilerec.checkpoint.folder import CheckpointFolder, folder_at
from tilerec.checkpoint.job_tables import known_rows
from tilerec.checkpoint.manifest import Base, Chunk, RowList, SavedFile, SavedTensor, manifest_text
from tilerec.checkpoint.parts import ranks_of_job, states_of
from tilerec.checkpoint.pieces import Box, check_tensor
from tilerec.checkpoint.planned_save import (
    Changed,
    PlannedChunk,
    PlannedRows,
    PlannedSave,
    boxes_of_rank,
    offers_of,
)
from tilerec.checkpoint.row_encoding import Form, RowEncoding
from tilerec.checkpoint.tree import Json, flatten
from tilerec.comms.agreement import agreeing, on_all_ranks
from tilerec.comms.group import Group
from tilerec.errors import ConfigError, FileError, TilerecError

FILE_BYTES = 1 << 32  # a rank begins another file above this size


class _Written(NamedTuple):
    """A rank's files, and the boxes and rows in them by tensor."""

    files: dict[str, SavedFile]
    chunks: dict[str, list[Chunk]]
    rows: dict[str, list[RowList]]


class Saved(NamedTuple):
    """A checkpoint that was written: its id, the bytes of its data files, and its tensors."""

    id: str
    bytes: int
    tensors: Mapping[str, Form]


class ChangeNotes(Protocol):
    """Notes what changes in a job between two saves."""

    def begin_anew(
        self, parts: Mapping[str, Any], tensors: Mapping[str, Tensor], boxes: Sequence[tuple[str, Box]], ranks: Group
    ) -> Changed:  # fmt: skip
        """Return what has changed since the last call, and begin anew. It may be collective.

        Args:
            parts: of the job. tensors: of their states, by name. boxes: those that this rank writes.
        """


class Since(NamedTuple):
    """What an incremental save leaves out: rows that have not changed since the base.

    Args:
        changes: of the job since its last save, which the save begins anew.
        base: that save; None: all rows are written.
        tensors: those of the base that the job's tensors were equal to.
    """

    changes: ChangeNotes
    base: Base | None
    tensors: Mapping[str, Form]


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
    plan(path, parts, ranks, metadata or {}, ahead=False).write(ranks)


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


class Planned:
    """A checkpoint to write: what was agreed on while the job stood still. Call `write` or `close`.

    copied_bytes: bytes of the rows that training has copied.
    """

    def __init__(
        self, folder: CheckpointFolder, tree: Json, tensors: Mapping[str, Tensor], files: PlannedSave, nonce: str,
        metadata: Mapping[str, Json], base: Base | None, encodings: Mapping[str, RowEncoding],
    ) -> None:  # fmt: skip
        self._folder, self._tree, self._files = folder, tree, files
        self._tensors = {
            name: encodings[name].form((tensor.dtype, tuple(tensor.shape)))
            if name in encodings
            else (tensor.dtype, tuple(tensor.shape))
            for name, tensor in tensors.items()
        }
        self._nonce, self._metadata, self._base = nonce, metadata, base
        self.copied_bytes = 0

    @torch.no_grad()
    def write(self, ranks: Group, metadata: Mapping[str, Json] | None = None) -> Saved:
        """Write it. Collective. Raises as `save`.

        Args:
            metadata: further values for the manifest, which are known by now.
        """
        folder = self._folder
        self._metadata = {**self._metadata, **(metadata or {})}
        try:
            with on_all_ranks(ranks, "the checkpoint", "its folder"), file_errors(folder):
                folder.begin(self._nonce, first=ranks.rank == 0)
            with on_all_ranks(ranks, "the checkpoint", "its files"), file_errors(folder):
                written = self._write(ranks.rank)
                self._files.check()
            every: Sequence[Any] = ranks.all_gather_object(written)
            with on_all_ranks(ranks, "the checkpoint", "its manifest"), file_errors(folder):
                if ranks.rank == 0:
                    self._commit(every)
        except BaseException:
            folder.abandon()
            raise
        finally:
            self.close()
        return Saved(self._nonce, sum(file.size for one in every for file in one.files.values()), self._tensors)

    def close(self) -> None:
        """End the observation of tables, and free the copies."""
        self.copied_bytes += self._files.copied_bytes
        self._files.close()

    def _write(self, rank: int) -> _Written:
        """Write this rank's files."""
        written, places = _Written({}, {}, {}), {}
        for i, part in enumerate(_files_of(self._files.entries)):
            name = self._folder.file_name(f"rank{rank}-{i}.safetensors")
            head, starts = starts_of(part)
            with self._folder.create(name) as file, BlockWriter(file) as writer:
                write_entries(writer, part, head)
            written.files[name] = SavedFile(writer.size, tuple(writer.crcs))
            places.update({entry.key: (name, start) for entry, start in zip(part, starts, strict=True)})
        for own in self._files.own:
            if isinstance(own, PlannedChunk):
                chunk = Chunk(*places[own.entry.key], own.box)
                written.chunks.setdefault(own.name, []).append(chunk)
            else:
                written.rows.setdefault(own.name, []).append(_row_list(own, places))
        return written

    def _commit(self, every: Sequence[_Written]) -> None:
        """Write the manifest, once the files of all ranks are seen here."""
        files = {name: file for written in every for name, file in written.files.items()}
        for name, file in files.items():
            _check_size(self._folder, name, file.size)
        saved = {
            name: SavedTensor(
                dtype,
                shape,
                tuple(chunk for written in every for chunk in written.chunks.get(name, ())),
                tuple(rows for written in every for rows in written.rows.get(name, ())),
            )
            for name, (dtype, shape) in self._tensors.items()
        }
        metadata = {**self._metadata, "versions": versions()}
        self._folder.commit(manifest_text(self._tree, saved, files, metadata, self._nonce, self._base))


@torch.no_grad()
def plan(
    path: str | Path, parts: Mapping[str, Any], ranks: Group, metadata: Mapping[str, Json], *, ahead: bool,
    since: Since | None = None, encodings: Mapping[str, RowEncoding] | None = None,
) -> Planned:  # fmt: skip
    """Return a checkpoint to write. Collective.

    Args:
        ahead: True if it is written while the state changes.
        since: for an incremental save.
        encodings: of tensors whose rows are saved in another form, by name.
    """
    with agreeing(ranks, "the checkpoint's state") as found:
        folder = folder_at(path)
        metadata = json.loads(json.dumps(metadata))  # a copy, as the caller may go on changing it
        tree, tensors = flatten(states_of(parts))
        for name, tensor in tensors.items():
            check_tensor(name, tensor)
        found["tree"] = tree
        found["tensors"] = {name: [str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()}
        offers = offers_of(tensors)
    boxes = boxes_of_rank(tensors, offers, ranks)
    nonce = str(ranks.all_gather_object(binascii.hexlify(os.urandom(8)).decode())[0])
    base = None if since is None else since.base
    files: PlannedSave | None = None
    try:
        if since is None:
            changed = Changed(list(known_rows(parts)), {}, {})
        else:
            changed = since.changes.begin_anew(parts, tensors, boxes, ranks)
        with on_all_ranks(ranks, "the checkpoint", "its plan"):
            in_base = since.tensors if since is not None and base is not None else {}
            files = PlannedSave(tensors, boxes, changed, in_base, ahead=ahead, encodings=encodings)
    except BaseException:
        if files is not None:  # another rank failed
            files.close()
        raise
    return Planned(folder, tree, tensors, files, nonce, metadata, base, encodings or {})


def _row_list(own: PlannedRows, places: Mapping[str, tuple[str, int]]) -> RowList:
    return RowList(places[own.numbers.key], places[own.values.key], own.values.sizes[0], own.box)


def _files_of(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Return the entries of each file."""
    files: list[list[Entry]] = []
    size = 0
    for entry in entries:
        if not files or size + entry.bytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(entry)
        size += entry.bytes
    return files


def _check_size(folder: CheckpointFolder, name: str, expected: int) -> None:
    """Raise `ConfigError` if rank 0 does not see a rank's file."""
    try:
        size = folder.size(name)
    except OSError as error:
        raise ConfigError(
            f"Checkpoint {folder.path}: got no file {name} on rank 0; expected a folder that all ranks share. Choose "
            "such a path."
        ) from error
    if size != expected:
        raise ConfigError(
            f"Checkpoint {folder.path}: got {size:,} bytes in {name} on rank 0; expected {expected:,}. Choose a folder "
            "that all ranks share."
        )


def versions() -> dict[str, str]:
    """Return the versions of the software that writes a checkpoint."""
    own = next((found.version for found in distributions(name="tilerec")), "unknown")
    return {"tilerec": own, "torch": str(torch.__version__), "python": platform.python_version()}
