"""`PackageSource`: the versions of a package, one after another; `FileSource`: those of a file that is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol, final

from tilerec.serve.package_copy import copy_package, mark_of

if TYPE_CHECKING:
    from tilerec.export.array_package import ArrayPackage


class PackageSource(Protocol):
    """Origin of the versions that a `ServedModel` serves."""

    @property
    def name(self) -> str:
        """Path of the file, for messages."""

    def take(self) -> ArrayPackage | None:
        """Return a version that was not returned before; None if there is none.

        The first call returns a version or raises.

        Raises:
            TilerecError, OSError: a version has come that cannot serve.
        """


@final
class FileWatch:
    """Detects that a file has changed. Its contents at the time of the constructor are not a change."""

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._known = self._last = mark_of(path)

    def changed(self) -> bool:
        """Return True once for each change, at the second call that finds the file in the same state.

        So a file that is being written, or is gone, is no change yet.
        """
        before, self._last = self._last, mark_of(self._path)
        if self._last is None or self._last != before or self._last == self._known:
            return False
        self._known = self._last
        return True


@final
class FileSource:
    """The versions of a file, read into memory as a whole. It may be renamed, written in place, cut short or removed.

    Args:
        path: of a package.
    """

    def __init__(self, path: str | Path) -> None:
        self.name = str(path)
        self._watch: FileWatch | None = None

    def take(self) -> ArrayPackage | None:
        """Return the file's package if it is another one than at the last call."""
        if self._watch is None:
            self._watch = FileWatch(self.name)
        elif not self._watch.changed():
            return None
        copy = copy_package(self.name)
        try:
            return copy.load(verify=True)
        finally:
            copy.close()
