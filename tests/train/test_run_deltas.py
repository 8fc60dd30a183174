"""Runs publish their states; a run that continues from a checkpoint goes on with its log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.test_run_checkpoints import STEPS, StopAfter, Stopped, config
from tilerec.delta import DeltaLog, Follower
from tilerec.errors import ConfigError
from tilerec.testing import Ranks
from tilerec.train.config import DeltaConfig, ParallelConfig, RunConfig
from tilerec.train.loop import train


def publishing(folder: Path, every: int = 5, **checkpoint: int) -> RunConfig:
    return replace(config(folder, **checkpoint), delta=DeltaConfig(every, base_every=99))


def same_as_model(folder: Path) -> None:
    want = load_file(folder / "model.safetensors")
    got = {name: torch.empty_like(value) for name, value in want.items()}
    Follower(folder / "deltas", got).poll()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def steps_of(folder: Path) -> list[int]:
    log = DeltaLog(folder / "deltas")
    return [log.open(name).record.step for name in log.names()]


def test_a_run_publishes_every_so_many_steps_and_its_last(tmp_path: Path) -> None:
    train(publishing(tmp_path))
    assert steps_of(tmp_path) == [5, 10, STEPS]
    same_as_model(tmp_path)


def test_publishing_changes_no_bit_of_the_run(tmp_path: Path) -> None:
    train(config(tmp_path / "without"))
    train(publishing(tmp_path / "with", every=1))
    want = load_file(tmp_path / "without" / "model.safetensors")
    got = load_file(tmp_path / "with" / "model.safetensors")
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_a_run_that_goes_back_to_its_checkpoint_goes_on_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train(publishing(tmp_path, every=3), watchers=[StopAfter(7)])  # published at 6, saved at 4
    assert steps_of(tmp_path) == [3, 6]
    train(publishing(tmp_path, every=3, resume=True))
    assert steps_of(tmp_path) == [3, 6, 6, 9, STEPS]
    same_as_model(tmp_path)


def on_ranks(folder: Path) -> None:
    from tilerec.comms.process import ProcessGroupComms

    train(replace(publishing(folder), parallel=ParallelConfig(sharding="row_wise")), group=ProcessGroupComms())


def test_ranks_publish_one_log(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        ranks.run(on_ranks, tmp_path)
    assert steps_of(tmp_path) == [5, 10, STEPS]
    same_as_model(tmp_path)


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="delta: got log_dir = ''"):
        train(replace(publishing(tmp_path, every=5), log_dir="", checkpoint=type(config("x").checkpoint)()))
    with pytest.raises(ConfigError, match=r"delta\.every: got -1"):
        DeltaConfig(-1)
