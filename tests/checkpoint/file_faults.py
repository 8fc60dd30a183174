"""Faults at the n-th write to a file system, as a killed process or a full disk leaves it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilerec.checkpoint import folder
from tilerec.checkpoint.blocks import BlockWriter


class Killed(BaseException):
    """The process ends here: nothing that follows in it happens."""


class Faults:
    """Counts calls that change the file system, and fails at one of them.

    Args:
        at: number of the call that fails, from 0; a write of data leaves half of its bytes.
        error: the error; `Killed` also disables all cleaning up.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
        self.at, self.error, self.count = at, error, 0
        self.fired = False
        monkeypatch.setattr(BlockWriter, "write", self._half(BlockWriter.write))
        for module, name in (
            (os, "fsync"),
            (os, "rename"),
            (os, "replace"),
            (Path, "mkdir"),
            (folder.shutil, "rmtree"),
        ):
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))
        if isinstance(error, Killed):
            monkeypatch.setattr(folder._LocalFolder, "abandon", lambda _: None)

    def _now(self) -> bool:
        now = self.count == self.at
        self.count += 1
        self.fired |= now
        return now

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            if self._now():
                raise self.error
            return function(*args, **settings)

        return call

    def _half(self, write: Callable[..., None]) -> Callable[..., None]:
        def call(writer: BlockWriter, data: bytes | memoryview) -> None:
            if self._now():
                write(writer, memoryview(data)[: len(data) // 2])
                raise self.error
            write(writer, data)

        return call
