"""The command line: it runs recipes, takes overrides, and says what is wrong in one line."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tilerec import calibrate_cli
from tilerec.cli import app
from tilerec.comms.group import Group
from tilerec.errors import FileError
from tilerec.file_kind import CALIBRATE
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.recipes.registry import RECIPES, needs_data
from tilerec.spec.speeds import PER_WIDTH, SINGLE
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

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
    assert text.count("--data PATH") == sum(map(needs_data, RECIPES.values()))


def test_train_prints_the_scores_and_writes_the_logs(tmp_path: Path) -> None:
    code, text = _invoke("train", "synthetic", *SMALL, "--log-dir", str(tmp_path / "log"))
    assert code == 0
    assert "best reachable" in text
    assert "256 samples in 4 steps" in text
    assert json.loads((tmp_path / "log" / "summary.json").read_text())["steps"] == 4


@pytest.mark.filterwarnings("ignore:.*The run continues without this log")
def test_scores_are_printed_where_a_full_disk_takes_no_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full from the second event on."""
    events = 0

    def record(log: object, event: object) -> None:
        nonlocal events
        events += 1
        if events > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    replaced = os.replace

    def rename(source: Path, target: Path) -> None:
        if target.name == "summary.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replaced(source, target)

    monkeypatch.setattr("tilerec.train.run_logger.JsonLines.record", record)
    monkeypatch.setattr("tilerec.atomic_file.os.replace", rename)
    code, text = _invoke("train", "synthetic", *SMALL, "--log-dir", str(tmp_path / "log"))
    assert code == 1
    assert "256 samples in 4 steps" in text
    assert text.index("best reachable") < text.index("error: log_dir")
    assert "got 2 incomplete logs" in text
    assert "No space left on device" in text
    assert not (tmp_path / "log" / "summary.json").exists()
    assert not list((tmp_path / "log").glob(".tilerec*"))


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
    code, text = _invoke("train", "movielens", "--data", str(ratings), "--log-dir", "", "--set", "train.epochs=1")
    assert code == 0
    assert "100 held-out samples" in text


def test_bad_rows_stop_the_run_or_are_counted(ratings: Path) -> None:
    path = ratings / "ratings.csv"
    path.write_text(path.read_text() + "1,2,three,4\n1,2\n")
    code, text = _invoke("train", "movielens", "--data", str(ratings), "--log-dir", str(ratings / "log"))
    assert code == 1
    assert "ratings.csv:202: column 'rating': got 'three'; expected a number in [0, 5]" in text
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
    assert "2 bad rows skipped, 200 good rows read" in text
    assert "column 'rating' is missing" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["synthetik"], "There is no recipe 'synthetik'. Did you mean 'synthetic'?"),
        (["nothing_here:run"], "No module named 'nothing_here'"),
        (["json:nothing"], "module 'json' has no function 'nothing'"),
        (["movielens"], "Pass their path with --data PATH"),
        (["movielens", "--data", "/nowhere"], "/nowhere: got 'No such file or directory' on opening it"),
        (["criteo", "--data", "/nowhere"], "/nowhere: got 'No such file or directory'"),
        (["synthetic", "--data", "x"], "generates its own data"),
        (["synthetic", "--set", "train.batchsize=3"], "Did you mean 'train.batch_size'?"),
        (["synthetic", "--device", "tpu9"], "train.device: got 'tpu9'"),
        (["synthetic", "--on-bad-row", "skip"], "no setting 'data.on_bad_row'"),
        (["criteo", "--data", "x", "--on-bad-row", "fix"], "expected one of error, skip"),
    ],
)
def test_mistakes_are_told_in_a_line_without_a_traceback(arguments: list[str], message: str) -> None:
    code, text = _invoke("train", *arguments, "--log-dir", "")
    assert code == 1
    assert text.startswith("error: ")
    assert message in text
    assert "Traceback" not in text


def test_a_recipe_of_the_users_own_runs_by_module_and_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# Ranks --------------------------------------------------------------------------------------------------------

# 61 samples are never shared equally.
UNEVEN = [
    *("--set", "data.train_rows=320", "--set", "data.held_out_rows=512", "--set", "train.batch_size=61"),
    *("--set", "train.log_every=2", "--set", "data.num_rows=50,40,30,20,10,10"),
]


def _summary(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def _assert_same_scores(folder: Path, other: Path) -> None:
    ours, theirs = _summary(folder), _summary(other)
    assert ours["held_out"].pop("auc") == pytest.approx(theirs["held_out"].pop("auc"), abs=2e-4)
    for part in ("held_out", "best"):
        assert ours[part] == pytest.approx(theirs[part], abs=2e-5)
    assert (ours["steps"], ours["samples"]) == (theirs["steps"], theirs["samples"])


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    # A machine whose name does not resolve has a loopback all the same.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    environment = {"COLUMNS": "200", "GLOO_SOCKET_IFNAME": loopback, "OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=240, env=environment
    )


def test_two_processes_print_once_and_score_as_one_does(tmp_path: Path) -> None:
    assert _invoke("train", "synthetic", *UNEVEN, "--log-dir", str(tmp_path / "one"))[0] == 0
    arguments = ["tilerec", "train", "synthetic", *UNEVEN, "--log-dir"]
    done = _run("-m", *arguments, str(tmp_path / "nproc"), "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("512 held-out samples") == 1
    assert done.stdout.count("320 samples in 6 steps") == 1
    assert " s of training on 2 ranks: " in done.stdout
    assert done.stdout.count("train step      2") == 1
    assert "Traceback" not in done.stderr
    _assert_same_scores(tmp_path / "nproc", tmp_path / "one")
    assert _summary(tmp_path / "nproc")["ranks"] == 2


@pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="tests/elastic use torchrun, too: nightly")
def test_torchrun_scores_as_one_process_does(tmp_path: Path) -> None:
    assert _invoke("train", "synthetic", *UNEVEN, "--log-dir", str(tmp_path / "one"))[0] == 0
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    done = _run(*torchrun, "tilerec", "train", "synthetic", *UNEVEN, "--log-dir", str(tmp_path / "torchrun"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("512 held-out samples") == 1
    _assert_same_scores(tmp_path / "torchrun", tmp_path / "one")


@pytest.fixture
def failing_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module whose recipe fails on rank 1 in the second step, as its setting `data.how` says."""
    (tmp_path / "failing_recipes_for_test.py").write_text(
        "import dataclasses, os, signal\n"
        "from tilerec.errors import InputError\n"
        "from tilerec.recipes import SyntheticData, synthetic\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Failing(SyntheticData):\n"
        "    how: str = ''\n"
        "    def open(self):\n"
        "        dataset = super().open()\n"
        "        complete = dataset.train_shares\n"
        "        def train_shares(*args, rank=0, **kwargs):\n"
        "            for step, share in enumerate(complete(*args, rank=rank, **kwargs)):\n"
        "                if rank == 1 and step == 1:\n"
        "                    if self.how == 'killed':\n"
        "                        os.kill(os.getpid(), signal.SIGKILL)\n"
        "                    raise (InputError if self.how == 'input' else RuntimeError)('line 3 is malformed')\n"
        "                yield share\n"
        "        dataset.train_shares = train_shares\n"
        "        return dataset\n"
        "def failing():\n"
        "    run = synthetic()\n"
        "    data = Failing(num_rows=(20, 10), train_rows=256, held_out_rows=64)\n"
        "    return dataclasses.replace(run, data=data)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return "failing_recipes_for_test:failing"


@pytest.mark.parametrize(
    ("how", "message", "traced"),
    [
        ("input", "error: rank 1 of 2: line 3 is malformed", False),
        ("bug", "error: rank 1 of 2: RuntimeError: line 3 is malformed", True),
        ("killed", "error: rank 1 of 2 was killed by signal SIGKILL", False),
    ],
)
def test_a_rank_that_fails_ends_the_run_with_its_own_words(
    how: str, message: str, traced: bool, failing_recipes: str, tmp_path: Path
) -> None:
    settings = ["--set", f"data.how={how}", "--set", "train.batch_size=64", "--set", "train.log_every=1"]
    code, text = _invoke("train", failing_recipes, *settings, "--nproc", "2", "--log-dir", str(tmp_path / "log"))
    assert code == 1
    assert message in text
    assert text.count("error: ") == 1
    assert ("Traceback" in text) == traced
    assert not (tmp_path / "log" / "summary.json").exists()
    lines = (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()
    # Batches are read ahead of their step: the kill comes before step 1, errors wait for the turn of their batch.
    assert [json.loads(line)["step"] for line in lines] == ([] if how == "killed" else [1])


def test_what_is_wrong_for_all_ranks_is_said_once(tmp_path: Path) -> None:
    code, text = _invoke("train", "movielens", "--data", "/nowhere", "--nproc", "2", "--log-dir", "")
    assert code == 1
    lines = [line for line in text.splitlines() if line != "start 2 processes"]  # a phase of a second or more
    assert len(lines) == 1
    assert lines[0].startswith("error: /nowhere: got 'No such file or directory'")


def test_one_process_shards_where_it_is_told_how(tmp_path: Path) -> None:
    """Over itself: the plan is checked, and the scores are the same bits."""
    assert _invoke("train", "synthetic", *SMALL, "--log-dir", str(tmp_path / "a"))[0] == 0
    code, _ = _invoke("train", "synthetic", *SMALL, "--sharding", "row_wise", "--log-dir", str(tmp_path / "b"))
    assert code == 0
    assert _summary(tmp_path / "a")["held_out"] == _summary(tmp_path / "b")["held_out"]
    plan = tmp_path / "b" / "plan.json"
    assert json.loads(plan.read_text())["world_size"] == 1
    for path, message in (
        (str(plan), "contains another run's logs"),
        ("/nowhere", "ShardingPlan: /nowhere cannot be read: got 'No such file or directory'"),
    ):
        code, text = _invoke("train", "synthetic", *SMALL, "--plan", path, "--log-dir", str(tmp_path / "b"))
        assert code == 1
        assert message in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--sharding", "diagonal"],
            "parallel.sharding: got 'diagonal'; expected one of planned, data_parallel",
        ),
        (["--sharding", "row_wise", "--plan", "p"], "expected only one of them"),
    ],
)
def test_contradictions_about_plans_are_told_before_anything_starts(arguments: list[str], message: str) -> None:
    code, text = _invoke("train", "synthetic", *arguments, "--nproc", "2", "--log-dir", "")
    assert code == 1
    assert message in text


def test_processes_are_not_started_by_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, text = _invoke("train", "synthetic", *SMALL, "--nproc", "2", "--log-dir", "")
    assert code == 1
    assert "under a launcher (torchrun, srun), which has already started the processes" in text


def test_calibrate_says_where_it_cannot_write() -> None:
    code, printed = _invoke("calibrate", "--out", "no/such/folder/topology.json")
    assert code == 1
    assert "expected a file in an existing folder. Create no/such/folder first" in printed
    code, printed = _invoke("calibrate", "--out", ".")
    assert code == 1
    assert "--out: got the folder .; expected a file. Name a file in it." in printed


def test_what_was_measured_is_printed_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[Topology] = []

    def measure(group: Group, topology: Topology, device: str, folder: str | None) -> Topology:
        speeds = replace(default_speeds(topology), origin="measured", route=1.25e-8, fresh=3e-10)
        speeds = replace(speeds, file_row=None if folder is None else 7e-6)
        measured.append(replace(topology, speeds=speeds))
        return measured[-1]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tilerec.planner.cost.calibrate.calibrate", measure)
    path = tmp_path / "topology.json"
    run_virtual_ranks(2, calibrate_cli._calibrate, str(path), "cpu", str(tmp_path))
    printed = capsys.readouterr().out
    assert "route" in printed
    assert "12.5" in printed
    for name in (*PER_WIDTH, *SINGLE, "fresh", "file_row"):
        assert printed.count(f"\n{name} ") == 1  # rank 0 alone prints
    before = Topology.load(path)
    assert before == measured[0]
    assert CALIBRATE.has(path)
    monkeypatch.setattr("tilerec.atomic_file.os.fsync", full)
    path.unlink()
    with pytest.raises(FileError, match="No space left on device"):
        run_virtual_ranks(1, calibrate_cli._calibrate, str(path), "cpu")
    printed = capsys.readouterr().out
    assert not path.exists()
    assert printed.index("route") < printed.index("The topology, to save by hand:")
    assert Topology.from_json(json.loads(printed[printed.index("{") :])) == measured[-1]
