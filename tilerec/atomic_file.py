"""Files that are written whole or not at all.

    temporary file beside the target  ->  fsync  ->  rename over the target  ->  fsync of the folder

A disk that is full, a process that is killed and a machine that stops leave the earlier file as it was.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from pathlib import Path

from tilerec.errors import FileError


def write_file(path: str | Path, content: str | bytes, what: str) -> None:
    """Replace a file by new content, or leave it unchanged.

    A new file has the permissions that `open` gives; a replaced one keeps its own. Symbolic links are followed. Pipes
    and devices (`/dev/stdout`) are written in place.

    Args:
        content: text is encoded as UTF-8, line ends as they are.
        what: begins the message of an error.

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
            f"{what}: {path} cannot be written: got '{error.strerror or error}'; expected a folder and a file that may "
            f"be written, with room for {len(data):,} bytes. Free space or name another path{unchanged}.",
            error.errno,
        ) from error


def _replace(target: Path, data: bytes, before: os.stat_result | None) -> None:
    if before is not None and not os.access(target, os.W_OK):
        # A rename needs no permission on the file; the user who took the permission away expects this.
        raise PermissionError(13, os.strerror(13))
    temporary = target.with_name(f".tilerec-{uuid.uuid4().hex}.part")
    # 0o666 less the umask, as `open` creates files.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if before is not None:
                _like(file.fileno(), before)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(target.parent)


def _like(descriptor: int, before: os.stat_result) -> None:
    """Give the new file the owner, group and mode of the earlier one, as far as this process may."""
    now = os.fstat(descriptor)
    with contextlib.suppress(OSError, AttributeError):
        if (now.st_uid, now.st_gid) != (before.st_uid, before.st_gid):
            os.fchown(descriptor, before.st_uid, before.st_gid)
    with contextlib.suppress(OSError, AttributeError):
        os.fchmod(descriptor, stat.S_IMODE(before.st_mode))


def _sync_folder(folder: Path) -> None:
    # Some file systems and systems have no fsync of a folder; there the rename is as durable as it gets.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
