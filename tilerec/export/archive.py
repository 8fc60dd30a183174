"""The archive of a package: its parts, and whether each is the one that was written. Imports no numpy."""

from __future__ import annotations

import errno
import os
import stat
import struct
import zipfile
import zlib
from os import PathLike
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tilerec.errors import ConfigError
from tilerec.json_document import MOST_BYTES

WEIGHTS_AT = 4096
"""First byte of the weights in the file."""
WEIGHTS = "model/data/weights/tilerec.bin"
MANIFEST = "model/extra/tilerec.json"
AGAIN = "Export the model again, or copy the file again."

_CODE = "model/data/aotinductor/"


class Archive(NamedTuple):
    """Parts of a package.

    Attributes:
        manifest: its text.
        weights: number of bytes from `WEIGHTS_AT`.
        crc: CRC-32 of these bytes.
    """

    manifest: bytes
    weights: int
    crc: int


def open_file(path: str | Path, what: str) -> BinaryIO:
    """Open a file for reading. A pipe is refused: `open` would wait for its writer.

    Raises:
        ConfigError: the path is none. OSError: the file cannot be opened, or is no regular file.
    """
    # open(3) would read the caller's descriptor 3, and close it.
    if not isinstance(path, (str, PathLike)) or "\0" in str(path):
        raise ConfigError(f"{what}: got {path!r} as its path; expected a str or a Path. Pass the path of the file.")
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def read_archive(file: BinaryIO, what: str) -> Archive:
    """Return the parts of an open package.

    Raises:
        ConfigError: it is no package, or not all of one. OSError: it cannot be read.
    """
    if file.read(4) != b"PK\x03\x04":
        raise ConfigError(f"{what}: got no archive; expected a file of tilerec.export.export(). {AGAIN}")
    try:
        with zipfile.ZipFile(file) as archive:
            parts = {part.filename: part for part in archive.infolist()}
            if MANIFEST not in parts or WEIGHTS not in parts:
                raise ConfigError(
                    f"{what}: got an archive without {MANIFEST}; expected a file of tilerec.export.export(). Load "
                    "files of torch.export.save() or aoti_compile_and_package() with torch's functions."
                )
            first = parts[WEIGHTS]
            wrong = first.header_offset != 0 or first.compress_type != zipfile.ZIP_STORED
            file.seek(26)
            name, extra = struct.unpack("<HH", file.read(4))
            if wrong or 30 + name + extra != WEIGHTS_AT or not any(own.startswith(_CODE) for own in parts):
                raise ConfigError(f"{what}: got an archive that was packed again; expected the exported file. {AGAIN}")
            stated = parts[MANIFEST]
            if stated.file_size > MOST_BYTES or stated.compress_type != zipfile.ZIP_STORED or stated.flag_bits & 1:
                raise ConfigError(
                    f"{what}: got a manifest of {stated.file_size:,} bytes, or one that is compressed or encrypted; "
                    f"expected at most {MOST_BYTES:,} bytes, as they are. {AGAIN}"
                )
            return Archive(archive.read(stated), first.file_size, first.CRC)
    except zipfile.BadZipFile as error:
        raise ConfigError(
            f"{what}: got a part of a package, or a damaged one ({error}); expected the whole file. {AGAIN}"
        ) from error


def check_parts(path: str | Path, what: str) -> None:
    """Raise a `ConfigError` if a part of the archive is not the one that was written; not of the weights."""
    try:
        with zipfile.ZipFile(path) as archive:
            for part in archive.infolist():
                if part.filename != WEIGHTS:
                    archive.read(part)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise damaged(what, str(error)) from error


def damaged(what: str, reason: str) -> ConfigError:
    """Return the error for a part that is not the one that was written."""
    return ConfigError(f"{what}: got a damaged part ({reason}); expected the exported file. {AGAIN}")
