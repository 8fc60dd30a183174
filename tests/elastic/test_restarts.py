"""Runs whose processes are killed and rejoin under torchrun train every sample once, and end with the same model."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.elastic.ledger_job import EPOCHS, ROWS, STEPS, job, on_ranks, trained_rows
from tilerec.train import run
from tilerec.train.launch import RankFailed, launch

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes: nightly")
JOB = str(Path(__file__).with_name("ledger_job.py"))


class Agent:
    """One torchrun agent with its workers, in a session of its own. Agents with a port meet there."""

    def __init__(self, folder: Path, nproc: int, *words: str, port: int = 0, host: bool = False) -> None:
        options = (
            f"is_host={int(host)},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"
        )
        hosts = [
            *("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--local-addr", "localhost"),
            *("--rdzv-endpoint", f"localhost:{port}", "--rdzv-conf", options),
        ]
        command = [
            *(sys.executable, "-m", "torch.distributed.run", *(hosts if port else ["--standalone"])),
            *("--nproc-per-node", str(nproc), "--max-restarts", "30", "--monitor-interval", "0.1"),
            *(JOB, str(folder / "run"), *words),
        ]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(Path.cwd())}
        if port:
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see docs/cluster.md
        with (folder / "errors.txt").open("a") as errors:
            self.process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True, env=environment
            )

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kill the agent and its workers."""
        for process in [self.process.pid, *workers_of(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()


def workers_of(agent: int) -> list[int]:
    """Return the processes that an agent has started."""
    children = Path(f"/proc/{agent}/task/{agent}/children")
    return [int(word) for word in children.read_text().split()] if children.exists() else []


def latest_step(folder: Path) -> int:
    """Return the newest step of the newest start."""
    files = sorted((folder / "run" / "ledger").glob("*.jsonl"))
    lines = files[-1].read_text().splitlines() if files else []
    return json.loads(lines[-1])[0] if lines else 0


def wait_for(folder: Path, step: int) -> None:
    while latest_step(folder) < step and not (folder / "run" / "summary.json").exists():
        threading.Event().wait(0.02)


def wait_for_start(folder: Path, ranks: int) -> None:
    """Return when the newest start has so many ranks, and has begun its steps; or when the run has ended."""
    while not (folder / "run" / "summary.json").exists():
        files = list((folder / "run" / "ledger").glob("*.jsonl"))
        starts = [file.name.split("-")[0] for file in files]
        if starts.count(max(starts)) == ranks:
            return
        threading.Event().wait(0.02)


def whole_run(folder: Path) -> dict[str, torch.Tensor]:
    """Train without an interruption in this process; return the model."""
    run(job(folder))
    return load_file(folder / "model.safetensors")


def check(folder: Path, tmp_path: Path, *, tolerance: float) -> None:
    """Compare a run's ledger and model with those of a run in one process without an interruption."""
    want = whole_run(tmp_path / "whole")
    rows = trained_rows(folder)
    assert list(rows) == list(range(1, STEPS + 1))
    assert rows == trained_rows(tmp_path / "whole")
    for epoch in range(EPOCHS):
        part = [rows[step] for step in range(1 + epoch * STEPS // EPOCHS, 1 + (epoch + 1) * STEPS // EPOCHS)]
        total = sum(part, Counter())
        assert len(total) == ROWS
        assert set(total.values()) == {1}
    got = load_file(folder / "model.safetensors")
    assert list(got) == list(want)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=tolerance)


def test_a_killed_rank_loses_and_repeats_no_sample(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    with pytest.raises(RankFailed, match="killed by signal SIGKILL"):
        launch(2, on_ranks, folder, (23, 1))
    assert latest_step(tmp_path) == 23
    launch(3, on_ranks, folder, ())
    check(tmp_path / "run", tmp_path, tolerance=1e-5)


@NIGHTLY
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_torchrun_restarts_a_killed_worker(tmp_path: Path, nproc: int) -> None:
    step = random.Random(nproc).randrange(2, STEPS)
    with Agent(tmp_path, nproc, f"kill={step}:{nproc - 1}") as agent:
        assert agent.process.wait() == 0, (tmp_path / "errors.txt").read_text()
    assert len({file.name.split("-")[0] for file in (tmp_path / "run" / "ledger").iterdir()}) == 2
    check(tmp_path / "run", tmp_path, tolerance=1e-5)


@NIGHTLY
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("turn", range(3))
def test_hosts_leave_and_rejoin_at_random_steps(tmp_path: Path, nproc: int, turn: int) -> None:
    """Worlds of 2 and 1 rank, or of 4 and 2."""
    dice = random.Random(10 * nproc + turn)
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    words = ("pace=0.3", f"small={nproc}")
    with Agent(tmp_path, nproc, *words, port=port, host=True) as first:  # of the store of all agents
        second = Agent(tmp_path, nproc, *words, port=port)
        for part in (1, 2):
            wait_for(tmp_path, dice.randrange(STEPS * part // 4, STEPS * (part + 1) // 4))
            second.kill()
            wait_for_start(tmp_path, nproc)
            second = Agent(tmp_path, nproc, *words, port=port)
            wait_for_start(tmp_path, 2 * nproc)
        with second:
            assert first.process.wait() == 0, (tmp_path / "errors.txt").read_text()
    starts = Counter(file.name.split("-")[0] for file in (tmp_path / "run" / "ledger").iterdir())
    assert sorted(set(starts.values())) == [nproc, 2 * nproc]
    assert list(starts.values()).count(2 * nproc) > 1
    check(tmp_path / "run", tmp_path, tolerance=1e-5)
