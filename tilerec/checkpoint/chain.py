"""`Chain`: a checkpoint on disk with the checkpoints that it continues, opened for reading.

    step-300  ->  step-200  ->  step-100        each has the rows that changed since the next; the last has everything

A checkpoint without a base is a chain of one link. A chain that lacks a link, or has another one in its place, is not
opened: an earlier checkpoint is whole still.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tilerec.checkpoint.changes import CHANGES_KEY
from tilerec.checkpoint.folder import CheckpointFolder
from tilerec.checkpoint.manifest import MANIFEST, Manifest, SavedTensor, parse_manifest
from tilerec.checkpoint.pieces import Box, Piece
from tilerec.checkpoint.read_boxes import Target, read_boxes
from tilerec.checkpoint.read_rows import RowTarget, read_rows
from tilerec.checkpoint.row_numbers import RowNumbers
from tilerec.checkpoint.scratch_memory import DEFAULT_BUDGET, ScratchMemory
from tilerec.checkpoint.tree import Json
from tilerec.errors import FileError, InputError
from tilerec.json_document import JsonValue

MOST_LINKS = 10_000


class Link(NamedTuple):
    """A checkpoint of a chain."""

    folder: CheckpointFolder
    manifest: Manifest


class Wanted(NamedTuple):
    """A piece to fill with the cells of a tensor that have the same place."""

    piece: Piece
    name: str


class Chain:
    """A checkpoint and its bases.

    Args:
        links: the checkpoint, its base, and so on.
        scratch: memory that `read` may take beside the pieces.
    """

    def __init__(self, links: Sequence[Link], scratch: ScratchMemory) -> None:
        self.links = tuple(links)
        self._scratch = scratch
        self._numbers = RowNumbers(scratch.numbers)

    @property
    def path(self) -> str:
        return self.links[0].folder.path

    @property
    def manifest(self) -> Manifest:
        """The manifest of the newest link: state, names, dtypes and shapes of the whole chain."""
        return self.links[0].manifest

    @property
    def tensors(self) -> Mapping[str, SavedTensor]:
        """The tensors by name; cells that they lack are in later links."""
        return self.manifest.tensors

    @property
    def state(self) -> JsonValue:
        """The state tree (tree.py)."""
        return self.manifest.state

    @property
    def changes(self) -> Json:
        """The note of the changes that the job had made; see `Changes.note`."""
        return self.manifest.metadata.get(CHANGES_KEY)

    def layers(self, name: str) -> list[tuple[Link, SavedTensor]]:
        """Return the links that hold cells of a tensor, oldest first; the first has all cells."""
        found: list[tuple[Link, SavedTensor]] = []
        for link in self.links:
            found.insert(0, (link, link.manifest.tensors[name]))
            if found[0][1].is_whole:
                break
        return found

    def boxes(self, name: str) -> list[Box]:
        """Return boxes that hold each cell of a tensor once."""
        return [chunk.box for chunk in self.layers(name)[0][1].chunks]

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Fill the pieces.

        Raises:
            InputError: a file is damaged. OSError: a file cannot be read.
        """
        boxes: dict[int, list[Target]] = {}
        rows: dict[int, list[RowTarget]] = {}
        for piece, name in wanted:
            for link, saved in self.layers(name):
                boxes.setdefault(id(link), []).append(Target(piece, saved))
                rows.setdefault(id(link), []).extend(RowTarget(piece, each) for each in saved.rows)
        for link in reversed(self.links):
            read_boxes(link.folder, link.manifest, boxes.get(id(link), []), self._scratch)
            read_rows(link.folder, link.manifest, rows.get(id(link), []), self._numbers, self._scratch.buffer)


def open_chain(
    folder: CheckpointFolder, known: dict[str, Manifest] | None = None, memory_budget: int = DEFAULT_BUDGET
) -> Chain:
    """Return a checkpoint with its bases; all their files are there and have the right sizes.

    Args:
        memory_budget: bytes that `read` may take beside the pieces.
        known: manifests that have been opened, by path; gets those that are opened. So many chains with the same bases
            are opened in the time of one.

    Raises:
        FileError: a manifest or a file is missing. InputError: a manifest or a size is wrong, or a base is another
            checkpoint than the one that was continued.
    """
    scratch = ScratchMemory.of(memory_budget)
    links: list[Link] = []
    seen: set[str] = set()
    while True:
        try:
            manifest = known[folder.path] if known is not None and folder.path in known else open_manifest(folder)
        except FileError as error:
            if not links:
                raise
            first = links[0].folder.path
            raise FileError(
                f"{error} {first} continues this checkpoint: keep both in one folder, or make {first} whole where both "
                "are (tilerec checkpoint compact).",
                error.errno,
            ) from error
        if known is not None:
            known[folder.path] = manifest
        if links:
            _check_base(links, folder, manifest)
        links.append(Link(folder, manifest))
        if manifest.base is None:
            return Chain(links, scratch)
        seen.add(folder.path)
        folder = folder.beside(manifest.base.name)
        if folder.path in seen or len(links) >= MOST_LINKS:
            raise InputError(
                f"Checkpoint {links[0].folder.path}: got a chain of bases without an end; expected one that ends with "
                "a whole checkpoint. Load another checkpoint."
            )


def _check_base(links: Sequence[Link], folder: CheckpointFolder, base: Manifest) -> None:
    newer = links[-1].manifest
    assert newer.base is not None
    if base.id != newer.base.id:
        raise InputError(
            f"Checkpoint {links[0].folder.path}: got the id {base.id!r} in its base {folder.path}; expected "
            f"{newer.base.id!r}, the checkpoint that was continued. Load another checkpoint."
        )
    for name, saved in newer.tensors.items():
        before = base.tensors.get(name)
        if not saved.is_whole and (before is None or (before.dtype, before.shape) != (saved.dtype, saved.shape)):
            raise InputError(
                f"Checkpoint {links[0].folder.path}: got no tensor {name} {saved.dtype} {list(saved.shape)} in its "
                f"base {folder.path}; expected it, as cells are left out here. Load another checkpoint."
            )


def open_manifest(folder: CheckpointFolder) -> Manifest:
    """Return the manifest of one checkpoint whose files all have the right sizes; its base is not looked at.

    Raises:
        FileError: there is none, or a file is missing. InputError: the manifest or a size is wrong.
    """
    try:
        data = folder.read_manifest()
    except OSError as error:
        raise FileError(
            f"Checkpoint {folder.path}: got no {MANIFEST} ({error.strerror or error}); expected a complete checkpoint. "
            "Check the path, or load another one.",
            error.errno,
        ) from error
    manifest = parse_manifest(data, f"Checkpoint {folder.path}")
    for name, file in manifest.files.items():
        try:
            size = folder.size(name)
        except OSError as error:
            raise unreadable(folder, error, name) from error
        if size != file.size:
            raise InputError(
                f"Checkpoint {folder.path}: got {size:,} bytes in {name}; expected {file.size:,}. It is damaged: load "
                "an earlier one."
            )
    return manifest


def unreadable(folder: CheckpointFolder, error: OSError, name: str = "") -> FileError:
    """Return the error for a file that cannot be read."""
    return FileError(
        f"Checkpoint {folder.path}: got '{error.strerror or error}' for {name or error.filename or 'a file'}; expected "
        "all its files. Load an earlier one.",
        error.errno,
    )
