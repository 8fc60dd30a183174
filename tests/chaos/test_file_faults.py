"""Files that the system cuts off, refuses or damages: the newest whole checkpoint is found, and no half one."""

from __future__ import annotations

import ast
import os
import resource
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tilerec.checkpoint
from tests.chaos.fault_counts import FAULTS, HALF, Counts
from tilerec.checkpoint import CheckpointManager, latest
from tilerec.errors import ConfigError, FileError, TilerecError
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes: nightly")
ROWS = 150
TEXT = "x" * 2000  # so that the manifest is larger than the data, and a disk can be full in the middle of it


def parts(step: int, job: int = 0) -> dict[str, Any]:
    value = float(100 * job + step)
    run = {"steps": step, "job": job, "text": TEXT}
    return {"rows": torch.full((ROWS, 3), value), "more": torch.arange(7) + step, "run": run}


def accepted(folder: Path, counts: Counts) -> int:
    """Return the step of the newest checkpoint that loads; count it if it is not as it was saved."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = CheckpointManager(folder).resume(dict.fromkeys(parts(0)))
    assert found is not None
    step, values = found
    as_saved = repr(values) == repr(parts(step, values["run"]["job"]))
    counts[HALF] += not as_saved
    assert as_saved
    return step


# ------------------------------------------------------------------------------------------------------ no more space


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let the kernel cut off each write at this size of a file, as a full disk does; the write after it fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_limited(folder: str, rank: int, size: int) -> str:
    """Save step 2 where one rank's files are cut off; return the error."""
    own = int(os.environ["RANK"])
    with files_of_at_most(size if own == rank else 1 << 40):
        try:
            CheckpointManager(folder).save(2, parts(2))
        except TilerecError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def sizes_of(folder: Path) -> int:
    return max(path.stat().st_size for path in (folder / "step-2").iterdir())


@pytest.mark.parametrize(
    ("world", "step"), [(1, 797), *(pytest.param(world, 197, marks=NIGHTLY) for world in (1, 2, 3))]
)
def test_a_disk_that_is_full_at_any_byte_is_an_error_and_leaves_no_new_files(
    pool: Pool, tmp_path: Path, world: int, step: int, counts: Counts
) -> None:
    pool(world).run(save_limited, str(tmp_path / "free"), -1, 0)
    largest = sizes_of(tmp_path / "free")
    shutil.rmtree(tmp_path / "free")
    for rank in range(world):
        run = tmp_path / str(rank)
        CheckpointManager(run).save(1, parts(1))
        for size in [*range(0, largest, step), largest - 1]:
            errors = pool(world).run(save_limited, str(run), rank, size)
            if all(errors):
                assert "File too large" in "".join(errors)
                counts[FAULTS] += 1
                assert accepted(run, counts) == 1
                assert [path.name for path in run.iterdir()] == ["step-1"]
            else:  # this rank writes no file of that size
                assert rank
                assert accepted(run, counts) == 2
                shutil.rmtree(run / "step-2")


def save_as_other_user(folder: str) -> str:
    """Save without the rights of root; return the error."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        CheckpointManager(folder).save(2, parts(2))
    except FileError as error:
        return str(error)
    finally:
        if root:
            os.seteuid(0)
    return ""


def test_a_read_only_folder_is_an_error_and_changes_nothing(pool: Pool, tmp_path: Path, counts: Counts) -> None:
    run = tmp_path / "run"
    CheckpointManager(run).save(1, parts(1))
    run.chmod(0o555)
    try:
        (error,) = pool(1).run(save_as_other_user, str(run))
    finally:
        run.chmod(0o755)
    counts[FAULTS] += 1
    assert "Permission denied" in error
    assert "earlier checkpoints are unchanged" in error
    assert accepted(run, counts) == 1


# ------------------------------------------------------------------------------------------------------------ damage


def damages(folder: Path, step: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield ways to damage a checkpoint; each is used on a whole one. step: bytes between two flips and cuts."""

    def replaced(path: Path, data: bytes) -> Callable[[], None]:
        return lambda: (path.write_bytes(data), None)[1]

    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        for at in range(0, len(data), step):
            yield (
                f"flipped byte {at} of {path.name}",
                replaced(path, data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]),
            )
            yield f"{path.name} cut at {at}", replaced(path, data[:at])
        yield f"zeros at the end of {path.name}", replaced(path, data[:-16] + bytes(16))
        yield f"{path.name} with more bytes", replaced(path, data + bytes(7))
        yield f"{path.name} missing", path.unlink
        other = folder.with_name("step-1") / path.name
        yield f"{path.name} of another step", replaced(path, other.read_bytes())


@pytest.mark.parametrize("step", [431, pytest.param(29, marks=NIGHTLY)])
def test_any_damage_is_found_and_the_checkpoint_before_is_loaded(tmp_path: Path, step: int, counts: Counts) -> None:
    run = tmp_path / "run"
    for saved in (1, 2):
        CheckpointManager(run).save(saved, parts(saved))
    whole = {path: path.read_bytes() for path in (run / "step-2").iterdir()}
    missed = []
    for name, damage in list(damages(run / "step-2", step)):
        damage()
        counts[FAULTS] += 1
        if accepted(run, counts) != 1:
            missed.append(name)
        for path, data in whole.items():
            path.write_bytes(data)
    # The manifest of step 1 with the files of step 2 has wrong checksums; so has the other way round.
    assert not missed
    assert accepted(run, counts) == 2


def test_a_whole_folder_that_was_not_renamed_yet_does_not_count_and_is_removed(tmp_path: Path, counts: Counts) -> None:
    for saved in (1, 2):
        CheckpointManager(tmp_path).save(saved, parts(saved))
    (tmp_path / "step-2").rename(tmp_path / "step-2.tmp-0123456789abcdef")
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-2.tmp-00.old-0f")  # killed while it was removed
    counts[FAULTS] += 2
    assert accepted(tmp_path, counts) == 1
    CheckpointManager(tmp_path).save(3, parts(3))
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-3"}


# ------------------------------------------------------------------------------------------------- jobs and clocks


def saves(folder: str, job: int, steps: int) -> int:
    """Save steps where another job does, too; return the number of saves that failed."""
    failed = 0
    manager = CheckpointManager(folder, keep_last=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of checkpoints that the other job has removed
        for step in range(1, steps + 1):
            try:
                manager.save(step, parts(step, job))
            except (FileError, ConfigError):
                failed += 1
    return failed


def test_two_jobs_that_save_to_one_folder_leave_whole_checkpoints_of_either(tmp_path: Path, counts: Counts) -> None:
    jobs = [Ranks(1), Ranks(1)]
    steps = 60
    failed: list[int] = []
    threads = [
        threading.Thread(target=lambda job=job: failed.extend(jobs[job].run(saves, str(tmp_path), job, steps)))
        for job in (0, 1)
    ]
    for thread in threads:
        thread.start()
    seen = 0
    while any(thread.is_alive() for thread in threads):  # a reader sees whole ones at any moment
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = CheckpointManager(tmp_path).resume(dict.fromkeys(parts(0)))
        if found is not None:
            seen += 1
            whole = repr(found[1]) == repr(parts(found[0], found[1]["run"]["job"]))
            counts[HALF] += not whole
            assert whole
    for thread, job in zip(threads, jobs, strict=True):
        thread.join()
        job.close()
    counts[FAULTS] += sum(failed)
    assert sum(failed) >= 1  # a step can have one checkpoint
    assert seen
    assert accepted(tmp_path, counts) == steps


def test_no_clock_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: Counts) -> None:
    """With the clock set back between saves, and times of files in reverse, the highest step is the newest one."""
    now = [2e9]

    def set_back() -> float:
        now[0] -= 1e6
        return now[0]

    monkeypatch.setattr("time.time", set_back)
    monkeypatch.setattr("time.time_ns", lambda: int(set_back() * 1e9))
    manager = CheckpointManager(tmp_path, keep_last=2)
    for step in range(1, 6):
        manager.save(step, parts(step))
        for path in [*tmp_path.rglob("*"), tmp_path]:
            os.utime(path, (1e9 - step, 1e9 - step))
        found = latest(tmp_path)
        assert found is not None
        assert found.step == step
        counts[FAULTS] += 1
    assert {path.name for path in tmp_path.iterdir()} == {"step-4", "step-5"}


def test_the_source_of_checkpoints_has_no_clock_but_the_monotonic_one() -> None:
    read = set()
    for path in Path(tilerec.checkpoint.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id in ("time", "datetime"):
                    read.add(f"{node.value.id}.{node.attr}")
                assert node.attr not in ("st_mtime", "st_ctime", "st_atime", "getmtime", "st_mtime_ns")
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert "datetime" not in [alias.name for alias in node.names]
    assert read <= {"time.monotonic"}
