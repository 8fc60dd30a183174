"""The catalog of files: every item once, its features, its occurrences, and ids that are hashed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tilerec.data import item_catalog
from tilerec.data.columns import Columns, IdColumn, LabelColumn, TableRows
from tilerec.data.hold_out import HoldOut
from tilerec.data.parquet_files import ParquetGroups
from tilerec.data.rows import hash_rows
from tilerec.data.table_dataset import TableDataset
from tilerec.errors import ConfigError, InputError
from tilerec.recipes.files import FilesData

TABLE = pa.table(
    {
        "item": ["b", "a", "b", None, "c", "a"],
        "genres": [[1, 2], [3], [4], [5], [], [6]],
        "history": [["a"], ["d", "a"], [], ["e"], ["b"], ["a"]],
        "click": [1, 1, 0, 1, 1, 1],
    }
)


def columns(**changes: Any) -> Columns:
    settings: dict[str, Any] = {
        "labels": (LabelColumn("click"),),
        "ids": (
            IdColumn("item", table="items", missing="row"),
            IdColumn("genres", kind="list"),
            IdColumn("history", kind="sequence", max_length=5, table="items"),
        ),
        "tables": (TableRows("items", 1000), TableRows("genres", 10, "rows")),
    }
    return Columns(**{**settings, **changes})


@pytest.mark.parametrize("step", [1, 2, 10])
def test_every_item_is_there_once_with_its_count_and_its_row(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_catalog, "_MOST_ROWS", 2)
    from tilerec.data.row_groups import TableGroups

    catalog = TableDataset(TableGroups(TABLE, rows_per_group=step), columns()).catalog("item")
    # Items of histories are items as well. Samples without a click are not counted.
    assert catalog.values.to_pylist() == ["a", "b", "c", "d", "e"]
    assert catalog.counts.tolist() == [2, 1, 1, 0, 0]
    hashed = hash_rows(pa.array([b"a", b"b", b"c", b"d", b"e"]), 1000, first_row=1)
    assert catalog.ids.tolist() == hashed.tolist()
    assert catalog.features.keys() == ["item"]
    assert catalog.batch().batch_size == len(catalog) == 5


def test_the_first_row_of_an_item_gives_its_features() -> None:
    catalog = TableDataset(TABLE, columns()).catalog("item", ["genres"])
    assert catalog.values.to_pylist() == ["a", "b", "c"]
    assert [one.tolist() for one in catalog.features["genres"].to_dense()] == [[3], [1, 2], []]


def test_held_out_samples_are_not_counted() -> None:
    catalog = TableDataset(TABLE, columns(), hold_out=HoldOut(every=2)).catalog("item")
    assert catalog.values.to_pylist() == ["a", "b", "c", "d", "e"]
    assert catalog.counts.tolist() == [0, 1, 1, 0, 0]


def test_a_file_of_items_gives_the_items_and_their_features(tmp_path: Path) -> None:
    parquet.write_table(TABLE, tmp_path / "clicks.parquet")
    parquet.write_table(pa.table({"item": ["z", "a"], "genres": [[9], [8]]}), tmp_path / "items.parquet")
    data = FilesData((str(tmp_path / "clicks.parquet"),), columns(), items=(str(tmp_path / "items.parquet"),))
    for dataset in (data.open(), data.open_rows((str(tmp_path / "clicks.parquet"),))):
        catalog = dataset.catalog("item", ["genres"])
        assert catalog.values.to_pylist() == ["a", "z"]
        assert [one.tolist() for one in catalog.features["genres"].to_dense()] == [[8], [9]]
    parquet.write_table(pa.table({"item": ["z"]}), tmp_path / "items.parquet")
    with pytest.raises(ConfigError, match=r"items.parquet: got no column 'genres'"):
        data.open().catalog("item", ["genres"])


def test_other_files_have_the_items_of_the_run(tmp_path: Path) -> None:
    parquet.write_table(TABLE, tmp_path / "clicks.parquet")
    parquet.write_table(TABLE.slice(0, 1), tmp_path / "new.parquet")
    data = FilesData((str(tmp_path / "clicks.parquet"),), columns())
    rows = data.open_rows((str(tmp_path / "new.parquet"),), labels=False)
    assert rows.catalog("item").values.to_pylist() == ["a", "b", "c", "d", "e"]


def test_items_that_share_a_row_stay_apart() -> None:
    catalog = TableDataset(TABLE, columns(tables=(TableRows("items", 2), TableRows("genres", 10)))).catalog("item")
    assert catalog.ids.tolist() == [1] * 5
    assert len(catalog) == 5


def test_without_a_label_column_every_sample_counts() -> None:
    catalog = TableDataset(TABLE, columns(labels=())).catalog("item")
    assert catalog.counts.tolist() == [2, 2, 1, 0, 0]
    batch = next(TableDataset(TABLE, columns(labels=())).train(3))
    assert batch.labels.shape == (3, 0)
    assert batch.batch_size == 3


@pytest.mark.parametrize(
    ("item", "others", "message"),
    [
        ("itm", [], r"item feature 'itm', which the data lack; expected a known name; did you mean 'item'"),
        ("genres", [], r"task.item: got 'genres' with kind='list'"),
        ("item", ["user"], "item feature 'user'"),
    ],
)
def test_features_that_cannot_describe_an_item_are_refused(item: str, others: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TableDataset(TABLE, columns()).catalog(item, others)


def test_files_of_items_with_another_type_are_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"item": [1.5], "genres": [[1]]}), tmp_path / "items.parquet")
    reader = item_catalog.ItemReader(columns(), "item", ["genres"])
    groups = ParquetGroups(str(tmp_path / "items.parquet"))
    with pytest.raises(InputError, match="items: got double; expected integers or text"):
        reader.catalog(groups, groups, None)
