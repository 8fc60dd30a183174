"""`tilerec train --save-every --resume`, killed with SIGKILL at random moments, ends with the bits of a whole run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.chaos.fault_counts import RANDOM, SEED, Counts, survived
from tilerec.checkpoint.manager import whole_checkpoints

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes: nightly")
STEPS = 24
SMALL = {
    "train.max_steps": STEPS,
    "train.batch_size": 64,
    "train.log_every": 1,
    "data.train_rows": 4096,
    "data.held_out_rows": 256,
}


def start(folder: Path, ranks: int) -> subprocess.Popen[str]:
    settings = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]
    words = ["train", "synthetic", *settings, "--log-dir", str(folder), "--save-every", "2", "--resume"]
    if ranks > 1:
        words += ["--nproc", str(ranks)]
    return subprocess.Popen(
        [sys.executable, "-m", "tilerec", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def killed(folder: Path, ranks: int, lines: int) -> bool:
    """Start a run and kill all its processes after so many of its lines; return True if it had not ended."""
    with start(folder, ranks) as run:
        assert run.stdout is not None
        for _ in range(lines):
            if not run.stdout.readline():
                break
        alive = run.poll() is None
        try:
            os.killpg(run.pid, signal.SIGKILL)
        except ProcessLookupError:
            alive = False
        run.stdout.read()
    return alive


def finished(folder: Path, ranks: int) -> dict[str, torch.Tensor]:
    with start(folder, ranks) as run:
        assert run.stdout is not None
        run.stdout.read()
        assert run.wait() == 0
    return load_file(folder / "model.safetensors")


def check(folder: Path, ranks: int, kills: int, counts: Counts) -> None:
    want = finished(folder / "whole", ranks)
    dice = random.Random(100 * SEED + ranks)
    struck = 0
    for _ in range(kills):
        struck += killed(folder / "killed", ranks, dice.randrange(2, 9))
        whole_checkpoints(folder / "killed" / "checkpoints")  # no error, and no warning of a damaged one
    assert struck
    got = finished(folder / "killed", ranks)
    assert list(got) == list(want)
    for name, value in want.items():
        assert torch.equal(got[name], value), name
    survived(counts, RANDOM, struck)


@NIGHTLY
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_kills_of_whole_commands_lose_nothing(tmp_path: Path, ranks: int, counts: Counts) -> None:
    check(tmp_path, ranks, 3, counts)
