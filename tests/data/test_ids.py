from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from tilerec.data.batch import Batch
from tilerec.data.ids import BatchIds, IdSource, open_ids
from tilerec.errors import ConfigError, InputError
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def _read(source: IdSource) -> dict[str, tuple[list[object], list[int]]]:
    found: dict[str, tuple[list[object], list[int]]] = {}
    for block in source.blocks():
        for name, ids in block.items():
            values, lengths = found.setdefault(name, ([], []))
            assert len(ids.values) == int(ids.lengths.sum())
            values += ids.values.tolist() if isinstance(ids.values, np.ndarray) else ids.values.to_pylist()
            lengths += ids.lengths.tolist()
    return found


def test_fields_are_cut_at_the_separator_and_empty_ones_are_no_ids(tmp_path: Path) -> None:
    path = tmp_path / "clicks.csv"
    path.write_text("user,tags,price\nu1,a|b||c,1\nu2,,2\n,|,3\nu1,b,4")
    source = open_ids(path, features=["tags", "user"], separator="|", block_bytes=16)
    assert _read(source) == {
        "tags": ([b"a", b"b", b"c", b"b"], [3, 0, 0, 1]),
        "user": ([b"u1", b"u2", b"u1"], [1, 1, 0, 1]),
    }
    assert source.count.rows == 4
    assert source.progress.done == source.progress.total == path.stat().st_size


def test_other_delimiters_and_gzip_are_recognised(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(gzip.compress(b"a;b\n1;2\n3;4\n"))
    source = open_ids(path, features=("b",))
    assert _read(source) == {"b": ([b"2", b"4"], [1, 1])}
    assert source.progress.done == path.stat().st_size


@pytest.mark.parametrize("header", [True, False])
def test_criteo_is_recognised_with_and_without_a_header(tmp_path: Path, header: bool) -> None:
    names = ["Label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    lines = [["1", *["2"] * 13, *["aa"] * 25, ""], ["0", *[""] * 13, *["bb"] * 26]]
    path = tmp_path / "day"
    delimiter = "," if header else "\t"
    path.write_text("\n".join(map(delimiter.join, [names] * header + lines)) + "\n")
    found = _read(open_ids(path))
    assert list(found) == [f"C{i}" for i in range(1, 27)]
    assert found["C1"] == ([b"aa", b"bb"], [1, 1])
    assert found["C26"] == ([b"bb"], [0, 1])


def test_movielens_is_recognised_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,31,2.5,9\n7,31,4,10\n")
    assert _read(open_ids(tmp_path)) == {
        "userId": ([b"1", b"7"], [1, 1]),
        "movieId": ([b"31", b"31"], [1, 1]),
    }


def test_parquet_columns_of_numbers_texts_and_lists(tmp_path: Path) -> None:
    table = pa.table(
        {
            "id": pa.array([3, None, 5], pa.int32()),
            "big": pa.array([2**63, 1, 2], pa.uint64()),
            "tags": pa.array([[1, 2], None, [None, 7]], pa.list_(pa.int64())),
            "text": pa.array(["x", "", "x"]).dictionary_encode(),
            "price": pa.array([0.5, 1.0, 2.0]),
        }
    )
    for part in ("b.parquet", "a.parquet"):
        parquet.write_table(table, tmp_path / part)
    source = open_ids(tmp_path)
    assert _read(source) == {
        "id": ([3, 5] * 2, [1, 0, 1] * 2),
        "big": ([-(2**63), 1, 2] * 2, [1] * 6),
        "tags": ([1, 2, 7] * 2, [2, 0, 1] * 2),
        "text": ([b"x", b"", b"x"] * 2, [1] * 6),
    }
    assert source.progress.done == source.progress.total == 6
    assert list(_read(open_ids(tmp_path / "a.parquet", features=["tags"]))) == ["tags"]
    with pytest.raises(ConfigError, match="'price': got double"):
        open_ids(tmp_path, features=["price"])


def test_columns_that_hold_no_ids_are_left_out_or_named(tmp_path: Path) -> None:
    nested = pa.array([[[1]], [[2], []]], pa.list_(pa.list_(pa.int64())))
    table = pa.table({"nested": nested, "id": pa.array([1, 2]), "nothing": pa.nulls(2)})
    parquet.write_table(table, tmp_path / "x.parquet")
    assert _read(open_ids(tmp_path / "x.parquet")) == {"id": ([1, 2], [1, 1])}
    with pytest.raises(ConfigError, match="'nested': got list"):
        open_ids(tmp_path / "x.parquet", features=["nested"])


def test_parquet_files_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"a": [1, 2]}), tmp_path / "1.parquet")
    parquet.write_table(pa.table({"a": [["x"], ["y", "z"]]}), tmp_path / "2.parquet")
    with pytest.raises(InputError, match=r"2\.parquet: column 'a': got texts; expected integers, as in .*1\.parquet"):
        open_ids(tmp_path)
    parquet.write_table(pa.table({"b": [1, 2]}), tmp_path / "2.parquet")
    with pytest.raises(ConfigError, match=r"2\.parquet: got no column 'a'"):
        open_ids(tmp_path)
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(InputError, match="column 'a' more than once"):
        open_ids(tmp_path / "twice.parquet")


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    ids = np.random.default_rng(0).integers(0, 2**60, 200_000)
    parquet.write_table(pa.table({"a": ids}), path, compression="snappy", use_dictionary=False)
    damaged = bytearray(path.read_bytes())
    damaged[8:400_000] = b"\xff" * (400_000 - 8)
    path.write_bytes(damaged)
    with pytest.raises(InputError, match=r"x\.parquet: got damage after row .* of the data"):
        _read(open_ids(path))


def test_lists_of_any_kind_give_their_ids(tmp_path: Path) -> None:
    words = pa.array(["x", "y", "x"]).dictionary_encode()
    table = pa.table(
        {
            "fixed": pa.array([[1, -2], None, [3, None]], pa.list_(pa.int64(), 2)),
            "words": pa.ListArray.from_arrays([0, 2, 2, 3], words),
            "large": pa.array([["a"], [], None], pa.large_list(pa.large_string())),
        }
    )
    parquet.write_table(table, tmp_path / "x.parquet")
    assert _read(open_ids(tmp_path / "x.parquet")) == {
        "fixed": ([1, -2, 3], [2, 0, 1]),
        "words": ([b"x", b"y", b"x"], [2, 0, 1]),
        "large": ([b"a"], [1, 0, 0]),
    }


def test_a_row_group_of_any_size_is_read_in_bounded_memory(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(-(2**62), 2**62, 2_000_000)
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"id": ids}), path, row_group_size=len(ids), compression="none", use_dictionary=False)
    del ids
    before, most = pa.total_allocated_bytes(), 0
    for block in open_ids(path).blocks():
        assert len(block["id"].values) <= 1 << 15
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < path.stat().st_size / 3


def test_batches_give_table_rows() -> None:
    batch = Batch(
        torch.zeros(2, 0),
        KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.tensor([4, 5, 6]), torch.tensor([1, 0, 0, 2])),
        torch.zeros(2),
    )
    source = BatchIds(lambda: [batch, batch], "two batches")
    assert _read(source) == {"a": ([4, 4], [1, 0, 1, 0]), "b": ([5, 6, 5, 6], [0, 2, 0, 2])}
    assert source.table_rows
    assert source.count.rows == 4


def test_bad_lines_stop_or_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n3\n4,5\n")
    with pytest.raises(InputError, match=r"x.csv:3: got .* where column 'b' is missing; expected"):
        _read(open_ids(path, features=["a"]))
    source = open_ids(path, features=["a"], on_bad_row="skip")
    assert _read(source)["a"] == ([b"1", b"4"], [1, 1])
    assert source.count.skipped == 1


def test_mistakes_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("user,item\n1,2\n")
    with pytest.raises(ConfigError, match=r"got no features; expected the columns that hold ids.*user, item"):
        open_ids(path)
    with pytest.raises(ConfigError, match="Did you mean 'item'"):
        open_ids(path, features=["itm"])
    with pytest.raises(ConfigError, match="'user' more than once"):
        open_ids(path, features=["user", "item", "user"])
    with pytest.raises(ConfigError, match="format: got 'csv'"):
        open_ids(path, format="csv")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="on opening it"):
        open_ids(tmp_path / "none.csv", features=["a"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"without ratings\.csv"):
        open_ids(tmp_path / "empty")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(InputError, match="got an empty file"):
        open_ids(tmp_path / "empty.csv", features=["a"])
    (tmp_path / "head.csv").write_text("a\n")
    with pytest.raises(InputError, match="no rows"):
        _read(open_ids(tmp_path / "head.csv", features=["a"]))
    (tmp_path / "x.parquet").write_text("nothing")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        open_ids(tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match=r"got separator='.' for Parquet"):
        open_ids(tmp_path / "x.parquet", separator="|")
