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
        if not self.head:
            return _parquet_mark(path) == self.command.encode()
        with open(path, "rb") as file:
            return re.match(self.head, file.read(_HEAD_BYTES), re.DOTALL) is not None


def _parquet_mark(path: str | Path) -> bytes | None:
    from pyarrow import ArrowInvalid, parquet  # commands that write no Parquet start without it

    try:
        return (parquet.read_metadata(path).metadata or {}).get(_MARK)
    except ArrowInvalid:
        return None


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
