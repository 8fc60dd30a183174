"""Runs that stop at any moment continue from their newest checkpoint with the bits of an uninterrupted run."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.checkpoint.contents import SavedContents, differences
from tilerec.checkpoint.manager import checkpoints, latest
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import CommsError, ConfigError
from tilerec.parallel.full_state import full_state_dict
from tilerec.recipes.data import SyntheticData
from tilerec.recipes.model import DLRMConfig
from tilerec.testing import Ranks
from tilerec.train.config import CheckpointConfig, ParallelConfig, RunConfig, TrainConfig
from tilerec.train.loop import train
from tilerec.train.run_logger import Event, Watcher

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="a second form: nightly")
STEPS, EVERY = 12, 4


class Stopped(BaseException):
    """The process ends here."""


class StopAfter(Watcher):
    """Stops the run at the first event from a step on."""

    def __init__(self, step: int) -> None:
        self._step = step

    def record(self, event: Event) -> None:
        if event.step >= self._step:
            raise Stopped

    def close(self) -> None:
        pass


def config(folder: Path | str, **checkpoint: Any) -> RunConfig:
    return RunConfig(
        name="small",
        data=SyntheticData(num_rows=(40, 20), num_dense=3, train_rows=512, held_out_rows=120),
        model=DLRMConfig(embedding_dim=4, dense_arch=(8,), over_arch=(8,)),
        train=TrainConfig(batch_size=60, eval_batch_size=60, log_every=1, epochs=2, max_steps=STEPS),
        log_dir=str(folder),
        checkpoint=CheckpointConfig(**{"every": EVERY, **checkpoint}),
    )


def weights(model: Any, group: ProcessGroupComms | None) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in (model.state_dict() if group is None else full_state_dict(model)).items()}


def run(group: ProcessGroupComms | None, own: RunConfig, stop: int = 0) -> dict[str, Tensor]:
    """Train; with `stop`, end after that many steps as a killed process does, then start again with resume."""
    if stop:
        with pytest.raises(Stopped):
            train(own, group=group, watchers=[StopAfter(stop)])
        own = replace(own, checkpoint=replace(own.checkpoint, resume=True))
    return weights(train(own, group=group).model, group)


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def events(folder: Path) -> list[tuple[int, float, float]]:
    """Return step, loss and AUC of the log entries of training."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["auc"]) for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("stop", [1, EVERY - 1, EVERY, EVERY + 1, 9, STEPS])
def test_a_stopped_run_continues_with_the_same_bits(tmp_path: Path, stop: int) -> None:
    want = run(None, config(tmp_path / "whole", every=0))
    same(run(None, config(tmp_path / "stopped"), stop), want)
    lines = [json.loads(line) for line in (tmp_path / "stopped" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    samples = [line["samples"] for line in lines if line["kind"] == "train"]
    assert samples == sorted(set(samples))


def on_ranks(folder: str, stop: int, resume: bool) -> dict[str, Tensor] | None:
    """Train on all ranks; return None from a run that stops."""
    own = replace(config(folder, resume=resume), parallel=ParallelConfig(sharding="row_wise"))
    group = ProcessGroupComms()
    if not stop:
        return weights(train(own, group=group).model, group)
    with pytest.raises((Stopped, CommsError)):
        train(own, group=group, watchers=[StopAfter(stop)])
    return None


@pytest.mark.parametrize("size", [pytest.param(2, marks=NIGHTLY), 3])
def test_ranks_that_all_stop_continue_with_the_same_bits(tmp_path: Path, size: int) -> None:
    with Ranks(size) as ranks:
        want = ranks.run(on_ranks, str(tmp_path / "whole"), 0, False)[0]
        ranks.run(on_ranks, str(tmp_path / "stopped"), 6, False)
    with Ranks(size) as ranks:
        for got in ranks.run(on_ranks, str(tmp_path / "stopped"), 0, True):
            same(got, want)
    assert events(tmp_path / "stopped") == events(tmp_path / "whole")


def go_on(folder: str) -> dict[str, Tensor]:
    return run(ProcessGroupComms(), config(folder, resume=True))


def test_another_number_of_ranks_continues_within_rounding(tmp_path: Path) -> None:
    want = run(None, config(tmp_path / "whole", every=0))
    folder = tmp_path / "stopped"
    with pytest.raises(Stopped):
        train(config(folder), watchers=[StopAfter(6)])
    with Ranks(2) as ranks:
        got = ranks.run(go_on, str(folder))[0]
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6)
    for (step, *numbers), (wanted, *others) in zip(events(folder), events(tmp_path / "whole"), strict=True):
        assert step == wanted
        # A window that began anew would change the AUC by more than 0.01.
        assert numbers == pytest.approx(others, abs=2e-3)
    assert latest(folder / "checkpoints").step == STEPS  # type: ignore[union-attr]


@pytest.mark.parametrize("window", [100, 50_000])
def test_log_entries_between_two_checkpoints_go_on(tmp_path: Path, window: int) -> None:
    """An entry covers steps before and after the checkpoint, and the AUC's window too."""

    def own(name: str) -> RunConfig:
        given = config(tmp_path / name)
        return replace(given, train=replace(given.train, log_every=3, metric_window=window))

    run(None, own("whole"))
    run(None, own("stopped"), stop=6)
    assert events(tmp_path / "stopped") == events(tmp_path / "whole")


def test_a_checkpoint_does_not_change_the_run(tmp_path: Path) -> None:
    same(run(None, config(tmp_path / "a")), run(None, config(tmp_path / "b", every=0)))
    assert [found.step for found in checkpoints(tmp_path / "a" / "checkpoints")] == [8, 12]
    assert not (tmp_path / "b" / "checkpoints").exists()


def test_equal_runs_have_equal_checkpoints(tmp_path: Path) -> None:
    run(None, config(tmp_path / "a"))
    run(None, config(tmp_path / "b"), stop=7)
    a, b = (SavedContents(tmp_path / name / "checkpoints" / "step-12") for name in "ab")
    assert not list(differences(a, b))


def test_resume_without_a_checkpoint_begins_the_run(tmp_path: Path) -> None:
    got = run(None, config(tmp_path / "a", every=0, resume=True))
    same(got, run(None, config(tmp_path / "b", every=0)))


def test_a_finished_run_that_resumes_keeps_its_model_and_its_logs(tmp_path: Path) -> None:
    want = run(None, config(tmp_path / "a"))
    log = (tmp_path / "a" / "metrics.jsonl").read_text()
    same(run(None, config(tmp_path / "a", resume=True)), want)
    assert (tmp_path / "a" / "metrics.jsonl").read_text() == log
    steps = [event.step for path in sorted((tmp_path / "a").glob("events.*")) for event in _tensorboard(path, "eval/")]
    assert steps == [STEPS]


def _tensorboard(path: Path, start: str) -> list[Any]:
    """Return the events of a file of TensorBoard whose first tag has a start."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found = LegacyEventFileLoader(str(path)).Load()
    return [event for event in found if event.summary.value and event.summary.value[0].tag.startswith(start)]


def test_other_data_or_batches_are_refused_by_name(tmp_path: Path) -> None:
    run(None, config(tmp_path))
    own = config(tmp_path, resume=True)
    other = replace(own, train=replace(own.train, batch_size=61))
    with pytest.raises(ConfigError, match=r"train.batch_size = 61; expected 60"):
        train(other)
    assert isinstance(own.data, SyntheticData)
    with pytest.raises(ConfigError, match=r"data.seed = 5; expected 0"):
        train(replace(own, data=replace(own.data, seed=5)))


def test_checkpoints_need_a_log_dir(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="log_dir"):
        train(config(""))
    with pytest.raises(ConfigError, match=r"checkpoint.every: got -1"):
        config(tmp_path, every=-1)
