"""`FileKind`: the files that one command writes. A command replaces a file of its own kind, and no other file.

    predict run.toml new.parquet --out scores.parquet     replaces the scores of an earlier predict
    predict run.toml new.parquet --out model.pt2          refused: predict has not written this file

A file is recognised by its first bytes, a Parquet file by its metadata.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tilerec.errors import ConfigError

_HEAD_BYTES = 4096
_MARK = b"tilerec"
"""Key of the metadata of Parquet files that commands write; its value is the command."""


@dataclass(frozen=True)
class FileKind:
    """Files of one command.

    Attributes:
        command: for messages, and the mark of Parquet files.
        head: pattern of the first bytes; empty for Parquet files.
    """

    command: str
    head: bytes = b""

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """Metadata that marks a Parquet file as one of this kind."""
        return {_MARK: self.command.encode()}

    def has(self, path: str | Path) -> bool:
        """Return True if a file is of this kind, has no content, or is a pipe or a device. Raises `OSError`."""
        if not os.path.isfile(path) or not os.path.getsize(path):
            return True
        with open(path, "rb") as file:
            if self.head:
                return re.match(self.head, file.read(_HEAD_BYTES), re.DOTALL) is not None
            return _entry(_MARK) + _entry(self.command.encode()) in _parquet_footer(file)


def _entry(text: bytes) -> bytes:
    """Return a string as it is in a Parquet footer: the type, the length (below 128), the bytes."""
    return bytes([0x18, len(text)]) + text


def _parquet_footer(file: BinaryIO) -> bytes:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 8))
    end = file.read()
    length = int.from_bytes(end[:4], "little")
    if end[4:] != b"PAR1" or length > size - 8:
        return b""
    file.seek(size - 8 - length)
    return file.read(length)


def check_kind(option: str, out: str | Path, kind: FileKind | None) -> None:
    """Raise unless an output is new, or a file of its kind.

    Args:
        option: name of the output, such as "--out".
        kind: None: nothing is replaced.

    Raises:
        ConfigError: another file is there.
    """
    if not os.path.lexists(out):
        return
    if kind is None:
        raise ConfigError(f"{option}: got {out}, which exists; expected a new file. Choose another name, or remove it.")
    try:
        known = kind.has(out)
    except OSError:
        known = False
    if not known:
        raise ConfigError(
            f"{option}: got {out}, which '{kind.command}' has not written; expected a new file, or an earlier result "
            "of this command to replace. Choose another name, or remove the file."
        )


ANY = FileKind("any program", b".")
CALIBRATE = FileKind("tilerec calibrate", rb'\{\s*"world_size": \d+,\s*"compute_device"')
CHECKPOINT_EXPORT = FileKind("tilerec checkpoint export", rb'.{8}\{"__metadata__": \{"format": "pt", "tilerec":')
CONVERT = FileKind("tilerec data convert")
EXPORT = FileKind("tilerec export", rb"PK\x03\x04.{26}model/data/weights/tilerec\.bin")
KSERVE = FileKind("tilerec serve-files", rb"apiVersion: serving\.kserve\.io/")
PLAN = FileKind("tilerec plan", rb'\{\s*"version": \d+,\s*"world_size"')
PLAN_PAGE = FileKind("tilerec plan", rb"<!doctype html>.*<title>Plan report: ")
PLAN_REPORT = FileKind("tilerec plan", rb'\{"version":\d+,"planner":"tilerec')
PLAN_REQUEST = FileKind("tilerec plan", rb'\{"version": \d+, "batch_size"')
PREDICT = FileKind("tilerec predict")
STATS = FileKind("tilerec stats", rb'\{\s*"version": \d+,\s*"source"')
TRACE = FileKind("tilerec train --trace", rb'\{"traceEvents": \[')
VOCABULARY = FileKind("tilerec data vocabulary")
