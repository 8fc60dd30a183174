"""A copied folder of a checkpoint is a whole model: it is evaluated, predicts and is exported without its run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner

from tests.retrieval.retrieval_data import write_log
from tilerec.checkpoint import CheckpointManager
from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.manifest import manifest_text
from tilerec.cli import app
from tilerec.train.run_file import run_of_toml

CLICKS_RUN = """
[data]
kind = "files"
path = ["clicks.parquet"]

[[data.columns.labels]]
column = "click"

[[data.columns.ids]]
column = "user"

[[data.columns.ids]]
column = "item"

[[data.columns.tables]]
name = "user"
rows = 50
ids = "managed"

[[data.columns.tables]]
name = "item"
rows = 40

[model]
kind = "mlp"
embedding_dim = 4
layers = [8]

[train]
batch_size = 32
max_steps = 6
"""
LOG_RUN = """
[data]
kind = "interactions"
path = ["log.txt"]
names = ["user", "item"]
delimiter = "space"
max_length = 5

[model]
kind = "two_tower"
query_features = ["user", "history"]
layers = [4]
embedding_dim = 8

[train]
batch_size = 16
max_steps = 6

[task]
kind = "retrieval"
seen = "seen"
top_k = 3
"""


def invoke(*words: object) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def succeed(*words: object) -> str:
    code, text = invoke(*words)
    assert code == 0, text
    return text


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, and two trained runs with checkpoints in it, `clicks` and `log`."""
    place = tmp_path_factory.mktemp("runs")
    draw = np.random.default_rng(0)
    names = {"user": [f"u{i}" for i in draw.integers(0, 30, 300)], "item": draw.integers(0, 20, 300)}
    parquet.write_table(pa.table({**names, "click": draw.integers(0, 2, 300)}), place / "clicks.parquet")
    write_log(place / "log.txt")
    for name, text in (("clicks", CLICKS_RUN), ("log", LOG_RUN)):
        (place / f"{name}.toml").write_text(text)
        succeed("train", place / f"{name}.toml", "--log-dir", place / name, "--save-every", 3)
    return place


@pytest.fixture
def empty(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working folder; the runs and their data have another name in this test, so no path leads to them."""
    monkeypatch.chdir(tmp_path)
    runs.rename(away := runs.with_name("away"))
    yield tmp_path
    away.rename(runs)


def copied(runs: Path, name: str, empty: Path) -> Path:
    """Copy the last checkpoint of a run, and the data under another name."""
    away = runs.with_name("away")
    shutil.copytree(away / name / "checkpoints" / "step-6", empty / "copy")
    for file in ("clicks.parquet", "log.txt"):
        shutil.copy(away / file, empty / f"new-{file}")
    return empty / "copy"


@pytest.mark.parametrize("name", ["clicks", "log"])
def test_a_copy_is_evaluated_and_predicts_as_its_run(runs: Path, name: str, empty: Path) -> None:
    copy, data = copied(runs, name, empty), {"clicks": "new-clicks.parquet", "log": "new-log.txt"}[name]
    found = []
    for run in (copy, runs.with_name("away") / name):
        succeed("predict", run, data, "--out", "scores.parquet")
        found.append((parquet.read_table("scores.parquet"), succeed("eval", run, data)))
    assert found[0] == found[1]


def test_an_index_of_a_copy_has_the_vocabulary_of_the_run(runs: Path, empty: Path) -> None:
    copy = copied(runs, "log", empty)
    succeed("export-index", copy, "--out", "index", "--queries", "new-log.txt")
    index = parquet.read_table(empty / "index" / "items.parquet")
    vocabulary = parquet.read_table(runs.with_name("away") / "log" / "vocabulary" / "item.parquet")
    assert sorted(index["item"].to_pylist()) == sorted(vocabulary["value"].to_pylist())


def test_the_run_file_is_that_of_the_run(runs: Path) -> None:
    path = runs / "clicks"
    text = succeed("checkpoint", "inspect", path, "--run-file")
    assert run_of_toml(text) == run_of_toml((path / "run.toml").read_text())
    assert "[run_file] see --run-file" in succeed("checkpoint", "inspect", path)
    # It is the run as it was saved, whatever the log folder has by now.
    written = (path / "run.toml").read_text()
    (path / "run.toml").write_text(written.replace("embedding_dim = 4", "embedding_dim = 8"))
    try:
        assert "samples" in succeed("eval", path / "checkpoints" / "step-6", runs / "clicks.parquet")
    finally:
        (path / "run.toml").write_text(written)


def test_checkpoints_without_a_run_file_are_those_of_their_log_folder(runs: Path, tmp_path: Path) -> None:
    """As earlier versions have saved them."""
    saved = runs / "clicks" / "checkpoints" / "step-6"
    shutil.copytree(runs / "clicks", tmp_path / "old")
    old = tmp_path / "old" / "checkpoints" / "step-6"
    manifest = SavedContents(old).manifest
    metadata = {name: value for name, value in manifest.metadata.items() if name != "run_file"}
    (old / "manifest.json").write_bytes(
        manifest_text(manifest.state.value, manifest.tensors, manifest.files, metadata, manifest.id)
    )
    new = runs / "clicks.parquet"
    assert succeed("eval", old, new) == succeed("eval", saved, new)
    shutil.copytree(old, tmp_path / "copy")
    for words in (["eval", tmp_path / "copy", new], ["checkpoint", "inspect", tmp_path / "copy", "--run-file"]):
        code, text = invoke(*words)
        assert code == 1
        assert "got a checkpoint without a run file" in text
    CheckpointManager(tmp_path / "own").save(1, {"x": 1})
    assert invoke("eval", tmp_path / "own" / "step-1", new)[0] == 1


def test_a_copy_of_changed_rows_alone_names_the_next_move(runs: Path, tmp_path: Path) -> None:
    settings = ("--set", "checkpoint.incremental=true", "--set", "train.max_steps=3")
    succeed("train", runs / "clicks.toml", "--log-dir", tmp_path / "log", "--save-every", 1, *settings)
    step = tmp_path / "log" / "checkpoints" / "step-3"
    shutil.copytree(step, tmp_path / "alone" / "step-3")
    code, text = invoke("eval", tmp_path / "alone" / "step-3", runs / "clicks.parquet")
    assert code == 1
    assert "continues this checkpoint" in text
    assert "tilerec checkpoint compact" in text
    succeed("checkpoint", "compact", step)
    shutil.copytree(step, tmp_path / "whole")
    found = [succeed("eval", path, runs / "clicks.parquet") for path in (tmp_path / "whole", tmp_path / "log")]
    assert found[0] == found[1]


@pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="compiles a model: nightly")
def test_a_copy_is_exported(runs: Path, empty: Path) -> None:
    copy = copied(runs, "clicks", empty)
    assert "2 tables" in succeed("export", copy, "--out", "model.pt2", "--data", "new-clicks.parquet")
