"""Run files on the command line: from a data file to predictions, and mistakes in one line."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from typer.testing import CliRunner

from tilerec.cli import app
from tilerec.errors import ConfigError
from tilerec.export import load
from tilerec.file_kind import EXPORT
from tilerec.train.config import RunConfig
from tilerec.train.loop import train
from tilerec.train.result import RunResult
from tilerec.train.run_logger import Event, Watcher
from tilerec.train.trained_run import find_trained


def _invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, the run file that `init` writes, and a trained model."""
    place = tmp_path_factory.mktemp("clicks")
    draw = np.random.default_rng(0)
    rows = 600
    table = pa.table(
        {
            "user_id": draw.integers(0, 30, rows),
            "item": [f"i{i}" for i in draw.integers(0, 20, rows)],
            "tags": [[int(i) for i in draw.integers(0, 5, count)] for count in draw.integers(0, 4, rows)],
            "price": draw.random(rows),
            "click": draw.integers(0, 2, rows),
        }
    )
    parquet.write_table(table.slice(0, 500), place / "clicks.parquet")
    parquet.write_table(table.slice(500), place / "test.parquet")
    parquet.write_table(table.slice(500).drop_columns(["click"]), place / "new.parquet")
    code, text = _invoke("init", str(place / "clicks.parquet"), "--out", str(place / "run.toml"))
    assert code == 0, text
    assert "named like a label" in text
    code, text = _invoke("train", str(place / "run.toml"))
    assert code == 0, text
    assert "run: 50 held-out samples" in text
    return place


def test_a_run_file_leaves_its_model_beside_it(folder: Path) -> None:
    (log,) = (folder / "runs" / "run").iterdir()
    names = {path.name for path in log.iterdir()}
    assert names >= {"run.toml", "model.safetensors", "metrics.jsonl", "summary.json"}
    code, text = _invoke("eval", str(folder / "run.toml"), str(folder / "test.parquet"))
    assert code == 0, text
    assert "100 samples of" in text
    by_folder = _invoke("eval", str(log), str(folder / "test.parquet"))
    assert by_folder == (0, text)
    held_out = _invoke("eval", str(folder / "run.toml"))
    assert "50 held-out samples" in held_out[1]


def test_any_number_of_processes_predicts_the_same(folder: Path) -> None:
    found = []
    for arguments in ([], ["--nproc", "2", "--batch-size", "7"]):
        out = folder / "scores.parquet"
        code, text = _invoke(
            "predict", str(folder / "run.toml"), str(folder / "new.parquet"), "--out", str(out), *arguments
        )
        assert code == 0, text
        found.append(parquet.read_table(out))
    alone, two = found
    assert alone.column_names == two.column_names == ["user_id", "item", "score"]
    assert alone.drop_columns(["score"]) == two.drop_columns(["score"])
    assert alone["user_id"] == parquet.read_table(folder / "new.parquet")["user_id"]
    np.testing.assert_allclose(alone["score"].to_numpy(), two["score"].to_numpy(), rtol=1e-5)


@pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="compiles a model; tests/export does so, too")
def test_an_exported_model_scores_as_predict(folder: Path) -> None:
    out, scores = folder / "model.pt2", folder / "expected.parquet"
    code, text = _invoke("export", str(folder / "run.toml"), "--out", str(out))
    assert code == 0, text
    assert "input   sparse_features.lengths int32 3 batch" in text
    assert EXPORT.has(out)
    assert _invoke("predict", str(folder / "run.toml"), str(folder / "new.parquet"), "--out", str(scores))[0] == 0
    data = find_trained(folder / "run.toml").config.data.open_rows((str(folder / "new.parquet"),), labels=False)
    package = load(out)
    logits = [package(batch.dense_features, batch.sparse_features) for batch, _ in data.rows(30, ())]
    expected = parquet.read_table(scores)["score"].to_numpy()
    np.testing.assert_allclose(torch.cat(logits).flatten().sigmoid().numpy(), expected, rtol=1e-5)


def test_a_run_file_finds_the_newest_model_of_its_name_in_log_folders_beside_it(tmp_path: Path, folder: Path) -> None:
    trained = find_trained(folder / "run.toml").folder
    text = (folder / "run.toml").read_text()
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"pass FOLDER in place of mine\.toml"):
        find_trained(tmp_path / "mine.toml")
    for place, name in (("runs/first", "mine"), ("runs/other", "another"), ("elsewhere", "mine")):
        log = tmp_path / place
        log.mkdir(parents=True)
        shutil.copy(trained / "model.safetensors", log)
        (log / "run.toml").write_text(f'name = "{name}"\n{text}')
    assert find_trained(tmp_path / "mine.toml").folder == tmp_path / "runs" / "first"


def test_a_checkpoint_of_a_run_predicts_as_its_model(tmp_path: Path, folder: Path) -> None:
    log, found = tmp_path / "log", []
    settings = ("train.max_steps=8", "checkpoint.every=8", f"log_dir={log}")
    code, text = _invoke("train", str(folder / "run.toml"), *(word for own in settings for word in ("--set", own)))
    assert code == 0, text
    (checkpoint,) = (log / "checkpoints").iterdir()
    for source in (log, checkpoint):
        out = tmp_path / "scores.parquet"
        code, text = _invoke("predict", str(source), str(folder / "new.parquet"), "--out", str(out))
        assert code == 0, text
        found.append(parquet.read_table(out))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export", "{}/run.toml", "--out", "{}/no/model.pt2"], "expected a file in an existing folder"),
        (
            ["export", "{}/run.toml", "--out", "{}/x.pt2", "--tower", "query"],
            "expected a run with model.kind",
        ),
        (["export", "{}/none.toml", "--out", "{}/x.pt2"], "got 'No such file or directory'"),
        (["init", "{}/none.parquet", "--out", "{}/x.toml"], "a path that does not exist"),
        (["init", "{}/clicks.parquet", "--out", "{}/run.toml"], "exists; expected a new file"),
        (["init", "{}/clicks.parquet", "--out", "{}/no/run.toml"], "expected a file in an existing folder"),
        (["train", "{}/none.toml"], "got 'No such file or directory'"),
        (["train", "{}/run.toml", "--set", "data.columns.ids[9].missing=row"], "is a list of 3 tables"),
        (
            ["train", "{}/run.toml", "--set", "data.columns.ids[0].mising=row"],
            "Did you mean 'data.columns.ids[0].missing'?",
        ),
        (["train", "{}/run.toml", "--data", "{}/new.parquet"], "'click', which is not there"),
        (["eval", "{}/run.toml", "{}/new.parquet"], "'click', which is not there"),
        (["eval", "{}"], "without model.safetensors"),
        (
            ["predict", "{}/run.toml", "{}/new.parquet", "--out", "{}/no/x.parquet"],
            "expected a file in an existing",
        ),
        (["predict", "{}/run.toml", "{}/new.parquet", "--out", "{}"], "expected a file. Name a file in it"),
        (
            ["predict", "{}/run.toml", "{}/new.parquet", "--out", "{}/x.parquet", "--keys", "usr"],
            "--keys: got 'usr'",
        ),
        (["predict", "{}/run.toml", "{}/run.toml", "--out", "{}/x.parquet"], "cannot be read as Parquet"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_file(arguments: list[str], message: str, folder: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    code, text = _invoke(*(part.replace("{}", str(folder)) for part in arguments))
    assert code == 1
    assert message in text
    assert "Traceback" not in text
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_run_keeps_the_types_of_its_ids(folder: Path, tmp_path: Path) -> None:
    (log,) = (folder / "runs" / "run").iterdir()
    columns = find_trained(log).config.data.columns  # type: ignore[attr-defined]
    assert columns.id_types == {"user_id": "integer", "item": "text", "tags": "integer"}
    table = parquet.read_table(folder / "test.parquet")
    texts = pa.array([str(user) for user in table.column("user_id").to_pylist()])
    parquet.write_table(table.set_column(0, "user_id", texts), tmp_path / "texts.parquet")
    code, text = _invoke("eval", str(folder / "run.toml"), str(tmp_path / "texts.parquet"))
    assert code == 1
    assert "texts.parquet: id column 'user_id': got string; expected integer or boolean. Store them as integers" in text


def test_a_label_that_is_no_probability_is_named_with_its_row(folder: Path, tmp_path: Path) -> None:
    table = parquet.read_table(folder / "test.parquet")
    labels = table.column("click").to_pylist()
    labels[70] = 2
    bad = table.set_column(table.column_names.index("click"), "click", pa.array(labels))
    parquet.write_table(bad, tmp_path / "bad.parquet", row_group_size=50)
    message = "bad.parquet, row group 1: label column 'click': got 2 in row 20; expected 0 to 1. Set at_least"
    for arguments in (["eval"], ["quantize", "--max-ne", "1%", "--out", str(tmp_path / "served"), "--data"]):
        code, text = _invoke(arguments[0], str(folder / "run.toml"), *arguments[1:], str(tmp_path / "bad.parquet"))
        assert code == 1
        assert message in text
    code, text = _invoke("train", str(folder / "run.toml"), "--data", str(tmp_path / "bad.parquet"), "--log-dir", "")
    assert code == 1
    assert message in text


def test_show_prints_elements_of_lists_as_set_takes_them(folder: Path) -> None:
    code, text = _invoke("train", str(folder / "run.toml"), "--set", "data.columns.ids[1].missing=row", "--show")
    assert code == 0
    assert "data.columns.ids[1].missing = row" in text
    assert "data.columns.labels[0].column = click" in text


def test_recipes_leave_models_too_and_name_the_kind_of_data_that_predicts(tmp_path: Path) -> None:
    small = ["data.train_rows=64", "data.held_out_rows=32", "train.batch_size=32"]
    settings = [part for one in small for part in ("--set", one)]
    code, text = _invoke("train", "synthetic", "--log-dir", str(tmp_path / "log"), *settings)
    assert code == 0, text
    code, text = _invoke("eval", str(tmp_path / "log"))
    assert code == 0, text
    assert "32 held-out samples" in text
    code, text = _invoke("predict", str(tmp_path / "log"), "x.parquet", "--out", str(tmp_path / "out.parquet"))
    assert code == 1
    assert "expected a run with data.kind = 'files'" in text


def test_a_quantized_run_is_evaluated_and_predicts(folder: Path) -> None:
    out = folder / "served"
    code, text = _invoke("quantize", str(folder / "run.toml"), "--max-ne", "1%", "--out", str(out))
    assert code == 0, text
    assert "NE alone" in text
    assert {path.name for path in out.iterdir()} >= {"run.toml", "model.safetensors", "quantization.json"}
    facts = json.loads((out / "quantization.json").read_text())
    assert facts["bytes"] < facts["float_bytes"] / 2
    assert facts["ne"] <= facts["float_ne"] * 1.01
    code, text = _invoke("eval", str(out))
    assert code == 0, text
    assert f"{facts['ne']:.4f}" in text
    scores = []
    for run in (out, folder / "run.toml"):
        code, text = _invoke("predict", str(run), str(folder / "new.parquet"), "--out", str(folder / "q.parquet"))
        assert code == 0, text
        scores.append(parquet.read_table(folder / "q.parquet")["score"].to_numpy())
    assert 0 < np.abs(scores[0] - scores[1]).max() < 0.1
    assert not list(folder.glob(".tilerec-quantize-*"))
    code, text = _invoke("quantize", str(folder / "run.toml"), "--types", "int4", "--out", str(folder / "small"))
    assert code == 0, text
    facts = json.loads((folder / "small" / "quantization.json").read_text())
    assert {table["row_type"] for table in facts["tables"].values()} == {"int4"}
    assert facts["ne"] is None
    code, text = _invoke("eval", str(folder / "small"))
    assert code == 0, text
    code, text = _invoke("quantize", str(out), "--max-ne", "1%", "--out", str(folder / "twice"))
    assert code == 1
    assert "expected one as it was trained" in text


def test_a_full_disk_leaves_no_part_of_a_quantized_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    words, out = ("quantize", str(folder / "run.toml"), "--types", "int8", "--out"), folder / "full"
    with monkeypatch.context() as patch:
        patch.setattr("tilerec.train.quantized_folder.save_quantized", full)
        code, text = _invoke(*words, str(out))
    assert (code, "No space left on device" in text) == (1, True)
    assert not out.exists()
    assert _invoke(*words, str(out))[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x"], "--budget, --max-ne: got neither; expected one or both, or a single type"),
        (["--out", "x", "--max-ne", "lots"], "--max-ne: got 'lots'; expected a share below 1"),
        (["--out", "x", "--budget", "2 gallons"], "--budget: got '2 gallons'; expected a number of bytes"),
        (["--out", "x", "--budget", "10"], "--budget: got 10 B; expected at least"),
        (["--out", "x", "--max-ne", "1%", "--types", "int3"], "--types: got 'int3'; expected one of"),
        (["--out", ".", "--max-ne", "1%"], "which exists; expected a new or an empty folder"),
    ],
)
def test_mistakes_of_quantize_are_named(
    folder: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    code, text = _invoke("quantize", "run.toml", *arguments)
    assert code == 1
    assert message in " ".join(text.split())
    assert not (folder / "x").exists()


class _Interrupt(Watcher):
    """Presses Ctrl-C at the first event."""

    def record(self, event: Event) -> None:
        signal.raise_signal(signal.SIGINT)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (["--save-every", "1000"], "Ctrl-C: stopping. A second one ends the run without a save.\n"),
        ([], "stopped without a checkpoint. --save-every N saves some.\n"),
    ],
)
def test_ctrl_c_ends_a_run_with_a_line_on_how_to_continue(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: list[str], said: str
) -> None:
    def interrupted(run: RunConfig, **options: Any) -> RunResult:
        return train(run, watchers=[_Interrupt()], **options)

    monkeypatch.setattr("tilerec.train.loop.train", interrupted)
    log = str(tmp_path / "a run")
    size = ["--set", "train.batch_size=8", "--set", "train.log_every=1"]
    code, text = _invoke("train", str(folder / "run.toml"), "--log-dir", log, *size, *saved)
    assert (code, said in text) == (130, True), text
    again = f"saved. The same command with --log-dir '{log}' --resume continues.\n"
    assert (again in text) == bool(saved), text
    assert "Traceback" not in text
