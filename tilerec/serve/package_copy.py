"""`PackageCopy`: the bytes of a package in memory that no other process changes.

A program that writes to a file in place (`cp new.pt2 model.pt2`) or cuts it short changes the pages of every process
that maps it: answers would mix two versions, and a read behind the new end kills the process (SIGBUS). So a server
reads the file once and maps this copy.

    file   --kernel copies 64 MB-->   copy (memfd)   the archive's checksums are compared, then the copy is sealed:
                                                     worker processes map it and share its pages

A checksum (CRC-32) detects damage; it takes half of the time of the weights' digests, which say whose weights they are.
A trial compares those, of a first version while it serves already.
Nothing here imports numpy: a server reads its package while it imports its modules.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, final

from tilerec.checksum import crc32
from tilerec.errors import ConfigError, FileError
from tilerec.export.archive import WEIGHTS, WEIGHTS_AT, Archive, check_parts, damaged, open_file, read_archive

if TYPE_CHECKING:
    from tilerec.export.array_package import ArrayPackage

CHUNK_BYTES = 1 << 26
"""Bytes that the kernel copies in one call. Threads wait up to 5 ms for Python's global lock after each."""


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
    """A whole package in memory, every part of it checked.

    Attributes:
        fd: descriptor of the memory.
        name: path of the file that was read, for messages.
    """

    def __init__(self, fd: int, name: str) -> None:
        self.fd, self.name = fd, name

    def load(self, *, verify: bool = False) -> ArrayPackage:
        """Return the package on this memory. Other processes share its pages, until one of them writes to a page.

        Args:
            verify: compare the digests of all weights with the manifest.

        Raises:
            ConfigError: its manifest does not fit it, or it was made for other ops, another torch or wider vectors than
                this machine has.
        """
        from tilerec.export.array_package import load_arrays

        return load_arrays(_path(self.fd), verify=verify, name=self.name)

    def duplicate(self) -> PackageCopy:
        """Return another descriptor of the same memory."""
        return PackageCopy(os.dup(self.fd), self.name)

    def close(self) -> None:
        """Close the descriptor. Loaded packages keep the memory."""
        os.close(self.fd)


def new_memory() -> int:
    """Return the descriptor of empty memory that `copy_package` fills. Raises `OSError`."""
    return os.memfd_create("tilerec-package", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def copy_package(path: str | Path, fd: int | None = None) -> PackageCopy:
    """Read a package into memory and compare the checksums of all of its parts.

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
        with open_file(_path(source), name) as file:
            stated = read_archive(file, f"Package {name}")
        _check(fd, stated, _copy(fd, source, before.size, stated.weights), name)
    except (ConfigError, OSError) as error:
        if mark_of(source) == before:
            raise
        raise _changed(name) from error
    if mark_of(source) != before:
        raise _changed(name)


def _copy(fd: int, source: int, size: int, weights: int) -> int:
    """Copy a file; return the checksum of its weights. Other Python threads run meanwhile."""
    os.truncate(fd, size)
    end, crc, at = WEIGHTS_AT + weights, 0, 0
    with mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ) as memory, memoryview(memory) as view:

        def add(start: int, stop: int) -> None:
            nonlocal crc
            with view[max(WEIGHTS_AT, start) : min(end, stop)] as part:
                crc = crc32(part, crc)

        with ThreadPoolExecutor(1, "checksum") as thread:
            while count := os.sendfile(fd, source, at, CHUNK_BYTES):  # 0 before the end: the file was cut short
                thread.submit(add, at, at + count)
                at += count
    return crc


def _check(fd: int, stated: Archive, crc: int, name: str) -> None:
    """Raise `ConfigError` if the copy is not the archive that the file was."""
    what = f"Package {name}"
    with open_file(_path(fd), what) as file:
        if read_archive(file, what) != stated:
            raise _changed(name)
    if crc != stated.crc:
        raise damaged(what, f"wrong checksum of {WEIGHTS}")
    check_parts(_path(fd), what)


def _changed(name: str) -> ConfigError:
    return ConfigError(
        f"Package {name}: got a write to the file while it was read; expected a file at rest. Replace it by a rename "
        "(mv), which is never seen half done."
    )


def _path(fd: int) -> str:
    return f"/proc/self/fd/{fd}"
