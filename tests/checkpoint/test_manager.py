"""When checkpoints are saved, and which ones stay."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tilerec.checkpoint import CheckpointManager, latest
from tilerec.checkpoint.manager import LAST_STEP, checkpoints
from tilerec.errors import ConfigError, FileError


def steps(folder: Path | str) -> list[int]:
    return [found.step for found in checkpoints(folder)]


def test_the_last_ones_and_every_tenth_stay(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every=2, keep_last=2, keep_every=10)
    for step in range(27):
        manager.save_if_due(step, {"x": step})
    assert steps(tmp_path) == [0, 10, 20, 24, 26]


def test_zero_keeps_all_and_saves_none_by_itself(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=0)
    assert not manager.due(4)
    for step in range(4):
        manager.save(step, {"x": step})
    assert steps(tmp_path) == [0, 1, 2, 3]


def test_a_time_between_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    manager = CheckpointManager(tmp_path, seconds=60)
    assert not manager.due(1)
    now += 59
    assert not manager.due(2)
    now += 1
    assert manager.due(3)
    manager.save(3, {"x": 1})
    assert not manager.due(4)


def test_resume_loads_the_newest_and_does_not_save_it_again(tmp_path: Path) -> None:
    for step in (3, 11):
        CheckpointManager(tmp_path).save(step, {"x": torch.tensor(step)})
    manager = CheckpointManager(tmp_path, every=11)
    assert manager.resume({"x": None}) == (11, {"x": torch.tensor(11)})
    assert not manager.due(11)
    assert CheckpointManager(tmp_path / "other").resume({"x": None}) is None


def test_a_damaged_checkpoint_of_the_same_step_is_replaced_and_a_whole_one_stays(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"x": 1})
    manager.save(1, {"x": 2})
    assert CheckpointManager(tmp_path).resume({"x": None}) == (1, {"x": 1})
    with pytest.raises(FileError, match="File exists"):
        CheckpointManager(tmp_path).save(1, {"x": 3})
    (tmp_path / "step-1" / "manifest.json").write_bytes(b"{")
    CheckpointManager(tmp_path).save(1, {"x": 3})
    assert CheckpointManager(tmp_path).resume({"x": None}) == (1, {"x": 3})


def test_damaged_checkpoints_do_not_count_as_kept_and_leftovers_are_removed(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in (1, 2, 3):
        manager.save(step, {"x": step})
    (tmp_path / "step-3" / "manifest.json").unlink()
    for name in ("step-2.tmp-0a", "step-3.old-ff", "step-9.tmp-0a", "step-2.tmp-other"):
        (tmp_path / name).mkdir()
    manager.save(4, {"x": 4})
    assert {path.name for path in tmp_path.iterdir()} == {
        "step-2",
        "step-3",
        "step-4",
        "step-9.tmp-0a",
        "step-2.tmp-other",
    }
    manager.save(5, {"x": 5})
    assert steps(tmp_path) == [4, 5]


def test_object_stores_by_url() -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    url = "memory://jobs/run"
    try:
        manager = CheckpointManager(url, keep_last=2)
        for step in range(3):
            manager.save(step, {"x": torch.full((3, 2), step), "run": {"step": step}})
        assert steps(url) == [1, 2]
        found = latest(url)
        assert found is not None
        assert CheckpointManager(url).resume({"run": None}) == (2, {"run": {"step": 2}})
        memory.rm(f"{found.path}/manifest.json".removeprefix("memory:/"))
        with pytest.warns(UserWarning, match="no manifest"):
            assert CheckpointManager(url).resume({"run": None}) == (1, {"run": {"step": 1}})
    finally:
        memory.rm("/jobs", recursive=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("keep_last", -1), ("every", 1.5), ("every", "2"), ("keep_every", True), ("every", math.nan)]
    + [("seconds", value) for value in (-1, math.nan, math.inf, "9", True)],
)
def test_numbers_that_no_save_could_follow_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"CheckpointManager: got {name}={value!r}; expected a ")):
        CheckpointManager(tmp_path, **{name: value})


@pytest.mark.parametrize("step", [-1, 2.5, 2.0, 10**18, 10**20, True, math.nan, "3", None])
def test_steps_that_make_no_name_of_a_checkpoint_are_refused_before_anything_is_written(
    tmp_path: Path, step: Any
) -> None:
    manager = CheckpointManager(tmp_path / "m", every=1, incremental=True)
    for call in (manager.due, lambda step: manager.save(step, {"x": 1}), lambda step: manager.save_if_due(step, {})):
        with pytest.raises(ConfigError, match=re.escape(f"got step={step!r}; expected a whole number from 0 to 999,9")):
            call(step)
    assert not (tmp_path / "m").exists()


def test_the_first_and_the_last_step_have_checkpoints_that_are_found(tmp_path: Path) -> None:
    """Steps of numpy, too: a loop may count with them."""
    for step in (np.int64(0), 7, LAST_STEP):
        CheckpointManager(tmp_path).save(step, {"x": int(step)})
        assert CheckpointManager(tmp_path).resume({"x": None}) == (step, {"x": step})
