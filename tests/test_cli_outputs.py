"""Commands keep their inputs: an output that would replace an input is refused before any work, and no byte changes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from typer.testing import CliRunner

from tilerec.checkpoint import save
from tilerec.cli import app

RUN = """
[data]
kind = "files"
path = ["days/"]
[[data.columns.labels]]
column = "click"
[[data.columns.ids]]
column = "user"
[[data.columns.tables]]
name = "user"
rows = 10
[model]
kind = "dlrm"
[train]
batch_size = 4
"""
LOG = "runs/run/today"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a run file, the log folder of its run, and files of other commands. Most are never opened."""
    place = tmp_path_factory.mktemp("work")
    table = pa.table({"user": [1, 2, 3, 4], "click": [0, 1, 0, 1]})
    (place / "days").mkdir()
    for name in ("days/1.parquet", "days/user.parquet", "new.parquet"):
        parquet.write_table(table, place / name)
    (place / "clicks.csv").write_text("user,click\n1,0\n2,1\n")
    (place / "run.toml").write_text(RUN)
    (place / LOG / "vocabulary").mkdir(parents=True)
    (place / LOG / "run.toml").write_text(RUN.replace("days/", str(place / "days")))
    (place / LOG / "model.safetensors").write_bytes(b"weights")
    for name in ("tables.json", "topology.json", "stats.json", "fixed.json", "plan.json", "plan.request.json"):
        (place / name).write_text("{}")
    (place / "model.pt2").write_bytes(b"package")
    save(place / LOG / "checkpoints" / "step-1", {"model": {"w": torch.ones(2)}})
    (place / "dcp").mkdir()
    (place / "link.parquet").symlink_to("new.parquet")
    return place


def _bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _refused(made: Path, here: Path, monkeypatch: pytest.MonkeyPatch, arguments: str) -> str:
    """Run a command that fails in a copy of the folder; raise if it changes a file. Returns what it prints."""
    run = here / LOG / "run.toml"
    run.write_text(run.read_text().replace(str(made), str(here)))
    monkeypatch.chdir(here)
    before = _bytes_of(here)
    result = CliRunner(env={"COLUMNS": "2000", "TERM": "dumb"}).invoke(app, arguments.format(log=LOG).split())
    assert result.exit_code == 1, result.output
    assert _bytes_of(here) == before
    return result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("predict run.toml new.parquet --out new.parquet", "--out: got new.parquet, which is DATA; expected"),
        ("predict run.toml new.parquet --out link.parquet", "which is the same file as DATA new.parquet"),
        ("predict run.toml days --out days/scores.parquet", "which lies in DATA days"),
        ("predict run.toml days/*.parquet --out days/scores.parquet", "which matches DATA days/*.parquet"),
        ("predict run.toml new.parquet --out run.toml", "which is RUN"),
        ("predict run.toml new.parquet --out {log}/model.safetensors", "which is RUN"),
        ("predict run.toml new.parquet --out {log}/run.toml", "which is RUN"),
        ("predict run.toml new.parquet --out days/1.parquet", "which is a file of the run's data"),
        (
            "predict {log}/checkpoints/step-1 new.parquet --out {log}/checkpoints/step-1/manifest.json",
            "is a file of RUN",
        ),
        ("data convert clicks.csv --out clicks.csv", "out (--out): got clicks.csv, which is the input; expected"),
        ("data convert clicks.csv *.txt --out clicks.csv", "out (--out): got clicks.csv, which is the input; expected"),
        ("data convert . --out clicks.parquet", "which lies in the input ."),
        ("data vocabulary days/user.parquet --table user --out days", "which is FILES; expected"),
        ("data vocabulary days --table click --out days", "--out: got days/click.parquet, which lies in FILES days"),
        ("quantize run.toml --max-ne 1% --data days --out days/served", "which lies in --data days"),
        ("quantize run.toml --max-ne 1% --out {log}/vocabulary/served", "which lies in RUN"),
        ("export run.toml --data new.parquet --out new.parquet", "which is --data"),
        ("export run.toml --out days/1.parquet", "which is a file of the run's data"),
        ("export run.toml --out {log}/model.safetensors", "which is RUN"),
        ("export-index run.toml --queries days --out days/index", "which lies in --queries days"),
        ("export-index run.toml --out days/index", "which lies in the run's data"),
        ("stats days/1.parquet --out days/1.parquet", "which is DATA"),
        ("stats days --out days/1.parquet", "which is a file of DATA"),
        ("stats clicks.csv --out clicks.csv", "which is DATA"),
        ("init new.parquet --force --out new.parquet", "which is DATA"),
        ("init days --force --out days/1.parquet", "which is a file of DATA"),
        ("init days/* --out days/run.toml", "which matches DATA"),
        ("train run.toml --log-dir .", "log_dir (--log-dir): got run.toml, which is RUN; expected"),
        (
            "train run.toml --log-dir logs --trace days/1.parquet",
            "trace (--trace): got days/1.parquet, which is a file",
        ),
        ("train run.toml --log-dir . --resume", "log_dir (--log-dir): got run.toml, which is RUN; expected"),
        ("train run.toml --log-dir . --plan plan.json", "log_dir (--log-dir): got plan.json, which is --plan"),
        ("plan tables.json --topology topology.json --out tables.json", "which is SOURCE"),
        ("plan tables.json --topology topology.json --out topology.json", "which is --topology"),
        ("plan tables.json --topology topology.json --stats stats.json --out stats.json", "which is --stats"),
        ("plan tables.json --topology topology.json --fixed fixed.json --html fixed.json", "which is --fixed"),
        ("plan whatif --plan plan.json --hosts 2 --out plan.json", "which is --plan"),
        ("plan show plan.json --html plan.request.json", "which is PLAN"),
        ("checkpoint export {log} --out {log}/checkpoints/step-1/new.safetensors", "which lies in PATH"),
        ("checkpoint export {log} --out {log}/model.safetensors", "which is the run's file"),
        ("checkpoint export {log} --dcp {log}/checkpoints/step-1/dcp", "which lies in PATH"),
        ("checkpoint import dcp --out dcp/step-1", "which lies in FOLDER dcp"),
        ("serve-files model.pt2 --kserve model.pt2 --triton models", "--kserve: got model.pt2, which is PACKAGE"),
    ],
)
def test_a_command_keeps_its_inputs(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str
) -> None:
    here = tmp_path / "work"
    shutil.copytree(made, here, symlinks=True)
    output = _refused(made, here, monkeypatch, arguments)
    assert message in output
    assert "expected a path apart from the inputs" in output


@pytest.mark.parametrize(
    "arguments",
    [
        "predict run.toml new.parquet --out other.txt",
        "export run.toml --out other.txt",
        "data convert clicks.csv --out other.txt",
        "data vocabulary new.parquet --table other --out .",
        "stats clicks.csv --out other.txt",
        "calibrate --out other.txt",
        "init new.parquet --out other.txt",
        "port program.py --out other.txt",
        "train run.toml --log-dir logs --trace other.txt",
        "train run.toml --log-dir served",
        "plan tables.json --topology topology.json --out new.json --html other.txt",
        "plan tables.json --topology topology.json --out other.txt",
        "plan whatif --plan plan.json --hosts 2 --out other.txt",
        "plan show plan.json --html other.txt",
        "checkpoint export {log} --out other.txt",
        "checkpoint export {log} --dcp other.txt",
        "serve-files model.pt2 --kserve other.txt",
        "quantize run.toml --types int8 --out other.txt",
        "export-index run.toml --out other.txt",
        "quantize run.toml --types int8 --out served",
        "export-index run.toml --out served",
    ],
)
def test_a_command_keeps_a_file_that_it_has_not_written(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str
) -> None:
    here = tmp_path / "work"
    shutil.copytree(made, here, symlinks=True)
    (here / "served").mkdir()
    for name in ("other.txt", "other.parquet", "program.py", "served/model.safetensors"):
        (here / name).write_text("of another program")
    output = _refused(made, here, monkeypatch, arguments)
    assert "expected a new" in output


@pytest.mark.parametrize(
    "arguments",
    [
        "init . --out run.toml --force",
        "stats . --features user",
        "data vocabulary days/1.parquet --table click --out .",
    ],
)
def test_results_may_lie_beside_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str) -> None:
    monkeypatch.chdir(tmp_path)
    table = pa.table({"user": list(range(40)), "click": [0, 1] * 20})
    folder = tmp_path / "days" if "days" in arguments else tmp_path
    folder.mkdir(exist_ok=True)
    parquet.write_table(table, folder / "1.parquet")
    for _ in range(2):  # the second time, the result is there already
        result = CliRunner(env={"COLUMNS": "2000", "TERM": "dumb"}).invoke(app, arguments.split())
        assert result.exit_code == 0, result.output
