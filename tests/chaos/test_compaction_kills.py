"""SIGKILL of a process that compacts a checkpoint: the run continues from it, and ends with the bits of a whole one."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.fault_counts import IN_COMPACTION, KILLS, RANDOM, SEED, Counts, survived
from tests.chaos.kills import READ, SAVE, dies_at, ends, killed
from tests.chaos.ledger import check_ledger, read_ledger
from tests.chaos.training import Finished, check_bits, newest, run_ranks, uninterrupted
from tilerec.checkpoint import compact
from tilerec.checkpoint.contents import SavedContents
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes: nightly")
STEPS, COMPACTED_AT = 8, 6


def compacting(path: str, at: int) -> tuple[int, float]:
    """Compact a checkpoint in a process that dies at a call; return the number of calls, and seconds."""
    began = time.perf_counter()
    with dies_at([*SAVE, READ], at) as count:
        compact(path)
    return count[0], time.perf_counter() - began


class Case:
    """A run whose newest checkpoint has changed rows only, and what it must end with."""

    def __init__(self, pool: Ranks, folder: Path) -> None:
        self.pool, self.folder, self.number = pool, folder, 0
        self.want: Finished = uninterrupted(pool, folder / "whole", STEPS, incremental=True)
        (folder / "made").mkdir()
        pool.run(run_ranks, str(folder / "made"), 1, COMPACTED_AT, True)
        made = SavedContents(self.path_in("made"))
        assert made.manifest.base is not None
        self.digest = made.digest()

    def path_in(self, run: str) -> Path:
        assert newest(self.folder / run) == COMPACTED_AT
        return self.folder / run / "checkpoints" / f"step-{COMPACTED_AT}"

    def copy(self) -> str:
        """Return the name of a copy of the run, before its compaction."""
        self.number += 1
        shutil.copytree(self.folder / "made", self.folder / str(self.number))
        return str(self.number)

    def check(self, name: str, again: bool) -> None:
        """Raise unless a copy continues after a kill; again: a second compaction ends before that."""
        path = self.path_in(name)
        assert SavedContents(path).digest() == self.digest
        if again:
            compact(path)
            left = SavedContents(path)
            assert left.manifest.base is None
            assert {file.name for file in path.iterdir()} == {"manifest.json", *left.manifest.files}
            assert left.digest() == self.digest
        run = self.folder / name
        self.pool.run(run_ranks, str(run), 2, STEPS, True)
        check_ledger(read_ledger(run), {1: 0, 2: COMPACTED_AT}, self.want.steps)
        check_bits(run, self.want)
        shutil.rmtree(run)


@pytest.mark.filterwarnings("error")
@NIGHTLY
@pytest.mark.parametrize(("world", "step"), [(1, 31), (1, 3), (2, 1)])
def test_a_kill_at_any_call_of_a_compaction_loses_nothing(
    pool: Pool, tmp_path: Path, world: int, step: int, counts: Counts
) -> None:
    case = Case(pool(world), tmp_path)
    [(total, _)] = pool(1).run(compacting, str(case.path_in(case.copy())), -1)
    for at in range(0, total, step):
        name = case.copy()
        assert killed(pool(1), compacting, str(case.path_in(name)), at)
        case.check(name, again=bool(at % 2))
        survived(counts, IN_COMPACTION)
    assert counts[KILLS] == len(range(0, total, step))


@NIGHTLY
@pytest.mark.filterwarnings("error")
def test_kills_at_random_moments_of_a_compaction_lose_nothing(pool: Pool, tmp_path: Path, counts: Counts) -> None:
    case = Case(pool(2), tmp_path)
    dice = random.Random(100 * SEED + 5)
    [(_, seconds)] = pool(1).run(compacting, str(case.path_in(case.copy())), -1)
    struck = 0
    for _ in range(10):
        name = case.copy()
        kill = not ends(pool(1), compacting, str(case.path_in(name)), -1, delay=dice.uniform(0, seconds), victims=[0])
        case.check(name, again=dice.random() < 0.5)
        struck += kill
    assert struck
    survived(counts, RANDOM, struck)
    counts[IN_COMPACTION] += struck
