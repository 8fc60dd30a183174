"""Benchmark of runs that replace killed ranks: the cost of a step, and the time from a kill to the first new step.

    python benchmarks/replica_recovery.py [--ranks 2] [--rows 2000000] [--batch 2048]

A DLRM with 26 tables of 16 columns trains on ranks of this machine, each of which has a replica of all tables.

    step     the run keeps its last steps, and does not, in turns of 20 steps; medians over steps of the wall time and
             of the process's CPU time, rank 0
    kill     the last rank is killed between its backward and its dense update; seconds until rank 0 begins the step
             again
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tilerec.comms.process import ProcessGroupComms
from tilerec.recipes.data import SyntheticData
from tilerec.recipes.model import DLRMConfig
from tilerec.train.config import ParallelConfig, RunConfig, TrainConfig
from tilerec.train.launch import launch
from tilerec.train.loop import train
from tilerec.train.lost_peers import attempt
from tilerec.train.training_run import Run

TURN, TURNS, KILL = 20, 8, 30


def config(args: argparse.Namespace, steps: int) -> RunConfig:
    rows = (args.rows // 26,) * 26
    data = SyntheticData(num_rows=rows, num_dense=13, train_rows=args.batch * (steps + 1), held_out_rows=args.batch)
    model = DLRMConfig(embedding_dim=16, dense_arch=(64, 16), over_arch=(64, 32))
    options = TrainConfig(batch_size=args.batch, max_steps=steps, log_every=steps)
    return RunConfig("recovery", data, model, options, parallel=ParallelConfig(group_size=1, replace=1))


def _clocks() -> list[float]:
    """Return the seconds of wall and of CPU time."""
    return [time.perf_counter(), time.process_time()]


class Turns:
    """Gives a run its memory and takes it away, in turns, and collects the times of the steps."""

    def __init__(self) -> None:
        self.times: dict[str, list[list[float]]] = {"with": [], "without": []}
        self.bytes: list[int] = []
        self._memory: Any = None
        self._began = _clocks()

    def before_step(self, run: Any) -> None:
        turn, within = divmod(run.steps, TURN)
        if within > 1:
            self.times["without" if turn % 2 else "with"].append(
                [now - before for now, before in zip(_clocks(), self._began, strict=True)]
            )
        if within == 0:
            self._switch(run, kept=turn % 2 == 0)
        self._began = _clocks()

    def _switch(self, run: Any, kept: bool) -> None:
        if self._memory is None:
            self._memory = run._memory
        elif kept:
            run._memory = self._memory
            self._memory.begin(run)
        else:
            self.bytes.append(self._memory._memory.bytes)
            self._memory.finish()
            run._memory = None


def on_turns(group: ProcessGroupComms, own: RunConfig, out: str) -> None:
    """Train with and without memory, in turns; rank 0 writes the times of the steps."""
    turns, zero_grad = Turns(), Run.zero_grad

    def timed(run: Run) -> None:
        turns.before_step(run)
        zero_grad(run)

    Run.zero_grad = timed  # type: ignore[method-assign]
    train(own, group=group)
    if not group.rank:
        Path(out).write_text(json.dumps({"times": turns.times, "bytes": turns.bytes}))


def on_kill(group: ProcessGroupComms, own: RunConfig, out: str) -> None:
    """Train; the last rank is killed. Rank 0 writes the time of its next step."""
    step, zero_grad = Run.step, Run.zero_grad

    def killed(run: Run) -> None:
        if not attempt() and run.steps == KILL and group.rank == group.size - 1:
            Path(out + ".killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        step(run)

    def timed(run: Run) -> None:
        if attempt() and not group.rank and not Path(out).exists():
            Path(out).write_text(json.dumps([run.steps, time.time()]))
        zero_grad(run)

    Run.step, Run.zero_grad = killed, timed  # type: ignore[method-assign]
    train(own, group=group)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of all tables together")
    parser.add_argument("--batch", type=int, default=2048)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/turns"
        launch(args.ranks, on_turns, config(args, TURN * TURNS), out, replace=1)
        found = json.loads(Path(out).read_text())
        for k, clock in enumerate(("wall", "CPU")):
            one, other = (median(time[k] for time in found["times"][name]) for name in ("with", "without"))
            text = f"{1e3 * one:.1f} ms with memory, {1e3 * other:.1f} ms without"
            print(f"step, {clock} time: {text}: {one / other:.2f} times as long")
        print(f"memory of the last steps: {median(found['bytes']) / 1e6:.1f} MB per rank")
        out = f"{folder}/kill"
        launch(args.ranks, on_kill, config(args, 2 * KILL), out, replace=1)
        step, began = json.loads(Path(out).read_text())
        seconds = began - float(Path(f"{out}.killed").read_text())
        print(f"kill in step {KILL + 1}: goes on after step {step}, {seconds:.2f} s later")


if __name__ == "__main__":
    main()
