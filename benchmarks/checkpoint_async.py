"""Benchmark of saves while training goes on, beside blocking ones and DCP's async_save; and of incremental saves.

    python benchmarks/checkpoint_async.py [--gb 1.0] [--rounds 5] [--folder FOLDER]
    python benchmarks/checkpoint_async.py --incremental [--gb 1.0] [--steps 1000] [--saves 6]

One process trains a table of float32 rows of 64 columns by row-wise Adagrad: batches of 2,048 ids, drawn by a
Zipf law of exponent 1.05 over rows in random order.

    pause     seconds of the call: the job stands still
    steps     median seconds of a step while the save runs, beside steps without one
    memory    bytes that the save holds beyond the job's own: copied rows, or DCP's copy of everything

Every checkpoint is loaded and compared with the values at its beginning. Of DCP, the largest growth of the process is
not measured but its staging copy, which has the bytes of the state.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, apply_optimizer_in_backward
from tilerec.checkpoint import CheckpointManager, load, save, save_ahead
from tilerec.checkpoint.contents import SavedContents
from tilerec.optim.fused import FusedOptimizer
from tilerec.spec.optimizer import RowWiseAdagrad

DIM, BATCH, LENGTH, EXPONENT = 64, 2048, 1, 1.05


class Job:
    """A table in training."""

    def __init__(self, rows: int) -> None:
        torch.manual_seed(1)
        config = EmbeddingBagConfig(rows, DIM, "t", feature_names=["f"])
        self.module = EmbeddingBagCollection([config])
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.01), self.module.parameters())
        self.optimizer = FusedOptimizer(self.module)
        self._dice = np.random.default_rng(2)
        weights = np.arange(1, rows + 1, dtype=np.float64) ** -EXPONENT
        self._sums = np.cumsum(weights) / weights.sum()
        self._places = self._dice.permutation(rows)
        self._lengths = torch.full((BATCH,), LENGTH)

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.module, "optimizer": self.optimizer}

    def batch(self) -> KeyedJaggedTensor:
        ranks = np.searchsorted(self._sums, self._dice.random(BATCH * LENGTH)).clip(max=len(self._places) - 1)
        return KeyedJaggedTensor.from_lengths_sync(["f"], torch.from_numpy(self._places[ranks]), self._lengths)

    def step(self, batch: KeyedJaggedTensor) -> float:
        began = time.perf_counter()
        self.module(batch).values().sum().backward()
        return time.perf_counter() - began

    def steps(self, go_on: Callable[[int], bool]) -> list[float]:
        found: list[float] = []
        while go_on(len(found)):
            found.append(self.step(self.batch()))
        return found

    def values(self) -> list[torch.Tensor]:
        return [self.module.state_dict()["embedding_bags.t.weight"].clone(), self._sum().clone()]

    def _sum(self) -> torch.Tensor:
        (state,) = self.optimizer.state_dict()["state"].values()
        return next(value for name, value in state.items() if torch.as_tensor(value).dim())

    def check(self, path: Path, want: list[torch.Tensor]) -> None:
        """Load a checkpoint into the job and compare; the job continues from its own values."""
        own = self.values()
        load(path, self.parts)
        assert all(torch.equal(a, b) for a, b in zip(self.values(), want, strict=True))
        self.module.load_state_dict({"embedding_bags.t.weight": own[0]})
        self._sum().copy_(own[1])


def seconds(action: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    made = action()
    return time.perf_counter() - began, made


def one_round(job: Job, folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    alone = job.steps(lambda n: n < 40)
    found["step alone"] = median(alone)
    found["blocking save"], _ = seconds(lambda: save(folder / "blocking", job.parts))

    want = job.values()
    found["pause"], running = seconds(lambda: save_ahead(folder / "ahead", job.parts))
    began = time.perf_counter()
    beside = job.steps(lambda n: n < 3 or not running.done)
    running.wait()
    found["save's time"] = time.perf_counter() - began
    found["step beside"], found["copied"] = median(beside), running.copied_bytes
    found["steps beside"] = len(beside)
    found["touched"] = min(1.0, len(beside) * BATCH * LENGTH * DIM * 4 / want[0].nbytes)
    job.check(folder / "ahead", want)

    state = {"weight": job.module.state_dict()["embedding_bags.t.weight"], "sum": job._sum()}
    found["DCP pause"], future = seconds(lambda: dcp.async_save(state, checkpoint_id=folder / "dcp"))
    began = time.perf_counter()
    beside = job.steps(lambda n: n < 3 or not future.done())
    future.result()
    found["DCP's time"] = time.perf_counter() - began
    found["DCP step beside"] = median(beside)
    for name in ("blocking", "ahead", "dcp"):
        shutil.rmtree(folder / name)
    return found


def asynchronous(job: Job, folder: Path, rounds: int) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # DCP needs one
    each = [one_round(job, folder) for _ in range(rounds)]
    middle = {name: median(one[name] for one in each) for name in each[0]}
    size = sum(value.nbytes for value in job.values())
    pause, blocking = middle["pause"], middle["blocking save"]
    ratio = median(one["pause"] / one["blocking save"] for one in each)
    print(f"blocking save      {blocking:8.3f} s  {size / 1e9:.2f} GB")
    print(f"tilerec            {pause:8.4f} s pause, {ratio:.4f} of a blocking save (medians of {rounds} rounds)")
    print(f"                   {middle['save' + chr(39) + 's time']:8.2f} s until it is complete")
    print(f"                   {middle['copied'] / 1e6:8.1f} MB copied, over {middle['steps beside']:.0f} steps")
    beside = median(one["step beside"] / one["step alone"] for one in each)
    print(f"                   {middle['step beside'] * 1e3:8.2f} ms per step, {beside:.2f} of a step alone")
    ratio = median(one["DCP pause"] / one["blocking save"] for one in each)
    print(f"DCP async_save     {middle['DCP pause']:8.4f} s pause, {ratio:.4f} of tilerec's blocking save")
    print(f"                   {middle['DCP' + chr(39) + 's time']:8.2f} s until it is complete")
    print(f"                   {size / 1e6:8.1f} MB copied")
    beside = median(one["DCP step beside"] / one["step alone"] for one in each)
    print(f"                   {middle['DCP step beside'] * 1e3:8.2f} ms per step, {beside:.2f} of a step alone")
    dist.destroy_process_group()


def incremental(job: Job, folder: Path, steps: int, saves: int) -> None:
    manager = CheckpointManager(folder, incremental=True, keep_last=0)
    sizes = []
    for number in range(saves):
        took, path = seconds(lambda number=number: manager.save(number, job.parts))
        contents = SavedContents(path)
        sizes.append(contents.bytes)
        base = contents.manifest.base
        share = f"{sizes[-1] / sizes[0]:.3f} of the whole" if base else "whole"
        print(f"save {number}: {sizes[-1] / 1e6:9.1f} MB, {share}, {took:.2f} s", flush=True)
        if number + 1 < saves:
            job.steps(lambda n: n < steps)
    want = job.values()
    job.check(Path(path), want)
    rest = sizes[1:]
    print(f"incremental saves, every {steps:,} steps: {median(rest) / sizes[0]:.3f} of a whole one (median)")
    print(f"the chain is loaded in {seconds(lambda: load(path, job.parts))[0]:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--incremental", action="store_true")
    parser.add_argument("--steps", type=int, default=1000, help="between incremental saves")
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--folder", default=None, help="on the disk to measure; default: a temporary folder")
    own = parser.parse_args()
    rows = int(own.gb * 1e9 / 4 / DIM)
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {rows:,} x {DIM} float32")
    job = Job(rows)
    with tempfile.TemporaryDirectory(dir=own.folder) as folder:
        if own.incremental:
            incremental(job, Path(folder), own.steps, own.saves)
        else:
            asynchronous(job, Path(folder), own.rounds)


if __name__ == "__main__":
    main()
