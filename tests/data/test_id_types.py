"""Types of ids: all files of a run are read by the types of its training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tilerec.data.columns import Columns, IdColumn, LabelColumn, TableRows
from tilerec.data.hold_out import HoldOut
from tilerec.data.id_counts import write_vocabularies
from tilerec.data.id_types import typed
from tilerec.data.table_dataset import TableDataset
from tilerec.data.table_source import TableGroups
from tilerec.data.vocabulary import IdVocabulary
from tilerec.errors import ConfigError, InputError
from tilerec.recipes.files import FilesData

COLUMNS = Columns(
    labels=(LabelColumn("y"),),
    ids=(IdColumn("user"), IdColumn("item"), IdColumn("tags", kind="list", separator="|", missing="empty")),
    tables=(TableRows("user", 1000), TableRows("item", 1000), TableRows("tags", 1000)),
)
TRAIN = "y,user,item,tags\n1,3,A12,5|b\n0,4,77,5\n1,5,78,\n0,6,79,7\n"


def _run(folder: Path, **settings: Any) -> FilesData:
    (folder / "train.csv").write_text(TRAIN)
    data = FilesData((str(folder / "train.csv"),), COLUMNS, **{"hold_out": HoldOut(), **settings})
    opened = data.as_opened(data.open())
    assert [column.type for column in opened.columns.ids] == ["integer", "text", "text"]
    return opened


def _rows(data: TableDataset) -> list[list[int]]:
    (batch,) = [batch for batch, _ in data.rows(100)]
    return [batch.sparse_features[name].values().tolist() for name in ("user", "item", "tags")]


def test_ids_of_a_further_text_file_have_their_rows_of_training(tmp_path: Path) -> None:
    run = _run(tmp_path)
    (tmp_path / "new.csv").write_text("\n".join(["y,user,item,tags", *TRAIN.splitlines()[2:]]) + "\n")
    user, item, tags = _rows(run.open_rows((str(tmp_path / "train.csv"),)))
    assert _rows(run.open_rows((str(tmp_path / "new.csv"),))) == [user[1:], item[1:], tags[2:]]
    # Alone, the file has integers, whose rows are others.
    assert _rows(FilesData((), COLUMNS).open_rows((str(tmp_path / "new.csv"),)))[1] != item[1:]


def test_text_among_integers_is_named_with_its_line(tmp_path: Path) -> None:
    run = _run(tmp_path)
    (tmp_path / "new.csv").write_text("y,user,item,tags\n1,3,A12,5\n0,guest,77,5\n")
    with pytest.raises(InputError, match=r"new.csv:3: .*'user'.*'guest'.*expected an integer"):
        _rows(run.open_rows((str(tmp_path / "new.csv"),)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"user": ["3", "4"]}, r"id column 'user': got string; expected integer or boolean. Store them as integers"),
        ({"item": [77, 78]}, r"id column 'item': got int64; expected text. Store them as texts"),
        ({"tags": [[5], [7]]}, r"id column 'tags': got list<.*int64>; expected list of text. Store them as texts"),
        ({"user": [1.5, 2.0]}, r"id column 'user': got double; .* Store ids as integers or text"),
    ],
)
def test_a_table_of_another_type_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = _run(tmp_path)
    table = pa.table({"y": [1, 0], "user": [3, 4], "item": ["A12", "77"], "tags": [["5"], ["7"]], **changes})
    parquet.write_table(table, tmp_path / "new.parquet")
    with pytest.raises(InputError, match=message):
        run.open_rows((str(tmp_path / "new.parquet"),))


def test_held_out_files_are_read_by_the_types_of_training(tmp_path: Path) -> None:
    (tmp_path / "held.csv").write_text("y,user,item,tags\n0,4,77,5\n")
    data = _run(tmp_path, hold_out=HoldOut(path=(str(tmp_path / "held.csv"),))).open()
    (held,) = data.held_out(10)
    (trained,) = [batch for batch, _ in data.rows(10)]
    assert held.sparse_features["item"].values().tolist() == trained.sparse_features["item"].values().tolist()[1:2]
    train = pa.table({"y": [1, 0], "user": [3, 4], "item": ["A12", "77"], "tags": [["5"], ["7"]]})
    held_table = train.set_column(2, "item", pa.array([77, 78]))
    with pytest.raises(InputError, match="id column 'item': got int64; expected text"):
        TableDataset(train, COLUMNS, held_out_data=held_table)


def test_items_of_another_type_are_refused(tmp_path: Path) -> None:
    train = pa.table({"y": [1, 0], "user": [3, 4], "item": ["A12", "77"], "tags": [["5"], ["7"]]})
    data = TableDataset(train, COLUMNS, items=pa.table({"item": [77, 78]}))
    with pytest.raises(InputError, match="id column 'item': got int64; expected text"):
        data.catalog("item")


def test_types_that_are_set_stay_and_contradictions_are_refused() -> None:
    columns = Columns(ids=(IdColumn("user", type="text"),), tables=(TableRows("user", 10),))
    assert typed(columns, TableGroups({"user": [1, 2]})) is columns
    flags = Columns(ids=(IdColumn("user"),), tables=(TableRows("user", 10),))
    assert typed(flags, TableGroups({"user": [True, False]})).id_types == {"user": "integer"}
    with pytest.raises(ConfigError, match="type='text' and the table 'user' with ids='rows'"):
        Columns(ids=(IdColumn("user", type="text"),), tables=(TableRows("user", 10, "rows"),))
    with pytest.raises(ConfigError, match="type='text' with boundaries"):
        IdColumn("age", boundaries=(1.0,), type="text")
    with pytest.raises(ConfigError, match="type: got 'int'"):
        IdColumn("age", type="int")  # type: ignore[arg-type]


def test_ids_of_another_type_than_their_vocabulary_are_refused(tmp_path: Path) -> None:
    texts = TableGroups({"c": ["7", "8"], "y": [0, 1]})
    write_vocabularies(texts, {"c": ["c"]}, tmp_path)
    table = TableRows("c", 10, "vocabulary", str(tmp_path / "c.parquet"))
    columns = Columns((LabelColumn("y"),), ids=(IdColumn("c"),), tables=(table,))
    assert TableDataset(texts, columns).train_rows == 2
    with pytest.raises(
        ConfigError, match="'c': got integer ids for a vocabulary of text ids, which would all be unknown"
    ):
        TableDataset({"c": [7, 8], "y": [0, 1]}, columns)
    # Files of earlier versions, and tables of both types, have no type.
    parquet.write_table(parquet.read_table(table.vocabulary).replace_schema_metadata(), table.vocabulary)
    columns = Columns((LabelColumn("y"),), ids=(IdColumn("c"),), tables=(table,))
    assert TableDataset({"c": [7, 8], "y": [0, 1]}, columns).train_rows == 2
    both = TableGroups({"c": ["7", "8"], "d": [7, 8]})
    write_vocabularies(both, {"c": ["c", "d"]}, tmp_path / "both")
    assert IdVocabulary.read(tmp_path / "both" / "c.parquet").type == ""
