"""The command line: it runs recipes, takes overrides, and says what is wrong in one line."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilerec.cli import app
from tilerec.recipes.registry import RECIPES

SMALL = [
    *("--set", "data.train_rows=256", "--set", "data.held_out_rows=64", "--set", "train.batch_size=64"),
    *("--set", "train.log_every=2"),
]


def _invoke(*arguments: str) -> tuple[int, str]:
    """Exit code and everything printed, with line breaks of the terminal's width taken out."""
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def ratings(tmp_path: Path) -> Path:
    draw = random.Random(0)
    lines = ["userId,movieId,rating,timestamp"]
    for user in range(1, 11):
        for movie in draw.sample(range(1, 30), 20):
            stars = 5 if (user + movie) % 3 else 2
            lines.append(f"{user},{movie},{stars},{draw.randrange(10**6)}")
    (tmp_path / "ratings.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_recipes_lists_every_recipe_and_whether_it_reads_files() -> None:
    code, text = _invoke("recipes")
    assert code == 0
    for name in RECIPES:
        assert name in text
    assert text.count("--data PATH") == 2


def test_train_prints_the_scores_and_writes_the_logs(tmp_path: Path) -> None:
    code, text = _invoke("train", "synthetic", *SMALL, "--log-dir", str(tmp_path / "log"))
    assert code == 0
    assert "best reachable" in text
    assert "256 samples in 4 steps" in text
    assert json.loads((tmp_path / "log" / "summary.json").read_text())["steps"] == 4


def test_logs_go_to_a_folder_of_their_own_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert _invoke("train", "synthetic", *SMALL)[0] == 0
    assert len(list(tmp_path.glob("runs/synthetic/*/summary.json"))) == 2
    assert _invoke("train", "synthetic", *SMALL, "--log-dir", "")[0] == 0
    assert len(list(tmp_path.rglob("summary.json"))) == 2


def test_show_prints_every_setting_in_the_form_that_set_takes(tmp_path: Path) -> None:
    code, text = _invoke("train", "synthetic", "--show", "--set", "train.batch_size=77", "--log-dir", "")
    assert code == 0
    assert "train.batch_size = 77\n" in text
    again = [argument for line in text.splitlines() for argument in ("--set", line.replace(" = ", "=", 1))]
    assert _invoke("train", "synthetic", "--show", "--log-dir", "", *again) == (0, text)


def test_movielens_runs_from_its_folder(ratings: Path) -> None:
    code, text = _invoke(
        "train", "movielens", "--data", str(ratings), "--log-dir", "", "--set", "train.epochs=1"
    )
    assert code == 0
    assert "100 held-out samples" in text


def test_bad_rows_stop_the_run_or_are_counted(ratings: Path) -> None:
    path = ratings / "ratings.csv"
    path.write_text(path.read_text() + "1,2,three,4\n1,2\n")
    code, text = _invoke("train", "movielens", "--data", str(ratings), "--log-dir", str(ratings / "log"))
    assert code == 1
    assert "ratings.csv:202: column 'rating' reads 'three', wanted a number in [0, 5]" in text
    assert "Traceback" not in text
    assert not (ratings / "log").exists()
    code, text = _invoke(
        "train",
        "movielens",
        "--data",
        str(ratings),
        "--on-bad-row",
        "skip",
        "--log-dir",
        "",
        "--set",
        "train.epochs=1",
    )
    assert code == 0
    assert "2 bad rows left out beside 200 good ones" in text
    assert "column 'rating' is missing" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["synthetik"], "There is no recipe 'synthetik'; did you mean 'synthetic'?"),
        (["nothing_here:run"], "No module named 'nothing_here'"),
        (["json:nothing"], "module 'json' has no function 'nothing'"),
        (["movielens"], "say where they are with --data PATH"),
        (["movielens", "--data", "/nowhere"], "/nowhere: cannot be opened (No such file or directory)"),
        (["criteo", "--data", "/nowhere"], "/nowhere: cannot be opened"),
        (["synthetic", "--data", "x"], "makes its own data"),
        (["synthetic", "--set", "train.batchsize=3"], "did you mean 'train.batch_size'?"),
        (["synthetic", "--device", "tpu9"], "train.device is 'tpu9'"),
        (["synthetic", "--on-bad-row", "skip"], "no setting 'data.on_bad_row'"),
        (["criteo", "--data", "x", "--on-bad-row", "fix"], "wanted one of error, skip"),
    ],
)
def test_mistakes_are_told_in_a_line_without_a_traceback(arguments: list[str], message: str) -> None:
    code, text = _invoke("train", *arguments, "--log-dir", "")
    assert code == 1
    assert text.startswith("error: ")
    assert message in text
    assert "Traceback" not in text


def test_a_recipe_of_the_users_own_runs_by_module_and_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_recipes_for_test.py").write_text(
        "import dataclasses\n"
        "from tilerec.recipes import synthetic\n"
        "def mine():\n"
        "    return dataclasses.replace(synthetic(), name='mine')\n"
        "def not_a_run():\n"
        "    return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    code, text = _invoke("train", "my_recipes_for_test:mine", *SMALL, "--log-dir", "")
    assert code == 0
    assert "mine: 64 held-out samples" in text
    code, text = _invoke("train", "my_recipes_for_test:not_a_run")
    assert code == 1
    assert "returned a int" in text


def test_python_dash_m_tilerec_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tilerec", "recipes"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "movielens" in done.stdout
