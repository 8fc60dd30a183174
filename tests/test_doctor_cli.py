"""`tilerec doctor` checks an installation; `tilerec --version` and completion work without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tilerec
from tilerec import doctor_cli
from tilerec.cli import app
from tilerec.ops.runtime.cpu.library import LibraryStatus
from tilerec.testing import ranks


def _doctor() -> tuple[int, list[str]]:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, ["doctor"])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output.splitlines()


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "run_ranks", lambda *_, **__: [3.0, 3.0])


def test_this_installation_is_healthy_and_every_check_has_a_line() -> None:
    code, lines = _doctor()
    assert code == 0, "\n".join(lines)
    assert lines[-1].startswith("0 broken, ")
    names = "\n".join(lines)
    parts = ("tilerec", "python", "torch", "packages", "native library", "C++ compiler", "Triton", "GPUs")
    for name in (*parts, "lookup on cpu"):
        assert f" {name} " in names
    assert any("gloo all-reduce of 1 and 2: [3.0, 3.0]" in line for line in lines)
    assert all(line.isascii() for line in lines)


def test_a_library_that_cannot_be_loaded_is_broken_and_has_a_next_move(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, without_processes: None
) -> None:
    library = tmp_path / "lib.so"
    library.write_text("no library")
    status = LibraryStatus(library, "it cannot be loaded: invalid ELF header")
    monkeypatch.setattr("tilerec.ops.backends.native_status", lambda: status)
    code, lines = _doctor()
    assert code == 1
    place = next(at for at, line in enumerate(lines) if line.startswith("broken  native library"))
    assert "make native" in lines[place + 1]
    library.unlink()
    code, lines = _doctor()
    assert code == 0, "the reference kernels run without it"
    assert any(line.startswith("note    native library") for line in lines)


def test_processes_that_cannot_join_are_broken_and_the_other_checks_still_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> Sequence[float]:
        raise RuntimeError("rank 1: connectFullMesh failed")

    monkeypatch.setattr(ranks, "run_ranks", fails)
    monkeypatch.setattr(doctor_cli, "_lookup_error", lambda device: 0.5)
    code, lines = _doctor()
    assert code == 1
    assert any(line.startswith("broken  two processes") and "connectFullMesh" in line for line in lines)
    assert any(line.startswith("broken  lookup on cpu") for line in lines)
    assert any(" /dev/shm " in line for line in lines)
    assert lines[-1].startswith("2 broken")


def test_a_missing_compiler_is_a_note_with_the_commands_that_need_it(
    monkeypatch: pytest.MonkeyPatch, without_processes: None
) -> None:
    monkeypatch.setattr("tilerec.torch_private.cpp_compiler", lambda: None)
    code, lines = _doctor()
    assert code == 0
    place = next(at for at, line in enumerate(lines) if line.startswith("note    C++ compiler"))
    assert "tilerec export" in lines[place]
    assert lines[place + 1].strip() == "-> Install g++."


def test_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"tilerec {tilerec.__version__}\n")


def test_the_shell_completes_commands() -> None:
    command = [
        sys.executable,
        "-c",
        "import sys; sys.argv = ['tilerec']; from tilerec.cli import app; app(prog_name='tilerec')",
    ]
    request = {"_TILEREC_COMPLETE": "complete_bash", "COMP_WORDS": "tilerec tr", "COMP_CWORD": "1"}
    done = subprocess.run(command, env={**os.environ, **request}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["train"]
