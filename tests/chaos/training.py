"""A small run with a ledger and a checkpoint every second step, in the processes of a pool."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from tests.chaos.ledger import LedgerConfig, Rows, read_ledger
from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.manager import latest
from tilerec.comms.process import ProcessGroupComms
from tilerec.recipes.runs import synthetic
from tilerec.testing.ranks import Ranks
from tilerec.train.config import CheckpointConfig, RunConfig
from tilerec.train.loop import train

STEPS, BATCH = 24, 64
ROWS_OF_A_PASS = 1000  # so the last batch of a pass is smaller, and a run crosses the end of a pass


def config(folder: str, attempt: int, steps: int, incremental: bool) -> RunConfig:
    run = synthetic()
    return replace(
        run,
        data=replace(run.data, num_rows=(400, 300), train_rows=ROWS_OF_A_PASS, held_out_rows=64, min_lengths=(1,),
                     max_lengths=(2,)),
        train=replace(run.train, max_steps=steps, epochs=3, batch_size=BATCH, log_every=steps, threads=1),
        task=LedgerConfig(folder=folder, attempt=attempt),
        checkpoint=CheckpointConfig(every=2, resume=True, incremental=incremental),
        log_dir=folder,
    )  # fmt: skip


def run_ranks(folder: str, attempt: int, steps: int = STEPS, incremental: bool = False) -> float:
    """Train to the end, from the newest checkpoint of a folder if there is one; return the seconds. On every rank."""
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a damaged checkpoint
        warnings.filterwarnings("ignore", message=".*run.toml")
        train(config(folder, attempt, steps, incremental), group=ProcessGroupComms())
    return time.perf_counter() - began


class Finished(NamedTuple):
    """Results of a run: weights, digests of the last checkpoint, the samples of each step, and seconds."""

    weights: dict[str, torch.Tensor]
    digests: dict[str, str]
    steps: dict[int, Rows]
    seconds: float


def uninterrupted(pool: Ranks, folder: Path, steps: int = STEPS, incremental: bool = False) -> Finished:
    folder.mkdir()
    seconds = pool.run(run_ranks, str(folder), 0, steps, incremental)[0]
    return Finished(load_file(folder / "model.safetensors"), digests(folder), read_ledger(folder)[0], seconds)


def newest(run: Path) -> int:
    """Return the step of the newest checkpoint of a run; 0 if it has none."""
    found = latest(run / "checkpoints")
    return found.step if found else 0


def digests(run: Path) -> dict[str, str]:
    """Return the digests of all tensors of the last checkpoint: weights, optimizers, generators."""
    found = latest(run / "checkpoints")
    assert found is not None
    contents = SavedContents(found.path)
    return {name: contents.tensor_digest(name) for name in contents.manifest.tensors}


def check_bits(run: Path, want: Finished) -> None:
    """Raise unless a run has the weights and the last checkpoint of an uninterrupted one."""
    got = load_file(run / "model.safetensors")
    assert list(got) == list(want.weights)
    for name, value in want.weights.items():
        assert torch.equal(got[name], value), name
    assert digests(run) == want.digests


def check_no_leftovers(run: Path) -> None:
    """Raise if anything but checkpoints is in the folder of checkpoints."""
    assert all(path.name.removeprefix("step-").isdigit() for path in (run / "checkpoints").iterdir())
