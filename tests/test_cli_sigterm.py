"""Interrupted commands: SIGTERM removes temporary files."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tilerec.atomic_file import open_replacement
from tilerec.run_cli.ranks import run_on_ranks


def _write_and_terminate(group: object, folder: Path) -> None:
    with open_replacement(folder / "out.parquet", "Predictions") as file:
        file.write(b"half")
        assert len(list(folder.iterdir())) == 1
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the signal had no effect")


def test_sigterm_removes_half_written_files(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        run_on_ranks(_write_and_terminate, tmp_path, nproc=None, device="cpu")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
