"""A run with checkpoints that a signal stops is saved, and goes on with the same bits."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.train.test_run_checkpoints import STEPS, config, same, weights
from tilerec.checkpoint.manager import latest
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import FileError
from tilerec.stop_signals import RunStopped
from tilerec.testing import Ranks
from tilerec.train import launch as launcher
from tilerec.train.config import RunConfig
from tilerec.train.loop import train
from tilerec.train.run_logger import Event, Watcher

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="a second form, or slow: nightly")
FAR = 1000


class SignalAt(Watcher):
    """Sends a signal to a process at an event; the run then needs no more time than its steps take."""

    def __init__(self, step: int, process: int = 0, number: int = signal.SIGTERM) -> None:
        self._step, self._process, self._number = step, process, number

    def record(self, event: Event) -> None:
        if event.kind == "train" and event.step == self._step:
            os.kill(self._process or os.getpid(), self._number)

    def close(self) -> None:
        pass


def long_run(folder: Path | str, **checkpoint: Any) -> RunConfig:
    own = config(folder, **{"every": FAR, **checkpoint})
    return replace(own, train=replace(own.train, epochs=FAR, max_steps=0))


def resumed_steps(folder: Path) -> RunConfig:
    """Return a config that goes on for 3 steps after the newest checkpoint."""
    found = latest(folder / "checkpoints")
    assert found is not None
    own = config(folder, every=FAR, resume=True)
    return replace(own, train=replace(own.train, epochs=FAR, max_steps=found.step + 3))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 143), (signal.SIGINT, 130)])
def test_a_stopped_run_is_saved_and_goes_on_with_the_same_bits(tmp_path: Path, number: int, code: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(RunStopped) as stopped:
        train(long_run(tmp_path / "stopped"), watchers=[SignalAt(5, number=number)])
    assert stopped.value.code == code
    assert signal.getsignal(number) is before
    found = latest(tmp_path / "stopped" / "checkpoints")
    assert found is not None
    assert found.step == stopped.value.step >= 5
    own = resumed_steps(tmp_path / "stopped")
    whole = replace(own, log_dir=str(tmp_path / "whole"), checkpoint=replace(own.checkpoint, resume=False))
    same(weights(train(own).model, None), weights(train(whole).model, None))


def stop_one_rank(folder: str, rank: int) -> int:
    """Train until one of the ranks is stopped; return the step."""
    group = ProcessGroupComms()
    with pytest.raises(RunStopped) as stopped:
        train(long_run(folder), group=group, watchers=[SignalAt(5)] if group.rank == rank else [])
    return stopped.value.step


def go_on(folder: str) -> dict[str, Tensor]:
    group = ProcessGroupComms()
    return weights(train(resumed_steps(Path(folder)), group=group).model, group)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=NIGHTLY)])
def test_a_signal_to_one_rank_stops_all_of_them_at_the_same_step(tmp_path: Path, rank: int) -> None:
    with Ranks(2) as ranks:
        steps = ranks.run(stop_one_rank, str(tmp_path), rank)
        found = latest(tmp_path / "checkpoints")
        assert found is not None
        assert steps == [found.step, found.step]
        ranks.run(go_on, str(tmp_path))


def launched(group: ProcessGroupComms, folder: str, process: int, slow: bool, number: int = signal.SIGTERM) -> None:
    """Train until the launching process is stopped."""
    if slow:
        save = ProcessGroupComms.all_gather_object

        def slow_save(self: ProcessGroupComms, value: Any) -> list[Any]:
            threading.Event().wait(2.5 * launcher.GRACE_S)
            ProcessGroupComms.all_gather_object = save  # type: ignore[method-assign]
            return save(self, value)

        watchers: list[Watcher] = [SlowFrom(5, slow_save)]
    else:
        watchers = []
    if not group.rank:
        watchers.append(SignalAt(5, process, number))
    train(long_run(folder), group=group, watchers=watchers)


class SlowFrom(Watcher):
    """Makes the next exchange of objects slow, which is that of a save."""

    def __init__(self, step: int, slow: Any) -> None:
        self._step, self._slow = step, slow

    def record(self, event: Event) -> None:
        if event.step == self._step:
            ProcessGroupComms.all_gather_object = self._slow  # type: ignore[method-assign]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_launcher_passes_the_signal_on_and_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 0.05)
    with pytest.raises(RunStopped) as stopped:
        launcher.launch(2, launched, str(tmp_path), os.getpid(), False, number, saves=True)
    assert stopped.value.code == code
    found = latest(tmp_path / "checkpoints")
    assert found is not None
    assert found.step > 5


def stopped_early(group: ProcessGroupComms, process: int) -> None:
    """Stop the launching process, and wait for the end, as ranks do that have no step yet."""
    if not group.rank:
        os.kill(process, signal.SIGINT)
    threading.Event().wait()


def test_ranks_that_stop_without_a_save_are_no_saved_run() -> None:
    with pytest.raises(SystemExit) as stopped:
        launcher.launch(2, stopped_early, os.getpid(), saves=True)
    assert not isinstance(stopped.value, RunStopped)
    assert stopped.value.code == 130


@NIGHTLY
def test_a_save_may_take_longer_than_the_grace_of_the_launcher(tmp_path: Path) -> None:
    with pytest.raises(RunStopped):
        launcher.launch(2, launched, str(tmp_path), os.getpid(), True, saves=True)
    assert latest(tmp_path / "checkpoints") is not None


def test_a_run_that_cannot_be_saved_does_not_end_as_one_that_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise FileError("checkpoint: got a full disk; expected free space. Free some.")

    monkeypatch.setattr("tilerec.checkpoint.saving.Planned.write", full)
    with pytest.raises(FileError, match="full disk"):
        train(long_run(tmp_path), watchers=[SignalAt(5)])


def test_a_signal_after_the_last_step_leaves_the_scores_to_the_next_start(tmp_path: Path) -> None:
    own = config(tmp_path)
    with pytest.raises(RunStopped):
        train(own, watchers=[SignalAt(STEPS)])
    result = train(replace(own, checkpoint=replace(own.checkpoint, resume=True)))
    assert result.steps == STEPS


def test_a_run_without_checkpoints_leaves_signals_alone(tmp_path: Path) -> None:
    class Look(Watcher):
        def record(self, event: Event) -> None:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

        def close(self) -> None:
            pass

    train(config(tmp_path, every=0), watchers=[Look()])
