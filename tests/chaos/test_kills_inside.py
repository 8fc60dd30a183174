"""SIGKILL at every call inside of saves, loads, reshards and resizes: the run ends with the bits of a whole one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.elastic import RESHARD_AFTER, RESIZE_AFTER, STEPS, run_elastic
from tests.chaos.fault_counts import IN_LOAD, IN_RESHARD, IN_RESIZE, IN_SAVE, KILLS, Counts, survived
from tests.chaos.kills import LOAD, SAVE, dies_at, killed
from tests.chaos.ledger import check_ledger, read_ledger
from tests.chaos.training import check_bits, check_no_leftovers, newest, run_ranks, uninterrupted
from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.manager import latest
from tilerec.comms.process import ProcessGroupComms
from tilerec.testing.ranks import Ranks
from tilerec.train.run_checkpoints import RunCheckpoints

Pool = Callable[[int], Ranks]
NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes: nightly")
SHORT = 6  # steps


def dying(folder: str, attempt: int, kind: str, victim: int, at: int, incremental: bool = False) -> int:
    """Train as `run_ranks`; a rank dies at a call of saves or inside of a load. Return the number of these calls."""
    own = at if ProcessGroupComms().rank == victim else -1
    if kind == "save":  # another thread writes while training goes on
        with dies_at(SAVE, own) as count:
            run_ranks(folder, attempt, SHORT, incremental)
        return count[0]
    total = 0
    real = RunCheckpoints.resume

    def inside(self: RunCheckpoints, run: Any) -> bool:
        nonlocal total
        with dies_at(LOAD, own - total if own >= 0 else -1) as count:
            found = real(self, run)
        total += count[0]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunCheckpoints, "resume", inside)
        run_ranks(folder, attempt, SHORT, incremental)
    return total


def every_call_of(
    kind: str, pool: Ranks, folder: Path, victims: range, step: int, counts: Counts, incremental: bool = False
) -> None:  # fmt: skip
    """Kill each victim at each `step`-th call: of all loads, or of the last of three saves, which also removes one."""
    want = uninterrupted(pool, folder / "whole", SHORT, incremental)
    (folder / "count").mkdir()
    total = max(pool.run(dying, str(folder / "count"), 0, kind, -1, -1, incremental))
    if kind == "load":  # a run with a checkpoint to load
        total = max(pool.run(dying, str(folder / "count"), 1, kind, -1, -1, incremental))
    for victim in victims:
        for at in range(2 * total // 3 if kind == "save" else 0, total, step):
            run = folder / f"{victim}-{at}"
            run.mkdir()
            resumed = {1: 0}
            if kind == "load":
                pool.run(run_ranks, str(run), 1, SHORT // 2, incremental)
                resumed[2] = newest(run)
            attempt = len(resumed)
            if not killed(pool, dying, str(run), attempt, kind, victim, at, incremental):  # other ranks make more calls
                continue
            resumed[attempt + 1] = newest(run)
            pool.run(run_ranks, str(run), attempt + 1, SHORT, incremental)
            check_ledger(read_ledger(run), resumed, want.steps)
            check_bits(run, want)
            if resumed[attempt + 1] < SHORT:  # the next save removes them
                check_no_leftovers(run)
            survived(counts, IN_SAVE if kind == "save" else IN_LOAD)
    assert counts[KILLS]


@pytest.mark.filterwarnings("error")
def test_a_rank_killed_in_a_save_loses_nothing(pool: Pool, tmp_path: Path, counts: Counts) -> None:
    every_call_of("save", pool(2), tmp_path, range(1), 23, counts)


@NIGHTLY
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("kind", "incremental"), [("save", False), ("save", True), ("load", False), ("load", True)])
def test_ranks_killed_at_calls_of_a_save_or_a_load_lose_nothing(
    pool: Pool, tmp_path: Path, kind: str, incremental: bool, world: int, counts: Counts
) -> None:
    every_call_of(kind, pool(world), tmp_path, range(world), 3 * world, counts, incremental)


def every_change(pool: Ranks, folder: Path, victims: range, step: int, counts: Counts) -> None:
    """Kill each victim at each `step`-th collective of reshard and resize_ids."""
    calls = max(calls for calls, _ in pool.run(run_elastic, str(folder / "whole"), -1, -1))
    want = SavedContents(folder / "whole" / f"step-{STEPS}").digest()
    for victim in victims:
        for at in range(0, calls, step):
            run = folder / f"{victim}-{at}"
            if not killed(pool, run_elastic, str(run), victim, at):
                continue
            continued = pool.run(run_elastic, str(run), -1, -1)[0][1]
            found = latest(run)
            assert found is not None
            assert found.step == STEPS
            assert SavedContents(found.path).digest() == want
            survived(counts, {RESHARD_AFTER - 1: IN_RESHARD, RESIZE_AFTER - 1: IN_RESIZE}[continued])
    assert counts[IN_RESHARD]
    assert counts[IN_RESIZE]


@NIGHTLY
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("world", [2, 3])
def test_any_rank_killed_in_a_reshard_or_a_resize_loses_nothing(
    pool: Pool, tmp_path: Path, world: int, counts: Counts
) -> None:
    every_change(pool(world), tmp_path, range(world), 2, counts)
