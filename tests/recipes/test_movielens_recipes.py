"""Recipes on MovieLens with features: tasks, splits, and the same scores on two ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.recipes.movielens import MovieLensTableData
from tilerec.recipes.registry import RECIPES, make_run
from tilerec.testing import run_ranks
from tilerec.train.config import RunConfig
from tilerec.train.evaluate import Scores
from tilerec.train.loop import train
from tilerec.train.override import override_all

NAMES = [name for name in RECIPES if name.startswith("movielens_")]
QUICK = ["train.batch_size=64", "train.epochs=4", "train.dense_optimizer.lr=0.01", "train.embedding_optimizer.lr=0.2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ratings of 5 and 2, decided by user and movie."""
    place = tmp_path_factory.mktemp("movielens")
    draw = random.Random(0)
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(1, 31):
        for movie in draw.sample(range(1, 40), 30):
            stars = 5 if (user % 3) + (movie % 3) >= 2 else 2
            lines.append(f"{user},{movie},{stars},{draw.randrange(10**6)}")
    (place / "ratings.csv").write_text("\n".join(lines) + "\n")
    movies = [
        f"{movie},Movie {movie} (19{50 + movie}),{'Drama' if movie % 2 else 'Comedy|War'}" for movie in range(1, 40)
    ]
    (place / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies]) + "\n")
    return place


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_learns_its_tasks(name: str, folder: Path) -> None:
    result = train(override_all(make_run(name, str(folder)), QUICK))
    two = name.removeprefix("movielens_") in ("shared_bottom", "mmoe", "ple")
    assert list(result.tasks) == (["rating_4", "rating_5"] if two else ["rating_4"])
    assert result.held_out.samples == 300
    assert result.held_out.auc > 0.9


def _scores(run: RunConfig) -> Scores:
    return train(run, group=ProcessGroupComms()).held_out


def test_two_ranks_score_as_one(folder: Path) -> None:
    run = override_all(make_run("movielens_mmoe", str(folder)), [*QUICK, "parallel.sharding=row_wise"])
    single = train(override_all(run, ["parallel.sharding=planned"])).held_out
    for scores in run_ranks(2, _scores, run):
        assert scores.log_loss == pytest.approx(single.log_loss, abs=1e-4)


def test_a_split_by_time_and_a_validation_part_hold_out_other_ratings(folder: Path) -> None:
    rows = MovieLensTableData(str(folder), split="time", held_out_share=0.2).table().rows
    latest = [t for t, part in zip(rows["timestamp"].to_pylist(), rows["part"].to_pylist(), strict=True) if part == 2]
    assert min(latest) >= max(t for t in rows["timestamp"].to_pylist() if t not in latest)
    data = MovieLensTableData(str(folder), split="time", held_out_share=0.2, validation=True).open()
    assert data.train_rows + data.held_out_rows == 900 - len(latest)
    assert data.held_out_rows == pytest.approx(180, abs=2)


def test_settings_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="split: got 'day'; expected 'user' or 'time'"):
        MovieLensTableData("x", split="day")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"likes: got none; expected at least one"):
        MovieLensTableData("x", likes=())
    with pytest.raises(ConfigError, match=r"held_out_share=0\.9; expected"):
        MovieLensTableData("x", held_out_share=0.9)
