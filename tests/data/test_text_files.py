"""CSV and TSV files as row groups: types, lists, blocks, and errors that name the line."""

from __future__ import annotations

import gzip
from pathlib import Path

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given

from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.table_dataset import TableDataset
from tilerec.data.text_files import DelimitedGroups, ListColumn
from tilerec.errors import ConfigError, InputError

COLUMNS = Columns(
    labels=(LabelColumn("y"),),
    dense=(DenseColumn("x", missing="zero"),),
    ids=(IdColumn("user", missing="empty"), IdColumn("tags", kind="list", separator="|")),
    tables=(TableRows("user", 100), TableRows("tags", 100)),
)


def _write(path: Path, rows: int = 20, first: int = 0) -> Path:
    lines = ["y,x,user,tags,when"]
    for n in range(first, first + rows):
        lines.append(f"{n % 2},{'' if n == 5 else n / 4},u{n},{'|'.join(map(str, range(n % 4)))},2024-01-{n + 1:02}")
    path.write_text("\n".join(lines) + "\n")
    return path


@given(block=st.integers(1, 400), rows=st.integers(1, 30))
def test_blocks_hold_every_line_once(tmp_path: Path, block: int, rows: int) -> None:
    groups = DelimitedGroups(_write(tmp_path / "a.csv", rows), block_bytes=block)
    assert sum(groups.group_rows) == rows
    found = []
    for group in range(len(groups.group_rows)):
        with groups.open(group) as reader:
            found += reader.read(["user"]).column(0).to_pylist()
    assert found == [f"u{n}".encode() for n in range(rows)]


def test_types_follow_from_the_first_rows(tmp_path: Path) -> None:
    schema = DelimitedGroups(_write(tmp_path / "a.csv"), lists=[ListColumn("tags", "|")]).schema
    assert schema.types == [pa.int64(), pa.float64(), pa.binary(), pa.list_(pa.int64()), pa.binary()]
    (tmp_path / "b.tsv").write_text("1\tab\tc;d\n0\t\t\n")
    groups = DelimitedGroups(tmp_path / "b.tsv", names=["y", "c", "l"], lists=[ListColumn("l", ";")])
    with groups.open(0) as reader:
        assert reader.read(["c", "l", "y"]).to_pylist() == [
            {"c": b"ab", "l": [b"c", b"d"], "y": 1},
            {"c": None, "l": [], "y": 0},
        ]


def test_samples_of_several_files_are_read_in_any_order(tmp_path: Path) -> None:
    _write(tmp_path / "1.csv", 12)
    _write(tmp_path / "2.csv", 9, first=12)
    source = DelimitedGroups(tmp_path, lists=[ListColumn("tags", "|")], block_bytes=60)
    data = TableDataset(source, COLUMNS, shuffle_rows=5)
    dense = [x for batch in data.train(4) for x in batch.dense_features[:, 0].tolist()]
    assert sorted(dense) == sorted(0.0 if n == 5 else n / 4 for n in range(21))
    assert [x for b, _ in data.rows(6) for x in b.dense_features[:, 0].tolist()][6:] == [n / 4 for n in range(6, 21)]


def test_bad_lines_are_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.csv")
    lines = path.read_text().splitlines()
    for bad, message in (
        ("1,2.5,u,", r"a.csv:12: got .* where column 'when' is missing"),
        ("1,2.5,u,,2024,more", r"a.csv:12: got 'more' after the last column"),
    ):
        path.write_text("\n".join([*lines[:11], bad, *lines[11:]]))
        with pytest.raises(InputError, match=message):
            list(TableDataset(DelimitedGroups(path, lists=[ListColumn("tags", "|")]), COLUMNS).rows(4))


def test_a_later_value_of_another_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("y,c\n" + "1,2\n" * 300_000 + "0,two\n")
    columns = Columns((LabelColumn("y"),), ids=(IdColumn("c"),), tables=(TableRows("c", 9),))
    with pytest.raises(InputError, match=r"a.csv:300002: column 'c': got 'two'; expected an integer"):
        list(TableDataset(DelimitedGroups(path), columns).rows(1 << 16))


def test_compressed_and_empty_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(gzip.compress(b"y,c\n1,2\n"))
    with pytest.raises(InputError, match=r"a.csv: got gzip; .* tilerec data convert"):
        DelimitedGroups(path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="got an empty file; expected"):
        DelimitedGroups(path)
    path.write_bytes(b"y,c\n")
    with pytest.raises(InputError, match="without rows"):
        DelimitedGroups(path)
    path.write_bytes(b"y,y\n1,2\n")
    with pytest.raises(InputError, match="the name 'y' twice"):
        DelimitedGroups(path)


def test_files_with_other_headers_are_named(tmp_path: Path) -> None:
    _write(tmp_path / "1.csv")
    (tmp_path / "2.csv").write_text("x,y,user,tags,when\n1,1,u,,2024\n")
    with pytest.raises(InputError, match=r"2.csv: got the header 'x,y,user,tags,when.*expected that of .*1.csv"):
        TableDataset(DelimitedGroups(tmp_path, lists=[ListColumn("tags", "|")]), COLUMNS)
    with pytest.raises(
        ConfigError,
        match=r"got list or text column 'tag', which is not there; expected a known name; did you mean 'tags'",
    ):
        DelimitedGroups(tmp_path, lists=[ListColumn("tag", "|")])
