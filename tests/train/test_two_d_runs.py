"""Runs in 2D parallelism."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.train.test_run_checkpoints import config, same, weights
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.sharding.table import ShardedTable
from tilerec.testing import Ranks
from tilerec.train.config import ParallelConfig
from tilerec.train.loop import train


def trained(folder: str, **parallel: Any) -> tuple[dict[str, Tensor], int]:
    """Return the trained weights, and the rows of tables that this rank holds."""
    own = replace(config(folder, every=0), parallel=ParallelConfig(exact=True, **parallel))
    own = replace(own, train=replace(own.train, max_steps=3, log_every=3))
    group = ProcessGroupComms()
    model = train(replace(own, log_dir=""), group=group).model
    tables = [part for part in model.modules() if isinstance(part, ShardedTable)]
    return weights(model, group), sum(rows.leaf.shape[0] for table in tables for rows in table.tile_rows)


def row_wise(folder: str) -> tuple[dict[str, Tensor], int]:
    return trained(folder, sharding="row_wise")


def replicas(folder: str) -> tuple[dict[str, Tensor], int]:
    return trained(folder, sharding="row_wise", group_size=1)


def refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="divisor of the world size"):
        trained(folder, group_size=3)


def test_replicas_of_all_tables_train_to_the_bits_of_one_sharding_group(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        (want, rows), (_, others) = ranks.run(row_wise, str(tmp_path))
        assert rows + others == 60
        for got, held in ranks.run(replicas, str(tmp_path)):
            assert held == 60
            same(got, want)
        ranks.run(refused, str(tmp_path))
