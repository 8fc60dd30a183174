"""`DeltaLog`: a folder of published states of a model, each the rows that changed since the one before.

    deltas/base-0       everything at step 1000
           delta-1      rows written up to step 1100
           delta-2      ... up to step 1200
           base-2       everything at step 1200, again: those who start later begin here

Each entry is a checkpoint (tilerec/checkpoint): written as a whole or not at all, with checksums of every byte. A delta
continues the entry before it, or the base of the same state.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tilerec.checkpoint.chain import open_manifest
from tilerec.checkpoint.folder import CheckpointFolder, parent_at
from tilerec.checkpoint.manifest import Manifest
from tilerec.delta.record import DeltaRecord
from tilerec.errors import FileError, InputError

_NAME = re.compile(r"(base|delta)-(0|[1-9][0-9]{0,17})")
_LEFT = re.compile(r"(base|delta)-[0-9]{1,18}(?:\.(?:tmp|old)-[0-9a-f]+)+")


class EntryName(NamedTuple):
    """Name of an entry. At one sequence number the delta comes before the base."""

    sequence: int
    is_base: bool

    def __str__(self) -> str:
        return f"{'base' if self.is_base else 'delta'}-{self.sequence}"


class Entry(NamedTuple):
    """An entry with its manifest and its record."""

    name: EntryName
    folder: CheckpointFolder
    manifest: Manifest
    record: DeltaRecord

    @property
    def path(self) -> str:
        return self.folder.path

    @property
    def rows(self) -> int:
        """Number of rows with a list of their numbers; of each row that is cut into columns, one for each part."""
        return sum(
            {rows.numbers: rows.count for saved in self.manifest.tensors.values() for rows in saved.rows}.values()
        )


class DeltaLog:
    """The entries of a folder.

    Args:
        folder: that all readers and the ranks of the writer see, or a URL of fsspec.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = str(folder).rstrip("/")
        self._parent = parent_at(folder)

    def names(self) -> list[EntryName]:
        """Return the names of the entries, oldest first. They may be damaged: see `open`.

        Raises:
            FileError: the folder cannot be listed.
        """
        try:
            found = self._parent.names()
        except OSError as error:
            raise FileError(
                f"Delta log {self.path}: got '{error.strerror or error}'; expected a folder that can be listed. Check "
                "the path, and try again.",
                error.errno,
            ) from error
        matches = [match for name in found if (match := _NAME.fullmatch(name))]
        names = sorted(EntryName(int(match[2]), match[1] == "base") for match in matches)
        # On an object store, an entry without a manifest is one that was never completed.
        return names if not names or self.folder(names[-1]).exists() else names[:-1]

    def remove_unfinished(self) -> None:
        """Remove what stopped writers have left. Only for the writer of the log. Raises `OSError`."""
        for name in self._parent.names():
            if _LEFT.fullmatch(name):
                self._parent.folder(name).remove()

    def folder(self, name: EntryName) -> CheckpointFolder:
        """Return the folder of an entry."""
        return self._parent.folder(str(name))

    def open(self, name: EntryName) -> Entry:
        """Return an entry whose files all have the right sizes.

        Raises:
            FileError: it is not there, or not complete. InputError: it is damaged, or has another name than its record.
        """
        folder = self.folder(name)
        manifest = open_manifest(folder)
        what = f"Delta log {folder.path}"
        record = DeltaRecord.of(manifest, what)
        if record.sequence != name.sequence or (manifest.base is None) != name.is_base:
            raise InputError(
                f"{what}: got {'a base' if manifest.base is None else 'a delta'} number {record.sequence} in it; "
                "expected the one of its name. Files were moved: restore the log's folder."
            )
        return Entry(name, folder, manifest, record)

    def run(self) -> str:
        """Return the run of the newest entry that can be opened; "" if there is none."""
        for name in reversed(self.names()):
            try:
                return self.open(name).record.run
            except (FileError, InputError):
                continue
        return ""

    def newest_base(self) -> Entry | None:
        """Return the newest whole base that can be opened; None if there is none."""
        for name in reversed(self.names()):
            if name.is_base:
                try:
                    return self.open(name)
                except (FileError, InputError):
                    continue
        return None
