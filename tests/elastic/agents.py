"""Agents of torchrun that tests start and kill, and the starts of their runs (see ledger_job.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

JOB = str(Path(__file__).with_name("ledger_job.py"))
PATIENCE = 240
"""Seconds that an agent waits for another one, which starts in a few; on a busy machine in some tens."""


class Agent:
    """One torchrun agent with its workers, in a session of its own. Agents with a port meet there.

    Args:
        host: the agent hosts the store, and its workers have the lowest ranks.
        patience: seconds that an agent waits for the other one before it starts its workers without it.
    """

    def __init__(
        self, folder: Path, nproc: int, *words: str, port: int = 0, host: bool = False, patience: int = 1
    ) -> None:  # fmt: skip
        options = (
            f"is_host={int(host)},last_call_timeout={patience},keep_alive_interval=1,keep_alive_max_attempt=3,"
            "join_timeout=300"
        )
        # Agents are sorted by their addresses, so each host has the same ranks in all starts.
        address = "127.0.0.1" if host else "127.0.0.2"
        hosts = [
            *("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--local-addr", address),
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


def wait_for_start(folder: Path, ranks: int, earlier: int = 0) -> None:
    """Return when the newest start has so many ranks, and has begun its steps; or when the run has ended.

    Args:
        earlier: number of starts before it.
    """
    while not (folder / "run" / "summary.json").exists():
        starts = starts_of(folder)
        if len(starts) > earlier and starts[-1] == ranks:
            return
        threading.Event().wait(0.02)


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def starts_of(folder: Path) -> list[int]:
    """Return the number of ranks of each start, in order."""
    starts = Counter(file.name.split("-")[0] for file in (folder / "run" / "ledger").iterdir())
    return [starts[name] for name in sorted(starts)]
