"""EIO of any write, fsync or read on any rank: an error, the newest whole checkpoint is found, and no half one."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.chaos.fault_counts import EIO, FAULTS, Counts
from tests.chaos.kills import READ, WRITE, fails_at
from tests.chaos.ledger import check_ledger, read_ledger
from tests.chaos.test_file_faults import accepted, parts
from tests.chaos.training import check_bits, newest, run_ranks, uninterrupted
from tilerec.checkpoint import CheckpointManager
from tilerec.errors import TilerecError
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes: nightly")
DISK = [WRITE, (os, "fsync")]
SHORT = 6  # steps
TEXT = "Input/output error"


def own_call(rank: int, at: int) -> int:
    """Return the number of the call that fails here; -1 on other ranks than `rank`."""
    return at if int(os.environ["RANK"]) == rank else -1


def save_failing(folder: str, asynchronous: bool, rank: int, at: int) -> tuple[int, list[str]]:
    """Save step 2; a call of one rank fails. Return the number of calls, and texts of the error and of warnings."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as found, fails_at(DISK, own_call(rank, at), errno.EIO) as count:
        warnings.simplefilter("always")
        manager = CheckpointManager(folder, keep_last=1, asynchronous=asynchronous)
        try:
            manager.save(2, parts(2))
            manager.wait()
        except TilerecError as error:
            texts.append(str(error))
    return count[0], texts + [str(one.message) for one in found]


@pytest.mark.parametrize(
    ("world", "asynchronous"),
    [(1, False), *(pytest.param(*case, marks=NIGHTLY) for case in [(1, True), *product((2, 3), (False, True))])],
)
def test_eio_of_any_write_or_fsync_of_a_save_is_an_error_and_leaves_whole_checkpoints(
    pool: Pool, tmp_path: Path, world: int, asynchronous: bool, counts: Counts
) -> None:
    ranks = pool(world)
    calls = [count for count, _ in ranks.run(save_failing, str(tmp_path / "free"), asynchronous, -1, -1)]
    for rank in range(world):
        for at in range(calls[rank] + 2):  # the removal of step 1 makes a call more than a first save
            run = tmp_path / f"{rank}-{at}"
            CheckpointManager(run).save(1, parts(1))
            found = ranks.run(save_failing, str(run), asynchronous, rank, at)
            if found[rank][0] <= at:
                assert accepted(run, counts) == 2
                continue
            counts[FAULTS] += 1
            counts[EIO] += 1
            errors = [texts for _, texts in found]
            assert TEXT in "".join(errors[rank])
            step = accepted(run, counts)
            if any(text.startswith("Checkpoint step-1: it cannot be removed") for text in errors[rank]):
                assert step == 2
            else:  # no rank continues with a save that has failed on another
                assert all(errors)
            # Nothing of a failed save stays, unless it is complete.
            assert {path.name for path in run.iterdir() if ".old-" not in path.name} <= {"step-1", "step-2"}
            ranks.run(save_next, str(run))
            assert accepted(run, counts) == 3
            assert [path.name for path in run.iterdir()] == ["step-3"]


def save_next(folder: str) -> None:
    CheckpointManager(folder, keep_last=1).save(3, parts(3))


def run_failing(folder: str, attempt: int, incremental: bool, rank: int, at: int) -> int:
    """Train as `run_ranks`; a write or an fsync of one rank fails. Return the number of these calls."""
    with fails_at(DISK, own_call(rank, at), errno.EIO) as count:
        run_ranks(folder, attempt, SHORT, incremental)
    return count[0]


@NIGHTLY
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_run_that_eio_has_ended_continues_with_the_same_bits(
    pool: Pool, tmp_path: Path, world: int, incremental: bool, counts: Counts
) -> None:
    ranks = pool(world)
    want = uninterrupted(ranks, tmp_path / "whole", SHORT, incremental)
    (tmp_path / "count").mkdir()
    calls = ranks.run(run_failing, str(tmp_path / "count"), 0, incremental, -1, -1)
    for rank in range(world):
        for at in range(rank, calls[rank], 2 * world):
            run = tmp_path / f"{rank}-{at}"
            run.mkdir()
            with pytest.raises((TilerecError, UserWarning), match=TEXT):
                ranks.run(run_failing, str(run), 1, incremental, rank, at)
            counts[FAULTS] += 1
            counts[EIO] += 1
            resumed = {1: 0, 2: newest(run)}
            ranks.run(run_ranks, str(run), 2, SHORT, incremental)
            check_ledger(read_ledger(run), resumed, want.steps)
            check_bits(run, want)


def resume_failing(folder: str, rank: int, at: int) -> tuple[int, int, str]:
    """Resume where a read of one rank fails; return the number of reads, the step, and the text of the warning."""
    with warnings.catch_warnings(record=True) as found, fails_at([READ], own_call(rank, at), errno.EIO) as count:
        warnings.simplefilter("always")
        resumed = CheckpointManager(folder).resume(dict.fromkeys(parts(0)))
    assert resumed is not None
    step, values = resumed
    assert repr(values) == repr(parts(step))
    return count[0], step, "".join(str(one.message) for one in found)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=NIGHTLY)])
def test_eio_of_any_read_of_a_load_is_a_warning_and_the_checkpoint_before_is_loaded_on_all_ranks(
    pool: Pool, tmp_path: Path, world: int, counts: Counts
) -> None:
    for step in (1, 2):
        CheckpointManager(tmp_path).save(step, parts(step))
    calls = [count for count, *_ in pool(world).run(resume_failing, str(tmp_path), -1, -1)]
    for rank in range(world):
        assert calls[rank]
        for at in range(calls[rank]):
            found = pool(world).run(resume_failing, str(tmp_path), rank, at)
            counts[FAULTS] += 1
            counts[EIO] += 1
            assert [step for _, step, _ in found] == [1] * world
            assert TEXT in found[rank][2]
            assert all("step-2" in text for *_, text in found)
    assert accepted(tmp_path, counts) == 2
