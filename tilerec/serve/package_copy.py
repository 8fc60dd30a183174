"""`PackageCopy`: the bytes of a package in memory that no other process changes.

A program that writes to a file in place (`cp new.pt2 model.pt2`) or cuts it short changes the pages of every process
that maps it: answers would mix two versions, and a read behind the new end kills the process (SIGBUS). So a server
reads the file once and maps this copy.

    file                        copy (memfd)
    weights    --+ threads: read, digest, write       digests are compared with the manifest
    all else   --+ read, write                        checksums of the archive
                 `- then the copy is sealed           worker processes map it and share its pages
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, final

from tilerec.errors import ConfigError, FileError
from tilerec.export.array_package import ArrayPackage, load_arrays
from tilerec.export.package_file import WEIGHTS_AT, OpenPackage, check_parts, open_file, open_package

CHUNK_BYTES = 1 << 20
"""Bytes that a thread reads, digests and writes at a time: they stay in the cache of its core."""


class Mark(NamedTuple):
    """Identity and times of a file. A file with another mark may have other contents."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def mark_of(file: str | Path | int) -> Mark | None:
    """Return the mark of a path or of a file descriptor; None if there is no file."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return Mark(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@final
class PackageCopy:
    """A whole package in memory, every byte of it checked.

    Attributes:
        fd: descriptor of the memory.
        name: path of the file that was read, for messages.
    """

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self.name = fd, name

    def load(self) -> ArrayPackage:
        """Return the package on this memory. Other processes share its pages, until one of them writes to a page.

        Raises:
            ConfigError: it was made for other ops, another torch or wider vectors than this machine has.
        """
        return load_arrays(_path(self.fd), verify=False, name=self.name)

    def close(self) -> None:
        """Close the descriptor. Loaded packages keep the memory."""
        os.close(self.fd)


def new_memory() -> int:
    """Return the descriptor of empty memory that `copy_package` fills. Raises `OSError`."""
    return os.memfd_create("tilerec-package", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def copy_package(path: str | Path, fd: int | None = None) -> PackageCopy:
    """Read a package into memory and check all of it.

    Args:
        fd: of `new_memory`, for memory that other processes have open, too. It stays open. None: new memory.

    Raises:
        FileError: the file cannot be read, or the memory does not suffice.
        ConfigError: it is no package, not all of one, damaged, or was written to meanwhile.
    """
    own = -1
    try:
        if fd is None:
            fd = own = new_memory()
        with open_file(path, f"Package {path}") as file:
            _fill(fd, file.fileno(), str(path))
        # No process can change it any more. Private mappings can be written; their pages are copies.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        own = -1
    except ConfigError:
        raise
    except OSError as error:
        raise FileError(
            f"Package {path}: got '{error.strerror or error}'; expected a readable file, and memory for its bytes. "
            "Check the path and the free memory.",
            error.errno,
        ) from error
    finally:
        if own != -1:
            os.close(own)
    return PackageCopy(fd, str(path))


def _fill(fd: int, source: int, name: str) -> None:
    before = mark_of(source)
    assert before is not None
    try:
        stated = open_package(_path(source), name=name)
        weights = {(own.start, stated.weights[own.name].nbytes) for own in stated.manifest.weights}
        end = WEIGHTS_AT + max((start + size for start, size in weights), default=0)
        os.truncate(fd, before.size)
        _copy(fd, source, 0, WEIGHTS_AT)
        _copy(fd, source, end, before.size)
        with ThreadPoolExecutor(os.cpu_count() or 1, "copy") as threads:
            copies = {
                (start, size): threads.submit(_copy, fd, source, WEIGHTS_AT + start, WEIGHTS_AT + start + size)
                for start, size in sorted(weights, key=lambda place: -place[1])  # the largest ones first
            }
        _check(fd, stated, {place: copy.result() for place, copy in copies.items()}, name)
    except (ConfigError, OSError) as error:
        if mark_of(source) == before:
            raise
        raise _changed(name) from error
    if mark_of(source) != before:
        raise _changed(name)


def _copy(fd: int, source: int, start: int, end: int) -> str:
    """Copy the bytes from `start` to `end`; return their digest. Other Python threads run meanwhile."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK_BYTES))
    while start < end:
        chunk = buffer[: os.preadv(source, [buffer[: end - start]], start)]
        if not chunk:  # the file was cut short: the digest shows it
            break
        digest.update(chunk)
        if os.pwrite(fd, chunk, start) < len(chunk):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        start += len(chunk)
    return digest.hexdigest()


def _check(fd: int, stated: OpenPackage, digests: dict[tuple[int, int], str], name: str) -> None:
    """Raise `ConfigError` if the copy is not the package whose manifest the file had."""
    what = f"Package {name}"
    if open_package(_path(fd), name=name).manifest != stated.manifest:
        raise _changed(name)
    for own in stated.manifest.weights:
        if digests[own.start, stated.weights[own.name].nbytes] != own.sha256:
            raise ConfigError(
                f"{what}: weight '{own.name}' has other bytes than the manifest states; expected digest "
                f"{own.sha256[:16]}. Export the model again, or copy the file again."
            )
    check_parts(_path(fd), what)


def _changed(name: str) -> ConfigError:
    return ConfigError(
        f"Package {name}: got a write to the file while it was read; expected a file at rest. Replace it by a rename "
        "(mv), which is never seen half done."
    )


def _path(fd: int) -> str:
    return f"/proc/self/fd/{fd}"
