"""A small run with a ledger of the samples that each step trains; launchers start this file in tests.

python tests/elastic/ledger_job.py FOLDER [pace=SECONDS] [small=RANKS] [kill=STEP:RANK] [save=STEPS]

FOLDER/ledger/<start>-<rank>-<pid>.jsonl    one line per step: its number, and a digest of each of its samples
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor, nn

from tilerec.comms.process import ProcessGroupComms
from tilerec.data.batch import Batch
from tilerec.data.dataset import Dataset, RowDataset
from tilerec.data.share import Share
from tilerec.recipes.data import SyntheticData
from tilerec.recipes.model import DLRMConfig
from tilerec.train import Evaluation, RunConfig, Task, TaskConfig, TrainConfig, run
from tilerec.train.config import CheckpointConfig, ClickConfig
from tilerec.train.world import World

BATCH, EPOCHS = 32, 2
ROWS = BATCH * 30 + 5
STEPS = EPOCHS * -(-ROWS // BATCH)


@dataclass(frozen=True)
class LedgerConfig(TaskConfig):
    """Clicks, with a ledger.

    Attributes:
        folder: of the ledger.
        pace: seconds that each step waits, so that a test can act during the run.
        small: number of ranks with which a step waits 2 s, so that hosts can rejoin before the run ends.
        kill: step and rank of a process that ends itself as SIGKILL does; in the first start only.
    """

    folder: str = ""
    pace: float = 0.0
    kill: tuple[int, ...] = ()
    small: int = 0

    def build(self, dataset: Dataset, options: TrainConfig, device: torch.device, world: World) -> Task:
        return LedgerTask(ClickConfig().build(dataset, options, device, world), self, world)


class LedgerTask(Task):
    """A task that writes the samples of each loss to a file, before the loss."""

    def __init__(self, inner: Task, config: LedgerConfig, world: World) -> None:
        self._inner, self._config, self._rank = inner, config, world.rank
        self._pace = 2.0 if world.size == config.small else config.pace
        now = time.time_ns()
        start = max(world.group.all_gather_object(now)) if world.group is not None else now
        folder = Path(config.folder) / "ledger"
        folder.mkdir(parents=True, exist_ok=True)
        self._first = not any(folder.iterdir())
        if world.group is not None:
            self._first = all(world.group.all_gather_object(self._first))
        self._file = folder / f"{start}-{world.rank}-{os.getpid()}.jsonl"
        self._step = 0

    def loss(self, model: nn.Module, share: Share) -> Tensor:
        self._step += 1
        rows = [hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest() for row in share.batch.dense_features]
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([self._step, time.time(), rows]) + "\n")
        if self._first and self._config.kill == (self._step, self._rank):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._pace:
            threading.Event().wait(self._pace)
        return self._inner.loss(model, share)

    def progress(self) -> dict[str, float]:
        return self._inner.progress()

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step = state["steps"]

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Evaluation:
        return self._inner.evaluate(model, batches)

    def prediction_columns(self) -> Sequence[str]:
        return self._inner.prediction_columns()

    def predict(
        self, model: nn.Module, dataset: RowDataset, keys: Sequence[str], batch_size: int
    ) -> Iterator[tuple[int, pa.Table]]:
        return self._inner.predict(model, dataset, keys, batch_size)


def job(
    folder: Path | str, *, pace: float = 0.0, kill: tuple[int, ...] = (), save: int = 7, small: int = 0
) -> RunConfig:
    """Return the config of the run."""
    return RunConfig(
        name="ledger",
        data=SyntheticData(num_rows=(400, 200, 50), num_dense=4, train_rows=ROWS, held_out_rows=64),
        model=DLRMConfig(embedding_dim=8, dense_arch=(8,), over_arch=(8,)),
        train=TrainConfig(batch_size=BATCH, eval_batch_size=64, log_every=10, epochs=EPOCHS),
        log_dir=str(folder),
        task=LedgerConfig(str(folder), pace, kill, small),
        checkpoint=CheckpointConfig(every=save),
    )


def on_ranks(group: ProcessGroupComms, folder: str, kill: tuple[int, ...]) -> None:
    """Run on the ranks of `launch`."""
    run(job(folder, kill=kill))


def trained_rows(folder: Path) -> dict[int, Counter[str]]:
    """Return the samples of each step, by the last start that trained it: earlier ones did not save it."""
    last: dict[int, int] = {}
    rows: dict[tuple[int, int], Counter[str]] = {}
    for file in sorted((folder / "ledger").iterdir()):
        start = int(file.name.split("-")[0])
        for line in file.read_text(encoding="utf-8").splitlines():
            step, _, found = json.loads(line)
            last[step] = max(last.get(step, 0), start)
            rows.setdefault((start, step), Counter()).update(found)
    return {step: rows[start, step] for step, start in sorted(last.items())}


if __name__ == "__main__":
    given = dict(word.split("=") for word in sys.argv[2:])
    run(
        job(
            sys.argv[1],
            pace=float(given.get("pace", 0)),
            kill=tuple(map(int, given["kill"].split(":"))) if "kill" in given else (),
            save=int(given.get("save", 7)),
            small=int(given.get("small", 0)),
        )
    )
