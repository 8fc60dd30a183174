"""`tilerec train --save-every` under its own launcher and torchrun: signals save, and the same command continues."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.chaos.test_command_kills import SMALL, finished
from tilerec.checkpoint.manager import latest

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes: nightly")
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tilerec"]


def command(folder: Path, launcher: str) -> list[str]:
    settings = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    words = ["train", "synthetic", *settings, "--log-dir", str(folder), "--save-every", "1000", "--resume"]
    start = TORCHRUN if launcher == "torchrun" else ["tilerec"]
    return [sys.executable, "-m", *start, *words, *(["--nproc", "2"] if launcher == "nproc" else [])]


def run(folder: Path, launcher: str, lines: int, whole_group: bool) -> int:
    """Start a run, send SIGTERM after so many of its lines, and return its exit code."""
    folder.parent.mkdir(exist_ok=True)
    with (
        (folder.parent / "errors.txt").open("a") as errors,
        subprocess.Popen(
            command(folder, launcher),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        ) as started,
    ):
        assert started.stdout is not None
        for _ in range(lines):
            started.stdout.readline()
        if lines:
            (os.killpg if whole_group else os.kill)(started.pid, signal.SIGTERM)
        started.stdout.read()
        code = started.wait()
    wait_for_end(started.pid)
    return code


def wait_for_end(group: int) -> None:
    """Return when no process of a process group is left: servers of processes end a moment after the last of these."""
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        threading.Event().wait(0.02)


@NIGHTLY
@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize("launcher", ["one", "nproc", "torchrun"])
def test_a_stopped_command_goes_on_with_the_same_bits(tmp_path: Path, launcher: str, whole_group: bool) -> None:
    dice = random.Random(len(launcher) + 10 * whole_group)
    code = run(tmp_path / "stopped", launcher, dice.randrange(3, 12), whole_group)
    # torchrun ends with 1 on every signal; its workers with 143.
    assert code == (1 if launcher == "torchrun" else 143), (tmp_path / "errors.txt").read_text()
    found = latest(tmp_path / "stopped" / "checkpoints")
    assert found is not None
    assert found.step < 1000
    assert run(tmp_path / "stopped", launcher, 0, whole_group) == 0
    want = finished(tmp_path / "whole", 1 if launcher == "one" else 2)
    got = load_file(tmp_path / "stopped" / "model.safetensors")
    assert list(got) == list(want)
    for name, value in want.items():
        assert torch.equal(got[name], value), name
