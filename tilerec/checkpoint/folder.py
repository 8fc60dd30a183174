"""Folders of checkpoints: how a checkpoint comes into being as a whole or not at all.

On a local file system:

    new folder step-8.tmp-<nonce>  ->  data files, each with fsync  ->  manifest, fsync  ->  fsync of the folder
        ->  rename to step-8  ->  fsync of the parent

A rename is atomic, and durable after the parent's fsync. It fails if step-8 exists. On an object store (a URL of
fsspec) nothing can be renamed, so the data files get names with a nonce, and writing the manifest is the commit.

A folder without a manifest is no checkpoint. No clock is read: the number in a checkpoint's name is its order.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, final

from tilerec.checkpoint.manifest import MANIFEST, MOST_BYTES
from tilerec.errors import FileError, TilerecError

_PART = re.compile(r"[0-9a-f]{16}-rank[0-9]+-[0-9]+\.safetensors")
"""Data files on an object store."""


class CheckpointFolder(ABC):
    """The folder of one checkpoint. path: its final place."""

    path: str

    @abstractmethod
    def begin(self, nonce: str, *, first: bool) -> None:
        """Prepare writing; every rank calls it with the same nonce, the rank with `first` before the others."""

    @abstractmethod
    def file_name(self, name: str) -> str:
        """Return the name of a data file, free of clashes with an earlier attempt."""

    @abstractmethod
    def create(self, name: str) -> Any:
        """Return a context with a new binary file; its end makes the bytes durable, or raises `OSError`."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the bytes of a file being written or committed; raises `OSError` if it is not there."""

    @abstractmethod
    def commit(self, manifest: bytes) -> None:
        """Write the manifest, which makes the written files a checkpoint. Raises `OSError`."""

    @abstractmethod
    def replace_manifest(self, manifest: bytes) -> None:
        """Put another manifest in the place of a committed one, as a whole or not at all. Raises `OSError`."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all files of a committed checkpoint, also those that the manifest does not name."""

    @abstractmethod
    def remove_file(self, name: str) -> None:
        """Remove a file that the manifest does not name. Raises `OSError`."""

    @abstractmethod
    def abandon(self) -> None:
        """Remove what was written and not committed."""

    @abstractmethod
    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Return a context with a committed file, to read; raises `OSError`, also for reads of its block."""

    @abstractmethod
    def read_manifest(self) -> bytes:
        """Return the bytes of the manifest; raises `OSError`, also above `MOST_BYTES`."""

    @abstractmethod
    def beside(self, name: str) -> CheckpointFolder:
        """Return the folder of another checkpoint in the same place."""

    @abstractmethod
    def exists(self) -> bool:
        """Return True if something has this checkpoint's name."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the checkpoint; no half of it can be taken for a whole meanwhile. Raises `OSError`."""


class CheckpointParent(ABC):
    """A folder that holds checkpoints."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of what it holds; none if it does not exist."""

    @abstractmethod
    def folder(self, name: str) -> CheckpointFolder:
        """Return the folder of one checkpoint."""


def folder_at(path: str | Path) -> CheckpointFolder:
    """Return the folder of a path, or of a URL of fsspec."""
    if "://" in str(path):
        filesystem, inner = _filesystem(str(path))
        return _StoreFolder(filesystem, inner, str(path))
    return _LocalFolder(Path(path))


def parent_at(path: str | Path) -> CheckpointParent:
    """Return the folder of checkpoints at a path, or at a URL of fsspec."""
    if "://" in str(path):
        filesystem, inner = _filesystem(str(path))
        return _StoreParent(filesystem, inner, str(path))
    return _LocalParent(Path(path))


def _filesystem(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        filesystem, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise FileError(
            f"Checkpoint {url}: got a file system that is not available ({error}); expected a URL that fsspec opens. "
            "Install its package."
        ) from error
    return filesystem, str(path).rstrip("/")


@final
class _LocalFolder(CheckpointFolder):
    def __init__(self, path: Path) -> None:
        self._final = Path(os.path.abspath(path))
        self.path = str(path)
        self._place = self._final  # the folder that files are written to

    def begin(self, nonce: str, *, first: bool) -> None:
        if self.exists():
            raise FileExistsError(17, "File exists")
        self._place = self._final.with_name(f"{self._final.name}.tmp-{nonce}")
        if first:
            self._final.parent.mkdir(parents=True, exist_ok=True)
            self._place.mkdir()

    def file_name(self, name: str) -> str:
        return name

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        # Buffered: a raw file may write a part of the bytes without an error, as at the end of a disk.
        with (self._place / name).open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def size(self, name: str) -> int:
        found = os.lstat(self._place / name)
        return found.st_size

    def commit(self, manifest: bytes) -> None:
        with self.create(MANIFEST) as file:
            file.write(manifest)
        _sync(self._place)
        if self.exists():
            raise FileExistsError(17, "File exists")  # a rename replaces an empty folder
        os.rename(self._place, self._final)
        self._place = self._final
        _sync(self._final.parent)

    def replace_manifest(self, manifest: bytes) -> None:
        name = f"{MANIFEST}.{os.urandom(4).hex()}"
        with self.create(name) as file:
            file.write(manifest)
        _sync(self._place)
        os.replace(self._place / name, self._place / MANIFEST)
        _sync(self._place)

    def names(self) -> list[str]:
        return os.listdir(self._place)

    def remove_file(self, name: str) -> None:
        (self._place / name).unlink()

    def abandon(self) -> None:
        if self._place != self._final:
            shutil.rmtree(self._place, ignore_errors=True)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        # A symbolic link could lead out of the folder, and a pipe would wait for its writer.
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        with os.fdopen(os.open(self._place / name, flags), "rb", buffering=0) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(22, f"{name} is not a file")
            yield file

    def read_manifest(self) -> bytes:
        with self.open(MANIFEST) as file:
            if os.fstat(file.fileno()).st_size > MOST_BYTES:
                raise OSError(27, os.strerror(27))
            return file.read()

    def beside(self, name: str) -> CheckpointFolder:
        return _LocalFolder(Path(self.path).with_name(name))

    def exists(self) -> bool:
        return os.path.lexists(self._final)

    def remove(self) -> None:
        # Under another name it is no checkpoint any more, whenever the removal ends.
        away = self._final.with_name(f"{self._final.name}.old-{os.urandom(4).hex()}")
        os.rename(self._final, away)
        _sync(self._final.parent)
        shutil.rmtree(away)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@final
class _LocalParent(CheckpointParent):
    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> list[str]:
        try:
            return os.listdir(self._path)
        except FileNotFoundError:
            return []

    def folder(self, name: str) -> CheckpointFolder:
        return _LocalFolder(self._path / name)


@contextmanager
def _store_errors() -> Iterator[None]:
    """Raise `OSError` for the errors that the client of a store has of its own: broken connections, bad answers."""
    try:
        yield
    except (OSError, TilerecError):
        raise
    except Exception as error:
        if type(error).__module__ == "builtins":
            raise
        raise OSError(5, f"{type(error).__name__}: {error}") from error


@final
class _StoreFolder(CheckpointFolder):
    """A folder on an object store. Its data files are written under the final name; readers see only manifests.

    A save that stopped leaves data files without a manifest. The next save of that step removes them, or the removal of
    steps as old.
    """

    def __init__(self, filesystem: Any, path: str, url: str) -> None:
        self._filesystem, self._inner, self.path = filesystem, path, url
        self._nonce = ""
        self._written: list[str] = []  # in the order of their removal

    def begin(self, nonce: str, *, first: bool) -> None:
        if self.exists():
            raise FileExistsError(17, "File exists")
        self._nonce = nonce
        if first:
            with _store_errors():
                self._filesystem.makedirs(self._inner, exist_ok=True)
                self._remove_parts()

    def _remove_parts(self) -> None:
        """Remove data files of attempts that were not committed."""
        try:
            found = self._filesystem.ls(self._inner, detail=False)
        except FileNotFoundError:  # an object store has no empty folders
            return
        for path in map(str, found):
            if _PART.fullmatch(path.rsplit("/", 1)[-1]):
                self._filesystem.rm_file(path)

    def file_name(self, name: str) -> str:
        return f"{self._nonce}-{name}"

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        path = f"{self._inner}/{name}"
        self._written.append(path)
        with _store_errors():
            file = self._filesystem.open(path, "wb")
            try:
                with file:
                    yield file
            except BaseException:
                with suppress(Exception):
                    file.discard()  # parts that the store keeps until an upload ends
                raise

    def size(self, name: str) -> int:
        with _store_errors():
            self._filesystem.invalidate_cache()
            return int(self._filesystem.size(f"{self._inner}/{name}"))

    def commit(self, manifest: bytes) -> None:
        if self.exists():
            raise FileExistsError(17, "File exists")
        path = f"{self._inner}/{MANIFEST}"
        # The store may have it although its answer is lost.
        self._written.insert(0, path)
        with _store_errors():
            self._filesystem.pipe_file(path, manifest)
        self._written = []

    def replace_manifest(self, manifest: bytes) -> None:
        with _store_errors():
            self._filesystem.pipe_file(f"{self._inner}/{MANIFEST}", manifest)

    def names(self) -> list[str]:
        return _StoreParent(self._filesystem, self._inner, self.path).names()

    def remove_file(self, name: str) -> None:
        with _store_errors():
            self._filesystem.rm_file(f"{self._inner}/{name}")

    def abandon(self) -> None:
        for path in self._written:
            with suppress(Exception):
                self._filesystem.rm_file(path)
        self._written = []

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        with _store_errors(), self._filesystem.open(f"{self._inner}/{name}", "rb") as file:
            yield file

    def read_manifest(self) -> bytes:
        if self.size(MANIFEST) > MOST_BYTES:
            raise OSError(27, os.strerror(27))
        with _store_errors():
            data: bytes = self._filesystem.cat_file(f"{self._inner}/{MANIFEST}")
        return data

    def beside(self, name: str) -> CheckpointFolder:
        inner, url = (f"{path.rstrip('/').rpartition('/')[0]}/{name}" for path in (self._inner, self.path))
        return _StoreFolder(self._filesystem, inner, url)

    def exists(self) -> bool:
        with _store_errors():
            self._filesystem.invalidate_cache()
            return bool(self._filesystem.exists(f"{self._inner}/{MANIFEST}"))

    def remove(self) -> None:
        with _store_errors(), suppress(FileNotFoundError):
            if self.exists():
                self._filesystem.rm_file(f"{self._inner}/{MANIFEST}")
            self._filesystem.rm(self._inner, recursive=True)


@final
class _StoreParent(CheckpointParent):
    def __init__(self, filesystem: Any, path: str, url: str) -> None:
        self._filesystem, self._inner, self._url = filesystem, path, url.rstrip("/")

    def names(self) -> list[str]:
        try:
            with _store_errors():
                self._filesystem.invalidate_cache()
                found = self._filesystem.ls(self._inner, detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in found]

    def folder(self, name: str) -> CheckpointFolder:
        return _StoreFolder(self._filesystem, f"{self._inner}/{name}", f"{self._url}/{name}")
