"""Recipes are whole, frozen, and the synthetic one learns towards what is reachable."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from tilerec.comms.process import ProcessGroupComms
from tilerec.recipes.registry import RECIPES, make_run, needs_data
from tilerec.testing import run_ranks
from tilerec.train.config import RunConfig
from tilerec.train.evaluate import Scores
from tilerec.train.loop import train
from tilerec.train.override import override_all, settings


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_returns_a_frozen_run_named_after_it(name: str) -> None:
    run = make_run(name, "somewhere" if needs_data(RECIPES[name]) else None)
    assert isinstance(run, RunConfig)
    assert run.name == name
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.train.batch_size = 3  # type: ignore[misc]
    assert settings(run)["train.batch_size"] == run.train.batch_size


def test_a_short_synthetic_run_gets_most_of_the_way_to_the_best_reachable_auc() -> None:
    run = override_all(
        make_run("synthetic"),
        [
            "data.train_rows=120000",
            "train.batch_size=512",
            "train.decay_steps=220",
            "data.held_out_rows=10000",
        ],
    )
    result = train(run)
    assert result.best is not None
    gained = (result.held_out.auc - 0.5) / (result.best.auc - 0.5)
    assert 0.85 < gained < 1.02


def test_the_criteo_recipe_runs_on_a_generated_file(tmp_path: Path) -> None:
    lines = []
    for index in range(300):
        click = index % 3 == 0
        counts = [str(5 * click + index % 7)] + [""] * 12
        lines.append("\t".join([str(int(click)), *counts, f"{index % 5:08x}", *["0badcafe"] * 25]))
    path = tmp_path / "criteo.txt"
    path.write_text("\n".join(lines) + "\n")
    run = override_all(make_run("criteo", str(path)), ["data.num_rows=50", "train.batch_size=16", "train.epochs=6"])
    result = train(run)
    assert result.held_out.samples == 30
    assert result.rows.rows == 300
    assert result.held_out.auc > 0.9


def _scores_of_rank(run: RunConfig) -> Scores:
    return train(run, group=ProcessGroupComms()).held_out


def test_movielens_scores_the_same_on_two_ranks(tmp_path: Path) -> None:
    """A source that every rank reads whole, shuffled, in batches that are never shared equally."""
    draw = random.Random(0)
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(1, 41):
        for movie in draw.sample(range(1, 60), 30):
            stars = 5 if (user + movie) % 2 else 2
            lines.append(f"{user},{movie},{stars},{draw.randrange(10**6)}")
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    run = override_all(make_run("movielens", str(tmp_path)), ["train.batch_size=33", "train.epochs=2"])
    single = train(run).held_out
    sharded = override_all(run, ["parallel.sharding=row_wise"])
    for scores in run_ranks(2, _scores_of_rank, sharded):
        assert scores.samples == single.samples == 400
        assert scores.auc == pytest.approx(single.auc, abs=2e-4)
        assert scores.log_loss == pytest.approx(single.log_loss, abs=1e-5)
