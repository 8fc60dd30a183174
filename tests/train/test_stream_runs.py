"""Runs on iterable data sets: stopped in an epoch and continued on two ranks, and streams that are divided by rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

from tests.train.test_run_checkpoints import StopAfter, Stopped, weights
from tilerec.comms.process import ProcessGroupComms
from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.hold_out import HoldOut
from tilerec.data.stream_groups import StreamGroups
from tilerec.data.table_dataset import TableDataset
from tilerec.errors import ConfigError
from tilerec.recipes.model import DLRMConfig
from tilerec.testing import Ranks
from tilerec.train.config import CheckpointConfig, DataConfig, ParallelConfig, RunConfig, TrainConfig
from tilerec.train.loop import train

COLUMNS = Columns(
    labels=(LabelColumn("click"),),
    dense=(DenseColumn("price"),),
    ids=(IdColumn("user"),),
    tables=(TableRows("user", 64),),
)


class Clicks(IterableDataset[Any]):
    """Samples of a stream; with `divided`, only those of this rank, as other loaders expect them."""

    def __init__(self, divided: bool) -> None:
        self.divided = divided

    def __iter__(self) -> Iterator[Any]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if self.divided else (0, 1)
        for n in range(rank, 300, size):
            yield {"click": n * 7919 % 3 == 0, "price": n % 10 / 10, "user": n % 60}


@dataclass(frozen=True)
class StreamData(DataConfig):
    """A stream as the data of a run."""

    divided: bool = False

    def open(self) -> TableDataset:
        source = StreamGroups(Clicks(self.divided), rows_per_group=32)
        return TableDataset(source, COLUMNS, hold_out=HoldOut(every=10), shuffle_rows=64)


def config(folder: str, *, divided: bool = False, resume: bool = False) -> RunConfig:
    return RunConfig(
        name="stream",
        data=StreamData(divided),
        model=DLRMConfig(embedding_dim=4, dense_arch=(4,), over_arch=(4,)),
        train=TrainConfig(batch_size=24, eval_batch_size=16, log_every=1, epochs=2),
        log_dir=folder,
        parallel=ParallelConfig(sharding="row_wise", exact=True),
        checkpoint=CheckpointConfig(every=5, resume=resume),
    )


def on_ranks(folder: str) -> dict[str, Tensor]:
    group = ProcessGroupComms()
    return weights(train(config(folder, resume=True), group=group).model, group)


def divided_run(folder: str) -> None:
    with pytest.raises(
        ConfigError, match=r"data: got other first samples on rank 1 than on rank 0; .* division by rank"
    ):
        train(replace(config(folder, divided=True), log_dir=""), group=ProcessGroupComms())


def test_a_run_on_a_stream_continues_in_an_epoch_on_two_ranks(tmp_path: Path) -> None:
    alone = replace(config(""), parallel=ParallelConfig(), checkpoint=CheckpointConfig())
    want = weights(train(alone).model, None)
    folder = str(tmp_path / "stopped")
    with pytest.raises(Stopped):
        train(replace(alone, log_dir=folder, checkpoint=CheckpointConfig(every=5)), watchers=[StopAfter(6)])
    with Ranks(2) as ranks:
        found = ranks.run(on_ranks, folder)
        ranks.run(divided_run, folder)
    for got in found:
        assert list(got) == list(want)
        for name, value in want.items():
            torch.testing.assert_close(got[name], value)
