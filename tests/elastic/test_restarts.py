"""Runs whose processes are killed and rejoin under torchrun train every sample once, and end with the same model."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.elastic.agents import PATIENCE, Agent, free_port, latest_step, starts_of, wait_for, wait_for_start
from tests.elastic.ledger_job import EPOCHS, ROWS, STEPS, on_ranks, trained_rows
from tilerec.train.launch import RankFailed, launch

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes: nightly")
OTHER_RANKS = 1e-6
"""Largest difference of a weight from a run on another number of ranks, which rounds differently. Weights reach 0.8."""


def check(folder: Path, whole: Path, *, tolerance: float = 0.0) -> None:
    """Compare a run's ledger and model with those of a run without an interruption; tolerance 0: the same bits."""
    rows = trained_rows(folder)
    assert list(rows) == list(range(1, STEPS + 1))
    assert rows == trained_rows(whole)
    for epoch in range(EPOCHS):
        part = [rows[step] for step in range(1 + epoch * STEPS // EPOCHS, 1 + (epoch + 1) * STEPS // EPOCHS)]
        total = sum(part, Counter())
        assert len(total) == ROWS
        assert set(total.values()) == {1}
    got, want = (load_file(run / "model.safetensors") for run in (folder, whole))
    assert list(got) == list(want)
    furthest = {name: float((got[name] - value).abs().max()) for name, value in want.items()}
    assert max(furthest.values()) <= tolerance, furthest
    if not tolerance:
        for name, value in want.items():
            assert got[name].numpy().tobytes() == value.numpy().tobytes(), name


def test_a_killed_rank_loses_and_repeats_no_sample(tmp_path: Path, whole_run: Callable[..., Path]) -> None:
    folder = str(tmp_path / "run")
    with pytest.raises(RankFailed, match="killed by signal SIGKILL"):
        launch(2, on_ranks, folder, (23, 1))
    assert latest_step(tmp_path) == 23
    launch(3, on_ranks, folder, ())
    check(tmp_path / "run", whole_run(), tolerance=OTHER_RANKS)


@NIGHTLY
@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_torchrun_restarts_a_killed_worker_and_no_bit_changes(
    tmp_path: Path, nproc: int, whole_run: Callable[..., Path]
) -> None:
    step = random.Random(nproc).randrange(2, STEPS)
    with Agent(tmp_path, nproc, f"kill={step}:{nproc - 1}") as agent:
        assert agent.process.wait() == 0, (tmp_path / "errors.txt").read_text()
    assert starts_of(tmp_path) == [nproc, nproc]
    check(tmp_path / "run", whole_run(nproc))
    check(tmp_path / "run", whole_run(), tolerance=OTHER_RANKS)


def leave_and_rejoin(folder: Path, hosts: tuple[int, int], seed: int, *, alone: bool) -> list[int]:
    """Run on two hosts; kill the second one at two random steps, and start it again. Return the ranks of each start.

    Args:
        alone: the first host trains without the second one before that returns; else it waits.
    """
    dice = random.Random(seed)
    port, patience = free_port(), 1 if alone else PATIENCE
    words = ("pace=0.3", f"small={hosts[0]}" if alone else "small=0")
    with Agent(folder, hosts[0], *words, port=port, host=True, patience=patience) as first:
        second = Agent(folder, hosts[1], *words, port=port, patience=patience)
        for part in (1, 2):
            wait_for(folder, dice.randrange(STEPS * part // 4, STEPS * (part + 1) // 4))
            second.kill()
            if alone:
                wait_for_start(folder, hosts[0])
            starts = len(starts_of(folder))
            second = Agent(folder, hosts[1], *words, port=port, patience=patience)
            wait_for_start(folder, sum(hosts), starts)
        with second:
            assert first.process.wait() == 0, (folder / "errors.txt").read_text()
    return starts_of(folder)


@NIGHTLY
@pytest.mark.parametrize(
    ("hosts", "seed"),
    [*(((1, 1), seed) for seed in range(3)), *(((2, 2), seed) for seed in range(3)), ((1, 2), 0), ((2, 1), 0)],
)
def test_hosts_that_leave_and_rejoin_train_every_sample_once(
    tmp_path: Path, hosts: tuple[int, int], seed: int, whole_run: Callable[..., Path]
) -> None:
    """16 random steps; 2 ranks and 1, 4 and 2, 3 and 1, 3 and 2."""
    starts = leave_and_rejoin(tmp_path, hosts, 10 * sum(hosts) + seed, alone=True)
    assert set(starts) == {hosts[0], sum(hosts)}
    assert starts.count(sum(hosts)) > 1
    check(tmp_path / "run", whole_run(), tolerance=OTHER_RANKS)


@NIGHTLY
@pytest.mark.parametrize("hosts", [(1, 1), (1, 2), (2, 2)])
def test_hosts_that_rejoin_while_the_other_waits_change_no_bit(
    tmp_path: Path, hosts: tuple[int, int], whole_run: Callable[..., Path]
) -> None:
    """6 random steps; 2, 3 and 4 ranks in all starts."""
    starts = leave_and_rejoin(tmp_path, hosts, 10 * sum(hosts) + 5, alone=False)
    assert len(starts) > 2
    assert set(starts) == {sum(hosts)}
    check(tmp_path / "run", whole_run(*hosts))
