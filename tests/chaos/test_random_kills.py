"""Runs that are killed at random moments, and continued, end with the bits and the samples of an uninterrupted run."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.chaos.fault_counts import IN_SAVE, RANDOM, SEED, Counts, survived
from tests.chaos.kills import ends
from tests.chaos.ledger import check_ledger, read_ledger
from tests.chaos.training import STEPS, Finished, check_bits, check_no_leftovers, newest, run_ranks, uninterrupted
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes: nightly")
MOST_KILLS_OF_A_RUN = 6


def strike(
    pool: Pool, worlds: Sequence[int], want: Finished, folder: Path, kills: int, dice: random.Random, counts: Counts,
    same: Callable[[Path], None], incremental: bool = False,
) -> None:  # fmt: skip
    """Kill runs until so many kills have struck; check each run after its end.

    Args:
        worlds: numbers of ranks to draw from at every start.
        same: raises unless a run has the results of the uninterrupted one.
    """
    done = number = 0
    while done < kills:
        number += 1
        run = folder / f"run-{number}"
        run.mkdir()
        resumed: dict[int, int] = {}
        here, ended = 0, False
        while not ended:
            attempt = len(resumed) + 1
            # Two kills may strike loads of one checkpoint. Then the one before it would be loaded, by design.
            (run / "load_attempts.json").unlink(missing_ok=True)
            resumed[attempt] = newest(run)
            world = dice.choice(worlds)
            args = (run_ranks, str(run), attempt, STEPS, incremental)
            if here == MOST_KILLS_OF_A_RUN or done + here == kills:
                pool(world).run(*args)
                ended = True
            else:
                one_or_all = [dice.randrange(world)] if dice.random() < 0.5 else range(world)
                ended = ends(pool(world), *args, delay=dice.uniform(0, want.seconds), victims=one_or_all)
                here += not ended
                counts[IN_SAVE] += not ended and any((run / "checkpoints").glob("*.tmp-*"))
        done += here
        check_ledger(read_ledger(run), resumed, want.steps)
        same(run)
        if resumed[attempt] < STEPS:  # the next save removes them
            check_no_leftovers(run)
        survived(counts, RANDOM, here)


def same_bits(pool: Pool, folder: Path, world: int, kills: int, counts: Counts, incremental: bool = False) -> None:
    want = uninterrupted(pool(world), folder / "whole", STEPS, incremental)
    dice = random.Random(100 * SEED + world)
    strike(pool, [world], want, folder, kills, dice, counts, lambda run: check_bits(run, want), incremental)


@NIGHTLY
@pytest.mark.filterwarnings("error")
def test_two_kills_on_two_ranks_change_no_bit_and_no_sample(pool: Pool, tmp_path: Path, counts: Counts) -> None:
    same_bits(pool, tmp_path, 2, 2, counts)


@NIGHTLY
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_many_kills_change_no_bit_and_no_sample(
    pool: Pool, tmp_path: Path, world: int, incremental: bool, counts: Counts
) -> None:
    same_bits(pool, tmp_path, world, 20, counts, incremental)


@NIGHTLY
@pytest.mark.filterwarnings("error")
def test_kills_between_numbers_of_ranks_change_no_sample_and_last_digits_only(
    pool: Pool, tmp_path: Path, counts: Counts
) -> None:
    want = uninterrupted(pool(1), tmp_path / "whole")
    furthest: dict[str, float] = {}

    def same(run: Path) -> None:
        got: dict[str, Tensor] = load_file(run / "model.safetensors")
        for name, value in want.weights.items():
            furthest[name] = max(furthest.get(name, 0.0), float((got[name] - value).abs().max()))

    strike(pool, [1, 2, 3], want, tmp_path, 10, random.Random(100 * SEED + 4), counts, same)
    assert max(furthest.values()) <= 1e-6, furthest
