"""`tilerec.train.run`: one function under every launcher, which continues from storage."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.train.test_run_checkpoints import STEPS, StopAfter, Stopped, config, same, weights
from tilerec.checkpoint.manager import CheckpointManager, Found, checkpoints, read_metadata
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.spec.plan import ShardingPlan
from tilerec.testing import Ranks
from tilerec.train import run, train
from tilerec.train.config import ParallelConfig
from tilerec.train.launch import RankFailed, launch
from tilerec.train.load_attempts import FILE, LoadAttempts
from tilerec.train.ranks import on_ranks


def test_the_same_call_begins_a_run_and_goes_on(tmp_path: Path) -> None:
    want = train(config(tmp_path / "whole"))
    with pytest.raises(Stopped):
        run(config(tmp_path / "run"), watchers=[StopAfter(6)])
    same(weights(run(config(tmp_path / "run")).model, None), weights(want.model, None))


def group_of(group: ProcessGroupComms | None) -> tuple[int, int] | None:
    return None if group is None else (group.rank, group.size)


def in_a_group_of_the_caller() -> bool:
    """As in a worker of Ray Train."""
    place = on_ranks(group_of)
    return place == (dist.get_rank(), 2) and dist.is_initialized()


def test_new_processes_are_refused_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--nproc: got 2 under a launcher"):
        on_ranks(group_of, nproc=2)


# Ranks and plans ------------------------------------------------------------------------------------------


def plan_of(folder: str, steps: int, sharding: str, again: bool) -> Mapping[str, Any]:
    """Train up to a step; return the plan. With `again`, no plan may be made."""
    own = config(folder, every=1, resume=True)
    parallel = ParallelConfig(sharding=sharding)  # type: ignore[arg-type]
    own = replace(own, train=replace(own.train, max_steps=steps), parallel=parallel)
    with pytest.MonkeyPatch.context() as patch:
        if again:
            patch.delattr("tilerec.parallel.made_plan.EmbeddingShardingPlanner")
        plan = train(own, group=ProcessGroupComms()).model.plan
    assert isinstance(plan, ShardingPlan)
    return plan.to_json()


def test_ranks_of_the_caller_plan_once_for_the_same_settings(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        assert ranks.run(in_a_group_of_the_caller) == [True, True]
        first = ranks.run(plan_of, str(tmp_path), 2, "row_wise", False)[0]
        assert read_metadata(checkpoints(tmp_path / "checkpoints")[-1].path)["plan"] == first
        assert ranks.run(plan_of, str(tmp_path), 3, "row_wise", True)[0] == first
        assert ranks.run(plan_of, str(tmp_path), 4, "column_wise", False)[0] != first
    with Ranks(1) as ranks:
        assert ranks.run(plan_of, str(tmp_path), 5, "column_wise", False)[0]["world_size"] == 1


def steps_with_replicas(folder: str, steps: int) -> int:
    own = config(folder, every=1, resume=True)
    own = replace(own, train=replace(own.train, max_steps=steps), parallel=ParallelConfig(group_size=1))
    return train(own, group=ProcessGroupComms()).steps


def test_a_run_with_replicas_continues_from_its_checkpoint(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        assert [ranks.run(steps_with_replicas, str(tmp_path), steps) for steps in (2, 3)] == [[2, 2], [3, 3]]


# Checkpoints that end every process that loads them ------------------------------------------------------------


def whole(*steps: int) -> list[Found]:
    return [Found(step, f"checkpoints/step-{step}") for step in steps]


def test_two_loads_that_did_not_end_lead_to_the_checkpoint_before(tmp_path: Path) -> None:
    attempts = LoadAttempts(tmp_path)
    assert [attempts.begin(whole(8, 4)) for _ in range(4)] == [8, 8, 4, 4]
    assert attempts.begin(whole(8, 4)) == 8  # never none
    assert attempts.begin(whole(12, 8, 4)) == 12


def test_a_load_that_ended_does_not_count(tmp_path: Path) -> None:
    attempts = LoadAttempts(tmp_path)
    for _ in range(3):
        assert attempts.begin(whole(8, 4)) == 8
        attempts.end(8)
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '{"8": "x"}', '{"8": null}'])
def test_a_damaged_count_costs_another_try(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert LoadAttempts(tmp_path).begin(whole(8, 4)) == 8


def die_in_load(group: ProcessGroupComms, folder: str) -> None:
    """Train on ranks of which one dies in the load of a checkpoint of step 8."""
    if group.rank == 1:
        load = CheckpointManager.resume

        def deadly(self: CheckpointManager, *args: Any, newest: int, **options: Any) -> Any:
            if newest == 8:
                os.kill(os.getpid(), signal.SIGKILL)
            return load(self, *args, newest=newest, **options)

        CheckpointManager.resume = deadly  # type: ignore[method-assign, assignment]
    warnings.simplefilter("ignore")
    run(config(folder))


@pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="starts three times two ranks: nightly")
def test_a_poisoned_checkpoint_does_not_stop_the_run_for_ever(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train(config(tmp_path), watchers=[StopAfter(9)])
    for _ in range(2):
        with pytest.raises(RankFailed, match="SIGKILL"):
            launch(2, die_in_load, str(tmp_path))
    assert json.loads((tmp_path / FILE).read_text()) == {"8": 2}
    launch(2, die_in_load, str(tmp_path))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["ranks"]) == (STEPS, 2)
    assert [found.step for found in checkpoints(tmp_path / "checkpoints")] == [8, 12]


def test_settings_that_do_not_fit_are_no_failed_load(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        train(config(tmp_path), watchers=[StopAfter(9)])
    own = config(tmp_path)
    for _ in range(3):
        with pytest.raises(ConfigError, match="batch_size"):
            run(replace(own, train=replace(own.train, batch_size=61)))
    assert not (tmp_path / FILE).exists()
