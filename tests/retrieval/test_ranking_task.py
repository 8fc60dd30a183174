"""Parts of ranking tasks: samples that are chosen, keys that are absent, items that share a row."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from tests.retrieval.retrieval_data import retrieval_run
from tilerec.data.batch import Batch
from tilerec.data.columns import Columns, IdColumn, TableRows
from tilerec.errors import ConfigError
from tilerec.recipes.files import FilesData
from tilerec.recipes.retrieval_model import TwoTowerConfig
from tilerec.retrieval.ranking_task import _select, with_all_keys
from tilerec.retrieval.two_tower_task import RetrievalConfig, RetrievalTask
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.train.config import RunConfig, TrainConfig
from tilerec.train.loop import train
from tilerec.train.world import World

CPU = torch.device("cpu")


def test_chosen_samples_keep_their_bags_weights_and_labels() -> None:
    features = KeyedJaggedTensor(
        ["a", "b"], torch.arange(7), torch.arange(7.0), lengths=torch.tensor([2, 0, 1, 1, 3, 0]), stride=3
    )
    batch = Batch(torch.arange(3.0)[:, None], features, torch.tensor([1.0, 0.0, 2.0]), torch.tensor([3.0, 4.0, 5.0]))
    found = _select(batch, torch.tensor([2, 0]))
    assert [one.tolist() for one in found.sparse_features["a"].to_dense()] == [[2], [0, 1]]
    assert [one.tolist() for one in found.sparse_features["b"].to_dense()] == [[], [3]]
    assert found.sparse_features.weights().tolist() == [2, 0, 1, 3]
    assert (found.labels.tolist(), found.weights.tolist()) == ([2, 1], [5, 3])  # type: ignore[union-attr]
    assert _select(batch, torch.zeros(0, dtype=torch.int64)).batch_size == 0


@pytest.mark.parametrize("weighted", [False, True])
def test_absent_keys_are_empty(weighted: bool) -> None:
    features = KeyedJaggedTensor(["b"], torch.tensor([5, 6]), lengths=torch.tensor([0, 2]), stride=2)
    found = with_all_keys(features, ["a", "b", "c"], weighted=weighted)
    assert found.keys() == ["a", "b", "c"]
    assert found.lengths().tolist() == [0, 0, 0, 2, 0, 0]
    assert found.values().tolist() == [5, 6]
    assert (found.weights_or_none() is None) == (not weighted)


def _collided(folder: Path, rows: int) -> RunConfig:
    """Return a run over items a to f in a table of few rows."""
    items = list("abcdef")
    table = {"user": list(range(12)), "item": items * 2, "watched": [[one] for one in items[1:] + items[:1]] * 2}
    parquet.write_table(pa.table(table), folder / "clicks.parquet")
    columns = Columns(
        ids=(IdColumn("user"), IdColumn("item", table="items"), IdColumn("watched", kind="list", table="items")),
        tables=(TableRows("user", 50), TableRows("items", rows)),
    )
    data = FilesData((str(folder / "clicks.parquet"),), columns)
    return RunConfig(
        "hashed", data, TwoTowerConfig(embedding_dim=4, layers=()), TrainConfig(batch_size=4),
        log_dir=str(folder / "log"), task=RetrievalConfig(seen="watched", top_k=6),
    )  # fmt: skip


def test_items_that_share_a_row_are_seen_together_and_listed_apart(tmp_path: Path) -> None:
    run = _collided(tmp_path, 2)
    result = train(run)
    dataset = run.data.open()
    task = run.task.build(dataset, run.train, CPU, World(None))
    assert isinstance(task, RetrievalTask)
    rows = dict(zip(task.catalog.values.to_pylist(), task.catalog.ids.tolist(), strict=True))
    assert set(rows.values()) == {0, 1}
    assert task.item_ids.tolist() == [0, 1]
    other = run.data.open_rows((str(tmp_path / "clicks.parquet"),), labels=False)
    tables = [table for _, table in task.predict(result.model, other, ["user", "watched"], 5)]
    for row in pa.concat_tables(tables).to_pylist():
        assert rows[row["item"]] != rows[row["watched"][0]]
    best = pa.concat_tables(tables).to_pylist()
    of_first = [row["item"] for row in best if row["user"] == 0]
    assert sorted(of_first) == sorted(one for one in "abcdef" if rows[one] != rows["b"])
    # Scores have one item per row, so two items are ranked.
    assert 0 <= result.held_out.numbers["mrr"] <= 1


def test_managed_items_are_refused(tmp_path: Path) -> None:
    run = _collided(tmp_path, 2)
    tables = TableRows("user", 9), TableRows("item", 9, "managed")
    columns = Columns(ids=(IdColumn("user"), IdColumn("item")), tables=tables)
    dataset = FilesData(run.data.path, columns).open()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"feature 'item': got a managed table; expected ids='hash' or 'rows'"):
        RetrievalConfig().build(dataset, run.train, CPU, World(None))


def test_an_item_that_is_relevant_twice_counts_once(tmp_path: Path) -> None:
    """Counted twice, the best possible ranking would have an NDCG above 1."""
    log = tmp_path / "log.txt"
    log.write_text("".join(f"u{user} {item}\n" for user in range(3) for item in "abcdef"))
    run = retrieval_run(log)
    task = run.task.build(run.data.open(), run.train, CPU, World(None))
    assert isinstance(task, RetrievalTask)
    ids = torch.tensor([3, 1, 3, 0, 0, 2])
    features = KeyedJaggedTensor(["item"], ids, lengths=torch.tensor([3, 3]), stride=2)
    found = task.relevant(Batch(torch.zeros(2, 0), features, torch.ones(2)))
    assert [one.tolist() for one in found] == [[0, 0, 1, 1, 1], [0, 2, -1, -1, 1]]
