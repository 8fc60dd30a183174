"""`tilerec stats`."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilerec.cli import app
from tilerec.data.statistics import Statistics
from tilerec.file_kind import STATS


def _stats(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["stats", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    lines = [f"{1 + i % 7},{1 + i % 31},{1 + i % 5},{i}" for i in range(2_000)]
    (tmp_path / "ratings.csv").write_text("\n".join(["userId,movieId,rating,timestamp", *lines]) + "\n")
    return tmp_path


def test_a_data_set_is_counted_and_written(ratings: Path) -> None:
    code, text = _stats(ratings, "--out", ratings / "s.json")
    assert code == 0, text
    assert "2,000 samples" in text
    assert STATS.has(ratings / "s.json")
    found = Statistics.load(ratings / "s.json")
    assert {name: one.distinct for name, one in found.features.items()} == {"userId": 7, "movieId": 31}


def test_a_recipe_is_counted_as_it_trains(ratings: Path) -> None:
    code, text = _stats(ratings, "--recipe", "movielens", "--out", ratings / "s.json")
    assert code == 0, text
    found = Statistics.load(ratings / "s.json")
    assert found.table_rows
    assert set(found.features) == {"user", "movie"}
    assert found.features["user"].distinct == 7


def test_a_run_file_is_counted_as_it_trains(ratings: Path) -> None:
    (ratings / "run.toml").write_text(
        '[data]\nkind = "files"\npath = ["ratings.csv"]\n[[data.columns.labels]]\ncolumn = "rating"\nat_least = 4\n'
        '[[data.columns.ids]]\ncolumn = "userId"\n[[data.columns.tables]]\nname = "userId"\nrows = 50\n'
        '[model]\nkind = "dlrm"\n'
    )
    code, text = _stats(ratings / "run.toml", "--out", ratings / "s.json")
    assert code == 0, text
    found = Statistics.load(ratings / "s.json")
    assert set(found.features) == {"userId"}
    assert found.table_rows
    assert "got --features" in _stats(ratings / "run.toml", "--features", "userId")[1].replace("\n", " ")


def test_lines_left_out_are_told(ratings: Path) -> None:
    with (ratings / "ratings.csv").open("a") as file:
        file.write("1,2\n")
    code, text = _stats(ratings, "--out", ratings / "s.json")
    assert code == 1
    assert "where column 'rating' is missing" in text.replace("\n", "")
    code, text = _stats(ratings, "--out", ratings / "s.json", "--on-bad-row", "skip", "--features", "movieId")
    assert code == 0, text
    assert "1 malformed lines skipped" in text
    assert set(Statistics.load(ratings / "s.json").features) == {"movieId"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "DATA: got nothing; expected a file or folder"),
        (("nowhere.csv",), "on opening it"),
        (("x", "--out", "no/such/folder/s.json"), "expected a file in an existing folder"),
        (
            ("x", "--recipe", "movielens", "--features", "a"),
            "recipe movielens: got --features, --separator or --format, too",
        ),
        (("x", "--format", "xml"), "format: got 'xml'"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments: tuple[str, ...], message: str) -> None:
    code, text = _stats(*arguments)
    assert code == 1
    assert message in text
    assert "Traceback" not in text
