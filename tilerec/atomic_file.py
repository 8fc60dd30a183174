"""Atomic file writes: a file is replaced as a whole, or stays unchanged.

    temporary file beside the target  ->  fsync  ->  rename over the target  ->  fsync of the folder

A full disk, a killed process or a machine that stops leaves the earlier file unchanged.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from tilerec.errors import FileError


def write_file(path: str | Path, content: str | bytes, what: str) -> None:
    """Replace the content of a file, or leave the file unchanged.

    A new file gets the permissions that `open` gives. A replaced file keeps its own permissions. Symbolic links are
    followed. Pipes and devices (`/dev/stdout`) are written in place.

    Args:
        content: text is encoded as UTF-8; line endings are not converted.
        what: the kind of file; the error message begins with it.

    Raises:
        FileError: the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    before: os.stat_result | None = None
    try:
        with contextlib.suppress(FileNotFoundError):
            before = os.stat(path)
        if before is not None and not stat.S_ISREG(before.st_mode):
            Path(path).write_bytes(data)
        else:
            _replace(Path(os.path.realpath(path)), data, before)
    except OSError as error:
        unchanged = "" if before is None else "; the earlier file is unchanged"
        raise FileError(
            f"{what}: {path} cannot be written: got '{error.strerror or error}'; expected a writable folder and file "
            f"with space for {len(data):,} bytes. Free space or choose another path{unchanged}.",
            error.errno,
        ) from error


@contextlib.contextmanager
def replaced_file(path: str | Path, what: str) -> Iterator[Path]:
    """Yield the path of a temporary file, and rename it to `path` if the block succeeds.

    For files that are too large to hold in memory. The block writes and closes the file. If it fails, the temporary
    file is removed and an earlier file stays unchanged.

    Args:
        what: the kind of file; the error message begins with it.

    Raises:
        FileError: the file cannot be written.
    """
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".tilerec-{uuid.uuid4().hex}.part")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"{what}: {path} cannot be written: got '{error.strerror or error}'; expected a writable folder with "
            "space for the file. Free space or choose another path.",
            error.errno,
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _replace(target: Path, data: bytes, before: os.stat_result | None) -> None:
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
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(target.parent)


def _copy_owner_and_mode(descriptor: int, before: os.stat_result) -> None:
    """Copy owner, group and mode of the earlier file to the new one, where this process is permitted to."""
    now = os.fstat(descriptor)
    with contextlib.suppress(OSError, AttributeError):
        if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
            os.fchown(descriptor, before.st_uid, before.st_gid)
    with contextlib.suppress(OSError, AttributeError):
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def _sync_folder(folder: Path) -> None:
    # Some operating systems and file systems cannot fsync a folder; the rename alone must suffice there.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
