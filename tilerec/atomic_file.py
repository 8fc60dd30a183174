"""Atomic writes: a file is replaced as a whole, or stays unchanged; a folder appears with all of its files, or not.

    temporary file beside the target  ->  fsync  ->  rename over the target  ->  fsync of the folder

A full disk, a killed process or a machine that stops leaves the earlier file unchanged. If the last fsync fails, the
new file is there, and an error states that a machine that stops may lose it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tilerec.errors import FileError, TilerecError


def write_file(path: str | Path, content: str | bytes, what: str) -> None:
    """Replace the content of a file, or leave the file unchanged; see `open_replacement`.

    Args:
        content: text is encoded as UTF-8; line endings are not converted.
        what: the kind of file; the error message begins with it.

    Raises:
        FileError: the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    with open_replacement(path, what, f"space for {len(data):,} bytes") as file:
        file.write(data)


@contextlib.contextmanager
def open_replacement(path: str | Path, what: str, needs: str = "enough space") -> Iterator[BinaryIO]:
    """Yield a binary file for the new content; it replaces the file when the block ends without an error.

    A new file gets the permissions that `open` gives. A replaced file keeps its own permissions. Symbolic links are
    followed. Pipes and devices (`/dev/stdout`) are written in place.

    Args:
        what: the kind of file; the error message begins with it.
        needs: for the error message.

    Raises:
        FileError: the file cannot be written. The block must raise another error for its own files.
    """
    before: os.stat_result | None = None
    target: Path | None = None
    try:
        with contextlib.suppress(FileNotFoundError):
            before = os.stat(path)
        if before is not None and not stat.S_ISREG(before.st_mode):
            with Path(path).open("wb") as file:
                yield file
        else:
            target = Path(os.path.realpath(path))
            with _replacement(target, before) as file:
                yield file
    except TilerecError:
        raise
    except OSError as error:
        unchanged = "" if before is None else "; the earlier file is unchanged"
        raise FileError(
            f"{what}: {path} cannot be written: got '{error.strerror or error}'; expected a writable folder and file "
            f"with {needs}. Free space or choose another path{unchanged}.",
            error.errno,
        ) from error
    if target is not None:
        _sync_folder(target.parent, f"{what}: {path}")


@contextlib.contextmanager
def new_folder(path: Path, what: str) -> Iterator[Path]:
    """Yield a folder to fill; it becomes `path` when the block ends without an error. Else nothing of it remains.

    Args:
        path: does not exist, or is an empty folder. Folders above it are made.
        what: the kind of folder; the error message begins with it.

    Raises:
        FileError: the folder, or a file in it, cannot be written.
    """
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tilerec-", dir=path.absolute().parent) as outer:
            folder = Path(outer) / "new"  # with the permissions of a new folder; those of `outer` are the owner's only
            folder.mkdir()
            yield folder
            if path.exists():
                path.rmdir()
            folder.rename(path)
    except TilerecError:
        raise
    except OSError as error:
        raise FileError(
            f"{what}: {path} cannot be written: got '{error.strerror or error}'; expected a writable folder on a disk "
            "with enough space. Free space or choose another path.",
            error.errno,
        ) from error


@contextlib.contextmanager
def _replacement(target: Path, before: os.stat_result | None) -> Iterator[BinaryIO]:
    if before is not None and not os.access(target, os.W_OK):
        # A rename needs no write permission on the file itself. Check it, since a user made the file read-only.
        raise PermissionError(13, os.strerror(13))
    temporary = target.with_name(f".tilerec-{uuid.uuid4().hex}.part")
    # Mode 0o666 minus the umask: the mode that `open` gives new files.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if before is not None:
                _copy_owner_and_mode(file.fileno(), before)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _copy_owner_and_mode(descriptor: int, before: os.stat_result) -> None:
    """Copy owner, group and mode of the earlier file to the new one, where this process is permitted to."""
    now = os.fstat(descriptor)
    with contextlib.suppress(OSError, AttributeError):
        if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
            os.fchown(descriptor, before.st_uid, before.st_gid)
    with contextlib.suppress(OSError, AttributeError):
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def _sync_folder(folder: Path, file: str) -> None:
    """Make the rename in a folder durable. file: kind and path of the renamed file, for the error."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # Some operating systems and file systems cannot fsync a folder; the rename alone must suffice there.
        if error.errno not in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            return
        raise FileError(
            f"{file}: got '{error.strerror or error}' from the fsync of its folder; expected a disk that keeps the new "
            "file. Check the disk: if the machine stops now, the file may be lost.",
            error.errno,
        ) from error
