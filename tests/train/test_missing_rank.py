"""A rank that does not reach a collective in time is named on all others, with its last stage, and no process stays."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.train.test_run_checkpoints import config
from tilerec.comms.process import ProcessGroupComms
from tilerec.train import launch as launcher
from tilerec.train.launch import RankFailed
from tilerec.train.loop import train
from tilerec.train.run_logger import Event, Watcher

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="waits for a time-out: nightly")
TIMEOUT_S = 2.0


class StuckAt(Watcher):
    """Never returns from an event, or stops the whole process."""

    def __init__(self, step: int, stopped: bool) -> None:
        self._step, self._stopped = step, stopped

    def record(self, event: Event) -> None:
        if event.step == self._step:
            threading.Event().wait(0.5 * TIMEOUT_S)  # at least one report
            if self._stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
            threading.Event().wait()

    def close(self) -> None:
        pass


def stuck(group: ProcessGroupComms, folder: str, late: int, stopped: bool) -> None:
    """Train with one rank that hangs after step 4; write the errors of the others."""
    own = config(folder, every=0)
    own = replace(own, train=replace(own.train, max_steps=0, epochs=50))
    try:
        train(own, group=group, watchers=[StuckAt(4, stopped)] if group.rank == late else [])
    except BaseException as error:
        (Path(folder) / f"error-{group.rank}").write_text(f"{type(error).__name__}: {error}")
        raise


@pytest.mark.parametrize(("late", "stopped"), [(1, False), pytest.param(0, True, marks=NIGHTLY)])
def test_a_late_rank_is_named_on_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: int, stopped: bool
) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 1.0)
    before = multiprocessing.active_children()
    with pytest.raises(RankFailed, match=f"ank {late} is missing: its last stage is step 5, log entry"):
        launcher.launch(3, stuck, str(tmp_path), late, stopped, timeout_s=TIMEOUT_S)
    for rank in {0, 1, 2} - {late}:
        text = (tmp_path / f"error-{rank}").read_text()
        assert text.startswith("CommsError: ")
        assert f"ank {late} is missing: its last stage is step 5, log entry" in text
    assert not {*multiprocessing.active_children()} - {*before}
