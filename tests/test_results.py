"""scripts/results.py: baselines against a slow count, and the parts of files that its tables are made from."""

from __future__ import annotations

import csv
import importlib.util
import math
import random
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilerec.recipes.movielens import MovieLensTableData
from tilerec.recipes.registry import RECIPES
from tilerec.train.override import override_all

FILE = Path(__file__).resolve().parent.parent / "scripts" / "results.py"
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="scripts are part of the repository, not of the wheel")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("results", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["results"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, draw = tmp_path_factory.mktemp("ratings"), random.Random(0)
    rows = [(draw.randrange(1, 9), draw.randrange(1, 20), draw.randrange(1, 6), t) for t in range(300)]
    lines = ["userId,movieId,rating,timestamp", *(",".join(map(str, row)) for row in rows)]
    (place / "ratings.csv").write_text("\n".join(lines) + "\n")
    movies = ["movieId,title,genres", *(f"{movie},M ({1950 + movie}),Drama" for movie in range(1, 20))]
    (place / "movies.csv").write_text("\n".join(movies) + "\n")
    return place


@pytest.mark.parametrize("users", [False, True])
def test_baselines_are_smoothed_shares_of_the_training_part(script: Any, folder: Path, users: bool) -> None:
    data = MovieLensTableData(str(folder))
    rows = data.table().rows.to_pylist()
    trained = [row for row in rows if row["part"] < 2]
    mean = sum(row["rating"] >= 4 for row in trained) / len(trained)

    def odds(share: float) -> float:
        return math.log(share / (1 - share))

    def share(name: str, value: int, strength: float) -> float:
        likes = [row["rating"] >= 4 for row in trained if row[name] == value]
        return (sum(likes) + strength * mean) / (len(likes) + strength)

    losses = []
    for row in rows:
        if row["part"] == 2:
            score = odds(share("movie", row["movie"], 2.0))
            if users:
                score += odds(share("user", row["user"], 5.0)) - odds(mean)
            probability = 1 / (1 + math.exp(-score))
            losses.append(-math.log(probability if row["rating"] >= 4 else 1 - probability))
    found = script.baseline(data, 4.0, (2.0, 5.0), users=users)
    assert found.samples == len(losses)
    assert found.log_loss == pytest.approx(np.mean(losses), rel=1e-6)


def test_the_settings_to_choose_from_are_settings_of_their_recipes(script: Any) -> None:
    for recipe, space in script.SPACES.items():
        for name, values in space.items():
            for value in values:
                if recipe in RECIPES and recipe.startswith("movielens"):
                    override_all(RECIPES[recipe]("data"), [f"{name}={value}"])
                else:
                    script.criteo_run(recipe, "folder", False, 0, extra=(f"{name}={value}",))
    for (recipe, split, tasks), sets in script.CHOSEN.items():
        if split != "lines":
            assert script.run_of(recipe, "data", split, tasks, 3).train.seed == 3
        assert sets


def test_the_last_lines_of_a_criteo_file_are_the_test_part(script: Any, tmp_path: Path) -> None:
    (tmp_path / "all.csv").write_text("Id,Label\n" + "".join(f"{i},{i % 2}\n" for i in range(25)))
    script.split_lines(str(tmp_path / "all.csv"), tmp_path)
    names = ("train", "validation", "test")
    parts = {name: list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines())) for name in names}
    assert [row["Id"] for part in parts.values() for row in part] == [str(i) for i in range(25)]
    assert [len(part) for part in parts.values()] == [21, 2, 2]


def test_a_wheel_becomes_a_folder_that_the_recipes_read(script: Any, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        ratings = ["user_id:token\titem_id:token\trating:float\ttimestamp:float"]
        ratings += [f"{u}\t{u % 3 + 1}\t{u % 5 + 1}\t{100 + u}" for u in range(1, 40) for _ in range(3)]
        archive.writestr("x/ml-100k/ml-100k.inter", "\n".join(ratings) + "\n")
        movies = ["item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq"]
        movies += ["1\tToy, Story\t1995\tComedy Drama", "2\tB\t1990\tDrama", "3\tC\t\tWar"]
        archive.writestr("x/ml-100k/ml-100k.item", "\n".join(movies) + "\n")
    rows = MovieLensTableData(script.unpack(str(tmp_path / "a.whl"), tmp_path)).table().rows
    assert rows.num_rows == 117
    assert set(rows["year"].to_pylist()) == {1995.0, 1990.0, None}
