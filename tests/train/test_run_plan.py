"""Plans of runs on hosts of different sizes, as torchrun starts them where hosts have other numbers of processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.train.test_run_checkpoints import config, same, weights
from tilerec.checkpoint.manager import latest, read_metadata
from tilerec.comms.process import ProcessGroupComms
from tilerec.testing import Ranks
from tilerec.train.config import ParallelConfig
from tilerec.train.loop import train

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="a second form: nightly")
LOCAL = (2, 2, 1)  # ranks on the host of each rank


def trained(folder: str, steps: int, parallel: dict[str, Any]) -> dict[str, Tensor]:
    """Train to a step, from the newest checkpoint; return the weights."""
    group = ProcessGroupComms()
    own = replace(config(folder, resume=True), parallel=ParallelConfig(exact=True, **parallel))
    own = replace(own, train=replace(own.train, max_steps=steps))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(LOCAL[group.rank]))
        return weights(train(own, group=group).model, group)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as pool:
        yield pool


@pytest.mark.parametrize(
    "parallel", [{}, pytest.param({"sharding": "row_wise"}, marks=NIGHTLY), {"sharding": "row_wise", "group_size": 1}]
)
def test_a_run_on_hosts_of_different_sizes_continues_with_the_same_bits(
    ranks: Ranks, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    (want, *_) = ranks.run(trained, str(tmp_path / "whole"), 8, parallel)
    ranks.run(trained, str(tmp_path / "parts"), 4, parallel)
    found = latest(tmp_path / "parts" / "checkpoints")
    assert found is not None
    assert found.step == 4
    if "group_size" not in parallel:
        plan = read_metadata(found.path)["plan"]
        assert isinstance(plan, dict)
        assert plan["hosts"] == ["0-1", "2"]
    for got in ranks.run(trained, str(tmp_path / "parts"), 8, parallel):
        same(got, want)
