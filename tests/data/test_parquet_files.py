"""Parquet files: damaged, empty and different ones are named; files are found by folder, pattern and list."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tilerec.data.columns import Columns, IdColumn, LabelColumn, TableRows
from tilerec.data.parquet_files import ParquetGroups
from tilerec.data.table_dataset import TableDataset
from tilerec.errors import ConfigError, InputError

COLUMNS = Columns((LabelColumn("y"),), ids=(IdColumn("c"),), tables=(TableRows("c", 1000),))


def _write(path: Path, rows: int = 50, **types: pa.DataType) -> Path:
    types = {"y": pa.float32(), "c": pa.int64(), **types}
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = {name: pa.array(range(rows)).cast(kind) for name, kind in types.items()}
    parquet.write_table(pa.table(columns), path, row_group_size=20, compression="none", use_dictionary=False)
    return path


def test_files_come_from_folders_patterns_and_lists(tmp_path: Path) -> None:
    for name in ("b/2.parquet", "a/1.parquet", "_temporary/3.parquet", ".hidden.parquet"):
        _write(tmp_path / name)
    (tmp_path / "a" / "_SUCCESS").touch()
    names = [Path(file.name).name for file in ParquetGroups(tmp_path).files]
    assert names == ["1.parquet", "2.parquet"]
    assert len(ParquetGroups(str(tmp_path / "*" / "1.parquet")).files) == 1
    both = [tmp_path / "b/2.parquet", str(tmp_path / "a"), tmp_path / "a/1.parquet"]
    assert [Path(file.name).name for file in ParquetGroups(both).files] == ["2.parquet", "1.parquet"]
    assert ParquetGroups(both).group_rows == (20, 20, 10) * 2


def test_places_without_data_are_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    for path, message in (
        (tmp_path, r"got a folder with notes.txt; expected files that end with .parquet"),
        (tmp_path / "x.parquet", "a path that does not exist"),
        (tmp_path / "*.pq", "a pattern without matches"),
        ("nosuch://bucket/x.parquet", "got a file system that is not available"),
    ):
        with pytest.raises(InputError, match=message):
            ParquetGroups(path)
    with pytest.raises(ConfigError, match="path: got nothing"):
        ParquetGroups([])


def test_an_empty_file_and_other_formats_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "bad.parquet"
    for content in (b"", b"a,b\n1,2\n", b"PAR1" * 10):
        bad.write_bytes(content)
        with pytest.raises(
            InputError, match=r"bad.parquet: got a file that cannot be read as Parquet .* write it again"
        ):
            ParquetGroups(bad)


def test_files_without_rows_are_left_out_unless_all_are(tmp_path: Path) -> None:
    _write(tmp_path / "0.parquet", rows=0)
    with pytest.raises(InputError, match="without rows"):
        ParquetGroups(tmp_path)
    _write(tmp_path / "1.parquet")
    assert sum(ParquetGroups(tmp_path).group_rows) == 50


@pytest.mark.parametrize("kept", [0.2, 0.6, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, kept: float) -> None:
    path = _write(tmp_path / "day.parquet")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(InputError, match=r"day\.parquet: got a file that cannot be read as Parquet"):
        ParquetGroups(path)


def test_damage_within_a_row_group_arrives_in_the_consumer(tmp_path: Path) -> None:
    path = _write(tmp_path / "day.parquet")
    content = bytearray(path.read_bytes())
    place = parquet.ParquetFile(path).metadata.row_group(1).column(1).data_page_offset
    content[place : place + 40] = b"\xff" * 40
    path.write_bytes(content)
    data = TableDataset(ParquetGroups(path), COLUMNS)
    with pytest.raises(InputError, match=r"day.parquet, row group 1: columns .*'c'.*got data that cannot be decoded"):
        list(data.train(10))


def test_a_file_that_changes_after_it_was_opened_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "day.parquet")
    data = TableDataset(ParquetGroups(path), COLUMNS, shuffle_rows=1)
    parquet.write_table(parquet.read_table(path).slice(0, 45), path, row_group_size=15)
    with pytest.raises(InputError, match=r"day.parquet, row group \d: got 15 rows; expected \d+.*unchanged"):
        list(data.train(10))


def test_files_with_other_schemas_are_named(tmp_path: Path) -> None:
    _write(tmp_path / "1.parquet")
    _write(tmp_path / "2.parquet", c=pa.int32())  # another width of the same class is read alike
    assert TableDataset(ParquetGroups(tmp_path), COLUMNS).train_rows == 100
    _write(tmp_path / "3.parquet", c=pa.string())
    with pytest.raises(InputError, match=r"3.parquet: column 'c': got string; expected int64, as in .*1.parquet"):
        TableDataset(ParquetGroups(tmp_path), COLUMNS)
    parquet.write_table(pa.table({"y": [1.0], "C": [1]}), tmp_path / "3.parquet")
    with pytest.raises(ConfigError, match=r"3.parquet: got no column 'c'"):
        TableDataset(ParquetGroups(tmp_path), COLUMNS)


def test_bad_values_are_named_with_file_and_row_group(tmp_path: Path) -> None:
    table = pa.table({"y": pa.array([1.0] * 25 + [None] + [0.0] * 4), "c": list(range(30))})
    parquet.write_table(table, tmp_path / "day.parquet", row_group_size=10)
    data = TableDataset(ParquetGroups(tmp_path), COLUMNS)
    with pytest.raises(
        InputError, match=r"day.parquet, row group 2: label column 'y': got 1 missing .* the first in row 5"
    ):
        list(data.train(10))


def test_columns_without_a_role_are_not_read(tmp_path: Path) -> None:
    path = _write(tmp_path / "day.parquet", unused=pa.int64())
    place = parquet.ParquetFile(path).metadata.row_group(0).column(2).data_page_offset
    content = bytearray(path.read_bytes())
    content[place : place + 40] = b"\xff" * 40
    path.write_bytes(content)
    assert sum(batch.batch_size for batch in TableDataset(ParquetGroups(path), COLUMNS).train(10)) == 50
