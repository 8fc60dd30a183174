"""A fault at any moment of a save leaves the earlier checkpoint and never half of a new one."""

from __future__ import annotations

import errno
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.fault_counts import FAULTS, Counts
from tests.checkpoint.file_faults import Faults, Killed
from tilerec.checkpoint import CheckpointManager, latest, load
from tilerec.errors import FileError, InputError


def parts(step: int) -> dict[str, Any]:
    return {"rows": torch.full((20, 3), float(step)), "more": torch.arange(7) + step, "run": {"steps": step}}


def intact(folder: Path, steps: set[int]) -> int:
    """Return the step of the newest checkpoint, after a check that it is whole and one of these."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = latest(folder)
    assert found is not None
    assert found.step in steps
    values = load(found.path, dict.fromkeys(parts(0)))
    assert repr(values) == repr(parts(found.step))
    return found.step


def faults_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, make_error: Any, counts: Counts, keep_last: int = 2
) -> list[tuple[int, Any]]:
    """Save step 2 after step 1 with a fault at call 0, 1, …; return (newest step, error) for each."""
    found = []
    for at in range(1000):
        run = folder / str(at)
        manager = CheckpointManager(run, every=1, keep_last=keep_last)
        manager.save(1, parts(1))
        caught: BaseException | None = None
        with monkeypatch.context() as patch:
            faults = Faults(patch, at, make_error())
            try:
                manager.save(2, parts(2))
            except (Killed, OSError) as error:
                caught = error
        if not faults.fired:
            return found
        counts[FAULTS] += 1
        found.append((intact(run, {1, 2}), caught))
        # The run goes on after the fault, and leftovers do not matter.
        again = CheckpointManager(run, every=1, keep_last=keep_last)
        resumed = again.resume(dict.fromkeys(parts(0)))
        assert resumed is not None
        with monkeypatch.context() as patch:
            patch.setattr("warnings.warn", lambda *_, **__: None)
            again.save(3, parts(3))
        assert intact(run, {3}) == 3
    raise AssertionError


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_save_that_is_killed_at_any_call_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: Counts, keep_last: int
) -> None:
    steps = [step for step, _ in faults_of(tmp_path, monkeypatch, Killed, counts, keep_last)]
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}
    assert len(steps) > 8


def test_a_full_disk_at_any_call_is_an_error_and_leaves_no_new_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: Counts
) -> None:
    def full() -> OSError:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for at, (step, error) in enumerate(faults_of(tmp_path, monkeypatch, full, counts)):
        if step == 1:
            assert isinstance(error, FileError)
            assert "No space left on device" in str(error)
            assert "Free space" in str(error)
            assert {path.name for path in (tmp_path / str(at)).iterdir()} <= {"step-1", "step-3", "step-2"}


def test_a_read_only_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(FileError, match="Permission denied"):
        CheckpointManager(tmp_path).save(1, parts(1))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("file", ["manifest.json", "rank0-0.safetensors"])
def test_a_flipped_bit_anywhere_is_found_and_the_checkpoint_before_is_loaded(
    tmp_path: Path, file: str, share: float
) -> None:
    manager = CheckpointManager(tmp_path, every=1)
    manager.save(1, parts(1))
    manager.save(2, parts(2))
    path = tmp_path / "step-2" / file
    data = bytearray(path.read_bytes())
    data[int(share * len(data))] ^= 4
    path.write_bytes(data)
    with pytest.raises(InputError):
        load(tmp_path / "step-2", dict.fromkeys(parts(0)))
    with pytest.warns(UserWarning, match="step-2"):
        resumed = CheckpointManager(tmp_path).resume(dict.fromkeys(parts(0)))
    assert resumed is not None
    assert repr(resumed) == repr((1, parts(1)))


def test_a_checkpoint_with_damaged_bytes_is_replaced_when_the_run_reaches_its_step_again(tmp_path: Path) -> None:
    for step in (1, 2):
        CheckpointManager(tmp_path).save(step, parts(step))
    path = tmp_path / "step-2" / "rank0-0.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    manager = CheckpointManager(tmp_path)
    with pytest.warns(UserWarning, match="step-2"):
        manager.resume(dict.fromkeys(parts(0)))
    manager.save(2, parts(2))
    assert intact(tmp_path, {2}) == 2


def test_two_jobs_that_save_the_same_step_leave_one_whole_checkpoint(tmp_path: Path) -> None:
    from tilerec.checkpoint.folder import folder_at
    from tilerec.checkpoint.saving import save

    late = folder_at(tmp_path / "step-1")
    late.begin("slow", first=True)
    save(tmp_path / "step-1", parts(1))
    with pytest.raises(FileExistsError):
        late.commit(b"")
    late.abandon()
    assert intact(tmp_path, {1}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]


def test_folders_that_only_look_like_checkpoints_do_not_count(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(5, parts(5))
    for name in ("step-9.tmp-1", "step-07", "step--1", "step-", "step-1e3", "9"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-8").mkdir()
    with pytest.warns(UserWarning, match=r"step-8.*no manifest"):
        found = latest(tmp_path)
    assert found is not None
    assert found.step == 5
    assert latest(tmp_path / "nothing") is None
