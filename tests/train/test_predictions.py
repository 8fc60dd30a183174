"""Predictions: keys, one score per task, bounded and atomic files, and errors before the first prediction."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.table_dataset import TableDataset
from tilerec.errors import ConfigError, FileError, InputError
from tilerec.recipes.files import FilesData
from tilerec.recipes.model import MLPConfig
from tilerec.train import predictions as predictions_module
from tilerec.train.click_task import ClickTask
from tilerec.train.config import RunConfig, TrainConfig
from tilerec.train.evaluate import Scores, predict
from tilerec.train.loop import train
from tilerec.train.predictions import key_columns, scored_rows, write_predictions
from tilerec.train.trained_run import find_trained
from tilerec.train.world import World

CPU = torch.device("cpu")
ONE = World(None)
COLUMNS = Columns(
    labels=(LabelColumn("click"), LabelColumn("buy")),
    dense=(DenseColumn("price"),),
    ids=(IdColumn("user"), IdColumn("tags", kind="list")),
    tables=(TableRows("user", 50), TableRows("tags", 20)),
    weight="weight",
)


def table(rows: int = 40) -> pa.Table:
    torch.manual_seed(0)
    return pa.table(
        {
            "user": [f"u{i % 7}" for i in range(rows)],
            "tags": [[i % 3] * (i % 4) for i in range(rows)],
            "price": torch.rand(rows).tolist(),
            "weight": [1.0 + i % 2 for i in range(rows)],
            "click": [i % 2 for i in range(rows)],
            "buy": [int(i % 5 == 0) for i in range(rows)],
        }
    )


def _model(dataset: TableDataset) -> torch.nn.Module:
    torch.manual_seed(1)
    return MLPConfig(embedding_dim=4, layers=(8,)).build(dataset, CPU)


def _task(dataset: TableDataset) -> ClickTask:
    return ClickTask(dataset.tasks, (), TrainConfig(), CPU, ONE)


def test_scores_stand_beside_the_keys_of_their_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions_module, "_ROWS_PER_GROUP", 16)
    dataset = TableDataset(table(), COLUMNS)
    model = _model(dataset)
    task = _task(dataset)
    keys = key_columns(dataset, (), task.prediction_columns())
    assert keys == ["user"]
    seen: list[int] = []
    tables = task.predict(model, dataset, ["user", "price"], 9)
    total = write_predictions(tmp_path / "out.parquet", tables, progress=seen.append)
    assert (total, seen) == (40, [9, 9, 9, 9, 4])
    found = parquet.read_table(tmp_path / "out.parquet")
    assert found.column_names == ["user", "price", "score_click", "score_buy"]
    assert found["user"].to_pylist() == table()["user"].to_pylist()
    assert found["price"].to_pylist() == table()["price"].to_pylist()
    expected = predict(model, dataset.train(40), CPU).probabilities
    given = torch.tensor([found["score_click"].to_pylist(), found["score_buy"].to_pylist()]).t()
    assert given.shape == expected.shape
    assert parquet.ParquetFile(tmp_path / "out.parquet").num_row_groups == 3
    in_order = torch.cat([scores for _, _, scores in scored_rows(model, dataset, [], 40, CPU, ONE)])
    torch.testing.assert_close(given.double(), in_order, rtol=1e-6, atol=1e-7)


def test_rows_have_numbers_where_no_column_names_them(tmp_path: Path) -> None:
    columns = Columns(labels=COLUMNS.labels[:1], dense=COLUMNS.dense)
    dataset = TableDataset(table(), columns)
    model = MLPConfig(layers=()).build(dataset, CPU)
    assert key_columns(dataset, (), ["score"]) == []
    write_predictions(tmp_path / "out.parquet", _task(dataset).predict(model, dataset, [], 16))
    found = parquet.read_table(tmp_path / "out.parquet")
    assert found.column_names == ["row", "score"]
    assert found["row"].to_pylist() == list(range(40))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["usr"], r"--keys: got 'usr'.*mean 'user'"),
        (["user", "user"], r"--keys: got 'user'.*each once"),
    ],
)
def test_keys_that_cannot_be_written_are_refused(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        key_columns(TableDataset(table(), COLUMNS), keys, ["score_click", "score_buy"])


def test_an_evaluation_weighs_samples_and_scores_each_task() -> None:
    dataset = TableDataset(table(), COLUMNS)
    model = _model(dataset)
    found = _task(dataset).evaluate(model, (batch for batch, _ in dataset.rows(9))).tasks
    assert list(found) == ["click", "buy"]
    assert isinstance(found["buy"], Scores)
    (whole, _, scores), *_ = scored_rows(model, dataset, [], 40, CPU, ONE)
    expected = Scores.of(scores[:, 1], whole.labels[:, 1], whole.weights)
    assert found["buy"].log_loss == pytest.approx(expected.log_loss, rel=1e-5)
    assert found["buy"].log_loss != pytest.approx(Scores.of(scores[:, 1], whole.labels[:, 1]).log_loss, rel=1e-5)


def test_an_interrupted_file_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    path.write_bytes(b"earlier")

    def broken() -> Any:
        dataset = TableDataset(table(), COLUMNS)
        yield from list(_task(dataset).predict(_model(dataset), dataset, ["user"], 30))[:1]
        raise InputError("bad row")

    with pytest.raises(InputError, match="bad row"):
        write_predictions(path, broken())
    assert path.read_bytes() == b"earlier"
    assert [one.name for one in tmp_path.iterdir()] == ["out.parquet"]
    with pytest.raises(FileError, match=r"Predictions: .*cannot be written"):
        write_predictions(tmp_path / "none" / "out.parquet", iter(()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a run file, and the log folder of its run."""
    folder = tmp_path_factory.mktemp("run")
    parquet.write_table(table(), folder / "data.parquet")
    config = RunConfig(
        "small",
        FilesData((str(folder / "data.parquet"),), COLUMNS),
        MLPConfig(embedding_dim=4, layers=(8,)),
        TrainConfig(batch_size=16, eval_batch_size=9),
        log_dir=str(folder / "log"),
    )
    result = train(config)
    assert list(result.tasks) == ["click", "buy"]
    return folder


def test_a_trained_run_is_loaded_with_the_bits_it_was_trained_to(trained: Path) -> None:
    found = find_trained(trained / "log")
    assert find_trained(trained / "log" / "run.toml") == found
    dataset = found.config.data.open_rows((str(trained / "data.parquet"),), labels=True)
    again = train(found.config)
    expected = again.model.state_dict()
    state = found.load(dataset, CPU, ONE).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_data_without_labels_are_predicted_and_other_data_are_refused(trained: Path) -> None:
    config = find_trained(trained / "log").config
    bare = table().drop_columns(["click", "buy"])
    parquet.write_table(bare, trained / "bare.parquet")
    assert config.data.open_rows((str(trained / "bare.parquet"),), labels=False).row_count().rows == 40
    parquet.write_table(bare.drop_columns(["price"]), trained / "less.parquet")
    with pytest.raises(ConfigError, match=r"dense column 'price', which is not there"):
        config.data.open_rows((str(trained / "less.parquet"),), labels=False)
    other = bare.set_column(1, "tags", pa.array(["x"] * 40))
    parquet.write_table(other, trained / "other.parquet")
    with pytest.raises(InputError, match=r"id column 'tags': got string; expected list"):
        config.data.open_rows((str(trained / "other.parquet"),), labels=False)


def test_folders_without_a_model_name_the_next_move(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without run\.toml and model\.safetensors.*Train the run to its end"):
        find_trained(tmp_path)
    (tmp_path / "clicks.toml").write_text((trained / "log" / "run.toml").read_text())
    with pytest.raises(ConfigError, match=r"no trained model in .*runs/small.*tilerec train"):
        find_trained(tmp_path / "clicks.toml")


def test_a_run_file_has_the_newest_model_of_its_runs(trained: Path, tmp_path: Path) -> None:
    text = (trained / "log" / "run.toml").read_text()
    (tmp_path / "clicks.toml").write_text(text)
    for stamp, time in (("a", 5), ("b", 9), ("c", 7)):
        folder = tmp_path / "runs" / "small" / stamp
        folder.mkdir(parents=True)
        (folder / "run.toml").write_text(text)
        (folder / "model.safetensors").write_bytes(b"")
        os.utime(folder / "model.safetensors", (time, time))
    (tmp_path / "runs" / "small" / "d").mkdir()
    assert find_trained(tmp_path / "clicks.toml").folder == tmp_path / "runs" / "small" / "b"
