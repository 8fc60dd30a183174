"""A reader of your own: click logs with one JSON object per line.

    python examples/extending/reader.py CLICKS.jsonl
    torchrun --nproc-per-node 2 examples/extending/reader.py CLICKS.jsonl

    {"click": 1, "price": 12.5, "user": "anna", "seen": ["shoe", "hat"]}

A reader is a `Dataset`: it yields `Batch`es of one pass over the training part, or over the held-out part. Equal
arguments give equal batches, so every rank can read the same global batches and keep its share. `train` does that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from tilerec import KeyedJaggedTensor
from tilerec.comms import ProcessGroupComms
from tilerec.data import Batch, Dataset, RowCount, SparseFeature, hash_rows, signed_log
from tilerec.data.ids import BatchIds
from tilerec.data.statistics import gather
from tilerec.errors import InputError
from tilerec.recipes.model import DLRMConfig
from tilerec.spec.optimizer import Adam, RowWiseAdagrad
from tilerec.train import DataConfig, RunConfig, TrainConfig, train


class JsonClicks(Dataset):
    """Clicks of a JSON-lines file; every `held_out_every`-th line is held out. Memory: one batch."""

    def __init__(self, path: str | Path, num_rows: int = 1_000, held_out_every: int = 5) -> None:
        self._path, self._num_rows, self._every = Path(path), num_rows, held_out_every
        self._count = RowCount()
        if not self._path.is_file():
            raise InputError(f"{path}: expected a JSON-lines file. Check the path.")

    @property
    def sparse_features(self) -> tuple[SparseFeature, ...]:
        return tuple(SparseFeature(name, self._num_rows) for name in ("user", "seen"))

    @property
    def dense_features(self) -> tuple[str, ...]:
        return ("price",)

    def train(self, batch_size: int, epoch: int = 0) -> Iterator[Batch]:
        return self._batches(batch_size, held_out=False)

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        return self._batches(batch_size, held_out=True)

    def row_count(self) -> RowCount:
        return self._count

    def _batches(self, batch_size: int, *, held_out: bool) -> Iterator[Batch]:
        count, clicks = RowCount(), []
        with self._path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    click = json.loads(line)
                    bags = [[click["user"]], click["seen"]]
                    read = (float(click["click"]), float(click["price"]), bags)
                except (ValueError, KeyError, TypeError) as error:
                    raise InputError(f"{self._path}:{number}: got {line[:80]!r} ({error!r}).") from error
                count.rows += 1
                if (number % self._every == 0) == held_out:
                    clicks.append(read)
                if len(clicks) == batch_size:
                    yield self._batch(clicks)
                    clicks = []
        if clicks:
            yield self._batch(clicks)
        self._count = count

    def _batch(self, clicks: list[tuple[float, float, list[list[str]]]]) -> Batch:
        by_key = [[bags[f] for _, _, bags in clicks] for f in range(2)]  # key-major, as a KeyedJaggedTensor
        texts = [text.encode() for bags in by_key for bag in bags for text in bag]
        rows = hash_rows(pa.array(texts, pa.binary()), self._num_rows)  # text -> row; equal on every machine
        prices = np.array([[price] for _, price, _ in clicks])
        return Batch(
            dense_features=torch.from_numpy(signed_log(prices)),
            sparse_features=KeyedJaggedTensor.from_lengths_sync(
                ["user", "seen"],
                torch.from_numpy(rows),
                torch.tensor([len(bag) for bags in by_key for bag in bags], dtype=torch.int32),
            ),
            labels=torch.tensor([label for label, _, _ in clicks]),
        )


@dataclass(frozen=True)
class JsonData(DataConfig):
    """The reader in a recipe: `tilerec train reader:recipe --data CLICKS.jsonl` runs it, with overrides and logs."""

    path: str
    num_rows: int = 1_000

    def open(self) -> JsonClicks:
        return JsonClicks(self.path, self.num_rows)


def recipe(data: str) -> RunConfig:
    return RunConfig(
        name="json-clicks",
        data=JsonData(path=data),
        model=DLRMConfig(embedding_dim=8, dense_arch=(8,), over_arch=(16,)),
        train=TrainConfig(
            batch_size=64, epochs=6, embedding_optimizer=RowWiseAdagrad(lr=0.1), dense_optimizer=Adam(lr=1e-2)
        ),
    )


def main(path: str) -> tuple[float, float]:
    """Train, in this process or on all ranks of a process group; return the held-out AUC and ids per sample."""
    group = ProcessGroupComms() if dist.is_initialized() else None
    result = train(recipe(path), group=group)
    # Statistics for the planner come from the batches of any reader.
    statistics = gather(BatchIds(lambda: JsonClicks(path).train(256), path))
    return result.held_out.auc, statistics.features["seen"].ids_per_sample


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    print("held-out AUC {:.3f}, {:.2f} seen items per click".format(*main(sys.argv[1])))
    if dist.is_initialized():
        dist.destroy_process_group()
