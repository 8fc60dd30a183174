"""Files of a data set: a file, a folder, a pattern or a list of them, local or as an fsspec URL.

    clicks.parquet            one file
    clicks/                   every file in the folder and its subfolders with the wanted ending, by name
    clicks/day_*.parquet      a pattern
    s3://bucket/clicks/       a URL of fsspec (its package, here s3fs, is installed separately)

Names that begin with a dot or an underscore are left out of folders: they are marks of the programs that wrote them.
"""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, TypeVar

from tilerec.errors import ConfigError, InputError

Paths = str | Path | Sequence[str | Path]
FilePath = Annotated[str, "path"]
"""A path or URL in a config. In a run file, a relative path begins at the folder of the file."""
ATTEMPTS = 4
"""Attempts to read from a remote file system before its error counts."""
FIRST_DELAY = 0.2
"""Seconds before the second attempt; each further delay is twice as long."""

_R = TypeVar("_R")


@dataclass(frozen=True)
class DataFile:
    """A file that can be opened again and again.

    Attributes:
        name: its path or URL, for messages.
        path: the path within its file system.
        filesystem: an fsspec file system; None for local files.
    """

    name: str
    path: str
    filesystem: Any = None

    @property
    def remote(self) -> bool:
        """True if the file is not local."""
        return self.filesystem is not None

    def open(self) -> BinaryIO:
        """Open the file for reading bytes at any position."""
        if self.filesystem is None:
            return Path(self.path).open("rb")
        stream: BinaryIO = self.filesystem.open(self.path, "rb", cache_type="readahead")
        return stream

    def size(self) -> int:
        """Return the number of bytes."""
        if self.filesystem is None:
            return Path(self.path).stat().st_size
        return int(self.filesystem.size(self.path))

    def attempt(self, action: Callable[[], _R], errors: tuple[type[Exception], ...]) -> _R:
        """Return the result of an action on the file; for remote files, repeat it after an error, `ATTEMPTS` in all."""
        delay = FIRST_DELAY
        for _ in range(ATTEMPTS - 1 if self.remote else 0):
            try:
                return action()
            except FileNotFoundError:
                raise
            except errors:
                time.sleep(delay)
                delay *= 2
        return action()


def list_files(paths: Paths, ending: str | tuple[str, ...], *, base: str | Path = "") -> list[DataFile]:
    """Return the files of a path, pattern or URL, or of several in turn; those of a folder or pattern by name.

    Args:
        ending: endings of the file names in a folder.
        base: folder of relative local paths.

    Raises:
        ConfigError: no path.
        InputError: a path without files, or a URL whose file system is not installed.
    """
    given = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not given or not all(str(path) for path in given):
        raise ConfigError("path: got nothing; expected a file, a folder or a pattern. Name the data.")
    endings = (ending,) if isinstance(ending, str) else ending
    found: list[DataFile] = []
    for path in given:
        text = str(path)
        found += _remote(text, endings) if "://" in text else _local(text, endings, Path(base))
    return list({file.name: file for file in found}.values())


def _local(text: str, endings: tuple[str, ...], base: Path) -> list[DataFile]:
    place = base / Path(text).expanduser()
    if place.is_dir():
        inside = sorted(each for each in place.rglob("*") if each.is_file() and _wanted(each, place, endings))
        if not inside:
            others = sorted(each.name for each in place.iterdir())[:5]
            raise InputError(
                f"{place}: got a folder with {', '.join(others) or 'nothing'}; expected files that end with "
                f"{' or '.join(endings)}. Pass the folder of the data, or a pattern such as {place}/*.data."
            )
        return [DataFile(str(each), str(each)) for each in inside]
    if place.is_file():
        return [DataFile(str(place), str(place))]
    matches = sorted(each for each in glob.glob(str(place), recursive=True) if Path(each).is_file())
    if not matches:
        what = "a pattern without matches" if glob.has_magic(text) else "a path that does not exist"
        raise InputError(f"{place}: got {what}; expected a file, a folder or a pattern. Check the path.")
    return [DataFile(each, each) for each in matches]


def _wanted(path: Path | PurePosixPath, root: Path | PurePosixPath, endings: tuple[str, ...]) -> bool:
    hidden = any(part.startswith((".", "_")) for part in path.relative_to(root).parts)
    return path.name.endswith(endings) and not hidden


def _remote(url: str, endings: tuple[str, ...]) -> list[DataFile]:
    from fsspec.core import url_to_fs

    try:
        filesystem, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"{url}: got a file system that is not available ({error}); expected a URL that fsspec opens. Install its "
            "package, for s3:// with pip install 'tilerec[remote]'."
        ) from error
    probe = DataFile(url, path, filesystem)
    try:
        names = probe.attempt(lambda: _remote_names(filesystem, path, endings), (OSError,))
    except OSError as error:
        raise InputError(
            f"{url}: got an error on listing it ({error}); expected a readable location. Check the URL and the "
            "credentials."
        ) from error
    if not names:
        raise InputError(
            f"{url}: got no files that end with {' or '.join(endings)}; expected a file, a folder or a pattern. Check "
            "the URL."
        )
    return [DataFile(filesystem.unstrip_protocol(name), name, filesystem) for name in names]


def _remote_names(filesystem: Any, path: str, endings: tuple[str, ...]) -> list[str]:
    filesystem.invalidate_cache()
    if glob.has_magic(path):
        return sorted(filesystem.glob(path))
    if filesystem.isfile(path):
        return [path]
    root = PurePosixPath(path)
    return sorted(name for name in filesystem.find(path) if _wanted(PurePosixPath(name), root, endings))
