"""Killed ranks are replaced from the memory of the others, and the run ends with the bits of one without a kill."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_run_checkpoints import config, same, weights
from tilerec.comms.process import ProcessGroupComms
from tilerec.train.config import ParallelConfig, RunConfig
from tilerec.train.launch import RankFailed, launch
from tilerec.train.loop import train
from tilerec.train.lost_peers import attempt
from tilerec.train.training_run import Run

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes: nightly")
RANKS, STEPS = 4, 10

Kill = tuple[int, int, float | str]
"""Rank, steps before the kill, and seconds in the next step, or a method of `Run` that it calls then. "step": between
its backward and its dense update."""


def small(folder: Path | str, every: int = 0) -> RunConfig:
    """Return a run of 2 x 2 ranks: 0, 1 and 2, 3 are replicas."""
    own = config(folder, every=every)
    own = replace(own, train=replace(own.train, max_steps=STEPS, log_every=2, epochs=9))
    return replace(own, parallel=ParallelConfig(group_size=2, replace=RANKS))


def kill_this_rank() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_ranks(group: ProcessGroupComms, folder: Path, every: int, kills: list[list[Kill]]) -> None:
    """Train without a kill at the first start, then with kills: the n-th list is that of the n-th start."""
    if not attempt():
        trained(group, small(folder / "whole", every))
    for rank, steps, moment in kills[attempt()] if attempt() < len(kills) else ():
        if rank == group.rank:
            kill_at(steps, moment)
    trained(group, small(folder / "killed", every))


def trained(group: ProcessGroupComms, own: RunConfig) -> None:
    found = weights(train(own, group=group).model, group)
    if not group.rank:
        torch.save(found, Path(own.log_dir) / "weights.pt")


def kill_at(steps: int, moment: float | str) -> None:
    """Change the run of this process: it is killed after so many steps."""
    name = moment if isinstance(moment, str) else "zero_grad"
    method = getattr(Run, name)

    def killed(self: Run) -> Any:
        if self.steps == steps:
            if isinstance(moment, str):
                kill_this_rank()
            else:
                threading.Timer(moment, kill_this_rank).start()
        return method(self)

    setattr(Run, name, killed)


def outcome(folder: Path) -> tuple[dict[str, Any], list[tuple[int, float]]]:
    """Return the weights after training, and steps and losses of the log."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return torch.load(folder / "weights.pt"), [(one["step"], one["loss"]) for one in lines if one["kind"] == "train"]


def check(folder: Path, kills: list[list[Kill]], every: int = 0, replaced: int = RANKS) -> None:
    with pytest.warns(UserWarning, match="was killed by signal SIGKILL"):
        launch(RANKS, on_ranks, folder, every, kills, replace=replaced)
    (got, logged), (want, losses) = outcome(folder / "killed"), outcome(folder / "whole")
    same(got, want)
    assert logged == losses


def test_a_rank_killed_in_a_step_is_replaced_with_the_same_bits(tmp_path: Path) -> None:
    check(tmp_path, [[(2, 5, "step")]])


@NIGHTLY
@pytest.mark.parametrize("turn", range(10))
def test_kills_at_random_moments(tmp_path: Path, turn: int) -> None:
    dice = random.Random(turn)
    check(tmp_path, [[(dice.randrange(RANKS), dice.randrange(STEPS - 2), dice.random() * 0.05)]])


@NIGHTLY
def test_two_kills_one_after_the_other(tmp_path: Path) -> None:
    check(tmp_path, [[(1, 3, 0.001)], [(3, 6, "step")]])


@NIGHTLY
def test_a_second_kill_before_the_first_new_step(tmp_path: Path) -> None:
    check(tmp_path, [[(1, 3, "step")], [(0, 1, "step"), (0, 2, "step"), (0, 3, "step")]])


@NIGHTLY
def test_two_ranks_with_different_tiles_may_be_killed_at_once(tmp_path: Path) -> None:
    check(tmp_path, [[(0, 4, "step"), (3, 4, "step")]])


@NIGHTLY
@pytest.mark.parametrize("every", [0, 4])
@pytest.mark.parametrize("moment", ["evaluate", "finish"])
def test_a_rank_killed_after_the_last_step_is_replaced(tmp_path: Path, every: int, moment: str) -> None:
    check(tmp_path, [[(3, STEPS, moment)]], every)


@NIGHTLY
def test_without_a_replica_the_newest_checkpoint_is_loaded(tmp_path: Path) -> None:
    check(tmp_path, [[(2, 7, "step"), (3, 7, "step")]], every=3)


@NIGHTLY
def test_without_a_replica_and_a_checkpoint_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="neither the other ranks nor a checkpoint"):
        check(tmp_path, [[(2, 7, "step"), (3, 7, "step")]])


@NIGHTLY
def test_more_kills_than_may_be_replaced_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 3 of 4 was killed"):
        check(tmp_path, [[(1, 3, "step")], [(3, 6, "step")]], replaced=1)
