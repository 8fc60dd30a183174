"""docs/tutorial.md: its commands exist with their options; in the nightly tests they run, from top to bottom."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilerec.cli import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are part of the repository, not of the wheel")


def _blocks() -> list[tuple[str, str]]:
    """Return language and text of each program of the page."""
    return re.findall(r"^```(sh|python)\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_commands_and_options_exist() -> None:
    lines = [line for kind, text in _blocks() if kind == "sh" for line in text.splitlines() if line[:8] == "tilerec "]
    assert len(lines) == 12
    for line in lines:
        words = line.split()[1 : 3 if " checkpoint " in line else 2]
        help_text = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "200"}).output
        assert all(option in help_text for option in re.findall(r"--[a-z-]+", line)), line


@pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="trains, compiles two models and serves one")
def test_the_page_runs_from_top_to_bottom(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = tmp_path / "bin" / "tilerec"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m tilerec "$@"\n')
    command.chmod(0o755)
    script = ["set -e", "trap 'kill $(jobs -p) && wait' EXIT"]
    for kind, text in _blocks()[1:]:  # the first installs tilerec
        script.append(f'"$PYTHON" - <<"END"\n{text}END' if kind == "python" else text.replace("8000", port))
    script.append("! tilerec parity small.pt2 runs/first request.json")
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHON": sys.executable},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r'"predictions": \[\{"output": \[-?\d', done.stdout)
    assert "equal for 2 samples" in done.stdout
    assert "data type" in done.stdout
