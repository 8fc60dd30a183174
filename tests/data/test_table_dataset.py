"""Samples from tables: every row once per pass, the same batches for any number of ranks, exact continuation."""

from __future__ import annotations

import re
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from hypothesis import given

from tilerec.data.batch import Batch
from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.hold_out import HoldOut
from tilerec.data.map_groups import MapGroups
from tilerec.data.parquet_files import ParquetGroups
from tilerec.data.row_groups import TableGroups
from tilerec.data.table_dataset import TableDataset
from tilerec.data.text_files import DelimitedGroups
from tilerec.errors import ConfigError, InputError

COLUMNS = Columns(
    labels=(LabelColumn("y"),),
    dense=(DenseColumn("x"),),
    ids=(IdColumn("user"), IdColumn("items", kind="list", missing="empty")),
    tables=(TableRows("user", 10_000, "rows"), TableRows("items", 100, "rows")),
)


def _table(rows: int, first: int = 0) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table(
        {
            "y": pa.array([float(n % 2) for n in numbers], pa.float32()),
            "x": pa.array([n / 8 for n in numbers], pa.float64()),
            "user": pa.array(list(numbers), pa.int32()),
            "items": pa.array([None if n % 7 == 3 else [n % 5] * (n % 4) for n in numbers], pa.list_(pa.int64())),
            "when": pa.array([f"2024-01-{1 + n // 20:02}" for n in numbers]).cast(pa.date32()),
            "unused": pa.array(["?"] * rows),
        }
    )


def _write(folder: Path, sizes: list[int], group: int = 10) -> Path:
    first = 0
    for number, rows in enumerate(sizes):
        parquet.write_table(_table(rows, first), folder / f"part-{number}.parquet", row_group_size=group)
        first += rows
    return folder


def _samples(batch: Batch) -> list[tuple[Any, ...]]:
    """(user, label, dense, items) of each sample."""
    features = batch.sparse_features.to_dict()
    items = [row.tolist() for row in features["items"].to_dense()]
    users = features["user"].values().tolist()
    return list(zip(users, batch.labels.tolist(), batch.dense_features[:, 0].tolist(), map(tuple, items), strict=True))


def _expected(rows: int) -> list[tuple[Any, ...]]:
    return [(n, float(n % 2), n / 8, () if n % 7 == 3 else (n % 5,) * (n % 4)) for n in range(rows)]


def test_every_row_of_the_files_occurs_once_with_its_own_values(tmp_path: Path) -> None:
    data = TableDataset(ParquetGroups(_write(tmp_path, [25, 40])), COLUMNS, shuffle_rows=16)
    samples = [sample for batch in data.train(8) for sample in _samples(batch)]
    assert sorted(samples) == _expected(65)
    assert samples != _expected(65)
    assert [batch.batch_size for batch in data.train(8)] == [8] * 8 + [1]
    assert data.row_count().rows == data.train_rows == 65


def test_dense_columns_are_the_columns_of_a_contiguous_matrix() -> None:
    numbers = np.arange(50)
    table = pa.table({"y": numbers % 2, **{f"x{k}": numbers + 100 * k for k in range(3)}, "user": numbers})
    columns = replace(
        COLUMNS,
        dense=tuple(DenseColumn(f"x{k}") for k in range(3)),
        ids=COLUMNS.ids[:1],
        tables=COLUMNS.tables[:1],
    )
    for batch in TableDataset(TableGroups(table, rows_per_group=20), columns, shuffle_rows=16).train(8):
        users_B = batch.sparse_features.values()
        assert batch.dense_features.is_contiguous()
        assert batch.dense_features.tolist() == torch.stack([users_B + 100 * k for k in range(3)], 1).tolist()


def test_epochs_and_seeds_have_their_own_orders(tmp_path: Path) -> None:
    source = ParquetGroups(_write(tmp_path, [60]))

    def users(seed: int, epoch: int) -> list[int]:
        return [s[0] for b in TableDataset(source, COLUMNS, seed=seed).train(60, epoch) for s in _samples(b)]

    assert users(0, 0) == users(0, 0)
    assert len({tuple(users(0, 0)), tuple(users(0, 1)), tuple(users(1, 0))}) == 3


@given(
    rows=st.integers(1, 60),
    group=st.integers(1, 25),
    lanes=st.sampled_from([1, 3, 4]),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch=st.integers(1, 20),
    shuffle=st.integers(1, 40),
    stop=st.integers(0, 6),
)
def test_a_pass_continues_on_another_number_of_ranks(
    rows: int, group: int, lanes: int, worlds: tuple[int, int], batch: int, shuffle: int, stop: int
) -> None:
    before, after = (world if lanes == 1 else min(world, lanes) for world in worlds)
    source = TableGroups(_table(rows), rows_per_group=group)
    data = TableDataset(source, COLUMNS, shuffle_rows=shuffle, lanes=lanes)

    def global_batches(world: int, start: int = 0) -> list[list[Any]]:
        ranks = [list(data.train_shares(batch, 2, rank=rank, world_size=world, start=start)) for rank in range(world)]
        out = []
        for shares in zip(*ranks, strict=True):
            assert len({(share.total, share.end) for share in shares}) == 1
            out.append([sample for share in shares for sample in _samples(share.batch)])
            assert len(out[-1]) == shares[0].total
        return out

    whole = global_batches(1)
    assert Counter(s for b in whole for s in b) == Counter(_expected(rows))
    assert global_batches(before) == whole
    start = min(stop * batch, -(-rows // batch) * batch)
    assert global_batches(after, start) == whole[stop:]


def test_a_pass_that_continues_does_not_decode_earlier_row_groups(tmp_path: Path) -> None:
    source = ParquetGroups(_write(tmp_path, [60]))
    data = TableDataset(source, COLUMNS, shuffle_rows=1)
    opened: list[int] = []
    real = source.open

    def open_group(group: int) -> Any:
        opened.append(group)
        return real(group)

    source.open = open_group  # type: ignore[method-assign]
    list(data.train_shares(5, start=35))
    assert len(opened) == 3  # rows 30 to 59: the group that holds the position, and those after it


def test_held_out_rows_are_those_of_the_rule_in_file_order(tmp_path: Path) -> None:
    data = TableDataset(ParquetGroups(_write(tmp_path, [25, 40])), COLUMNS, hold_out=HoldOut(every=4))
    held = [sample[0] for batch in data.held_out(7) for sample in _samples(batch)]
    assert held == list(range(3, 65, 4))
    train = [sample[0] for batch in data.train(7) for sample in _samples(batch)]
    assert sorted(train + held) == list(range(65))
    assert data.held_out_rows == len(held)


def test_a_split_by_time_reads_statistics_where_they_decide(tmp_path: Path) -> None:
    rule = HoldOut(column="when", at_least="2024-01-03")
    data = TableDataset(ParquetGroups(_write(tmp_path, [65], group=10)), COLUMNS, hold_out=rule)
    assert [s[0] for b in data.held_out(100) for s in _samples(b)] == list(range(40, 65))
    assert sorted(s[0] for b in data.train(100) for s in _samples(b)) == list(range(40))
    mixed = TableDataset(TableGroups(_table(65), rows_per_group=30), COLUMNS, hold_out=rule)
    assert [s[0] for b in mixed.held_out(100) for s in _samples(b)] == list(range(40, 65))


def test_other_files_can_be_held_out(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    train, held = _write(tmp_path / "a", [20]), _write(tmp_path / "b", [9])
    data = TableDataset(ParquetGroups(train), COLUMNS, held_out_data=ParquetGroups(held))
    assert data.train_rows == 20
    assert [s[0] for b in data.held_out(4) for s in _samples(b)] == list(range(9))


def test_rows_come_in_file_order_with_their_key_columns(tmp_path: Path) -> None:
    table = _write(tmp_path, [25, 40])
    data = TableDataset(ParquetGroups(table), COLUMNS, hold_out=HoldOut(every=2))
    batches = list(data.rows(16, keys=["user", "unused"]))
    assert [keys.num_rows for _, keys in batches] == [16, 16, 16, 16, 1]
    assert [n for _, keys in batches for n in keys.column("user").to_pylist()] == list(range(65))
    assert [s for b, _ in batches for s in _samples(b)] == _expected(65)
    assert all(keys.column_names == ["user", "unused"] for _, keys in batches)


def test_key_columns_have_one_type_whatever_the_types_of_the_files(tmp_path: Path) -> None:
    roles = Columns(ids=(IdColumn("user"), IdColumn("city")), tables=(TableRows("user", 50), TableRows("city", 50)))
    wide = pa.table({"user": pa.array([7, 2**40]), "city": pa.array(["a", "b"]).dictionary_encode()})
    narrow = pa.table({"user": pa.array([8], pa.int32()), "city": ["c"]})
    parquet.write_table(narrow, tmp_path / "0.parquet")
    parquet.write_table(wide, tmp_path / "1.parquet")
    for batch_size in (1, 3):
        data = TableDataset(ParquetGroups(tmp_path), roles, labels=False)
        keys = pa.concat_tables(table for _, table in data.rows(batch_size, ["user", "city"]))
        assert keys.to_pydict() == {"user": [8, 7, 2**40], "city": ["c", "a", "b"]}


def test_text_keys_of_text_files_are_text(tmp_path: Path) -> None:
    roles = Columns(ids=(IdColumn("city"),), tables=(TableRows("city", 50),))
    (tmp_path / "a.csv").write_bytes("city,n\nä,1\n,2\n".encode())
    data = TableDataset(DelimitedGroups(tmp_path / "a.csv"), replace(roles, ids=(IdColumn("city", missing="row"),)),
                        labels=False)  # fmt: skip
    ((_, keys),) = data.rows(8, ["city", "n"])
    assert keys.to_pydict() == {"city": ["ä", None], "n": [1, 2]}
    assert keys.schema.field("city").type == pa.string()
    (tmp_path / "b.csv").write_bytes("city,n\nä,1\n".encode("latin-1"))
    data = TableDataset(DelimitedGroups(tmp_path / "b.csv"), roles, labels=False)
    with pytest.raises(
        InputError, match=r"b.csv, lines 2 to 2: key column 'city': got text that is not UTF-8;.*other keys"
    ):
        next(data.rows(8, ["city"]))


def test_samples_to_predict_need_no_labels() -> None:
    data = TableDataset(_table(10).drop_columns(["y"]), COLUMNS, labels=False)
    (batch, _) = next(data.rows(10))
    assert batch.labels.isnan().all()
    with pytest.raises(ConfigError, match=r"got labels=False; expected labels to train on"):
        next(data.train_shares(4))


class _Short(torch.utils.data.Dataset[dict[str, int]]):
    """States 20 samples and has 9."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, int]:
        return ([{"y": 0}] * 9)[index]


class _Unsized(torch.utils.data.Dataset[dict[str, int]]):
    def __getitem__(self, index: int) -> dict[str, int]:
        return {"y": index}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            _Short(),
            r"_Short, samples 0 to 19: got IndexError 'list index out of range'; expected 20 samples, as __len__",
        ),
        (_Unsized(), r"_Unsized: got a map-style data set without __len__; expected its number of samples. Define it"),
    ],
)
def test_a_map_style_dataset_has_the_samples_that_it_states(
    data: torch.utils.data.Dataset[dict[str, int]], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        MapGroups(data)


def test_a_map_style_dataset_of_dicts_gives_the_same_rows() -> None:
    class Clicks(torch.utils.data.Dataset[dict[str, Any]]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, n: int) -> dict[str, Any]:
            items = torch.tensor([n % 5] * (n % 4), dtype=torch.int64)
            return {"y": torch.tensor(float(n % 2)), "x": np.float64(n / 8), "user": n, "items": items}

    data = TableDataset(MapGroups(Clicks(), rows_per_group=6), COLUMNS)
    users = [s[:3] for b in data.train(7) for s in _samples(b)]
    assert sorted(users) == [row[:3] for row in _expected(20)]


def test_frames_give_the_same_rows() -> None:
    pandas = pytest.importorskip("pandas")
    polars = pytest.importorskip("polars")
    table = _table(30)
    for frame in (table.to_pandas(), polars.from_arrow(table), table.to_pydict()):
        data = TableDataset(frame, COLUMNS)
        assert sorted(s for b in data.train(7) for s in _samples(b)) == _expected(30)
    assert pandas is not None


@pytest.mark.parametrize("text", [False, True])
def test_labels_out_of_bounds_have_a_place(tmp_path: Path, text: bool) -> None:
    table = _table(40)
    labels = [2.0 if n == 27 else float(n % 2) for n in range(40)]
    table = table.set_column(0, "y", pa.array(labels)).drop_columns(["items"])
    columns = Columns(labels=COLUMNS.labels, ids=(IdColumn("user"),), tables=(TableRows("user", 100),))
    if text:
        lines = [",".join(map(str, row.values())) for row in table.to_pylist()]
        (tmp_path / "clicks.csv").write_text("\n".join([",".join(table.column_names), *lines]))
        source, place = DelimitedGroups(tmp_path / "clicks.csv"), r"clicks\.csv, lines 2 to 40: .*in row 27"
    else:
        parquet.write_table(table, tmp_path / "clicks.parquet", row_group_size=10)
        source, place = ParquetGroups(tmp_path / "clicks.parquet"), r"clicks\.parquet, row group 2: .*in row 7"
    free = TableDataset(source, columns, hold_out=HoldOut(every=4))
    assert [label for batch, _ in free.rows(8) for label in batch.labels.tolist()] == labels  # every number is a label
    data = free.with_label_bounds(0, 1)
    assert (data.train_rows, data.held_out_rows) == (free.train_rows, free.held_out_rows) == (30, 10)
    for batches in (data.train(8), data.held_out(8), data.rows(8)):
        with pytest.raises(InputError, match=rf"{place}; expected 0 to 1\. Set at_least on the column"):
            list(batches)
    binary = replace(columns, labels=(LabelColumn("y", at_least=2),))
    found = TableDataset(source, binary).with_label_bounds(0, 1).rows(40)
    assert [batch.labels.sum().item() for batch, _ in found] == [1]
    apart = TableDataset(_table(8), columns, held_out_data=source).with_label_bounds(0, 1)
    assert len(list(apart.train(8))) == 1
    with pytest.raises(InputError, match=place):
        list(apart.held_out(8))


def test_an_iterator_that_is_left_early_ends_its_thread_and_closes_its_files(tmp_path: Path) -> None:
    data = TableDataset(ParquetGroups(_write(tmp_path, [200])), COLUMNS, shuffle_rows=1, read_ahead_bytes=1)
    before = threading.active_count()
    shares = data.train_shares(2)
    next(shares)
    assert threading.active_count() == before + 1
    shares.close()
    assert threading.active_count() == before
    descriptors = {
        str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and path.exists()
    }
    assert not [path for path in descriptors if path.startswith(str(tmp_path))]


def test_several_tasks_and_sample_weights_reach_the_batch() -> None:
    columns = Columns(
        labels=(LabelColumn("y"), LabelColumn("x", task="high", at_least=1.0)),
        ids=(IdColumn("user", name="u", table="people"), IdColumn("user", name="v", table="people")),
        tables=(TableRows("people", 50, "rows"),),
        weight="x",
    )
    data = TableDataset(_table(20), columns)
    (batch,) = list(data.held_out(5)) or [next(data.rows(20))[0]]
    assert data.tasks == ("y", "high")
    assert batch.labels.shape == (20, 2)
    assert batch.labels[:, 1].tolist() == [float(n >= 8) for n in range(20)]
    assert batch.weights is not None
    assert batch.weights.tolist() == [n / 8 for n in range(20)]
    assert [(f.name, f.table) for f in data.sparse_features] == [("u", "people"), ("v", "people")]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"labels": (LabelColumn("yy"),)},
            ConfigError,
            r"label column 'yy', which is not there; expected a known name; did you mean 'y'\?",
        ),
        (
            {"dense": (DenseColumn("unused"),)},
            InputError,
            r"dense column 'unused': got string; expected number",
        ),
        (
            {"dense": (DenseColumn("items"),)},
            InputError,
            r"dense column 'items': got list<.*>; expected number",
        ),
        (
            {"ids": (IdColumn("items"),), "tables": (TableRows("items", 9),)},
            InputError,
            r"id column 'items': got list.*Set kind='list'",
        ),
        (
            {"ids": (IdColumn("user", kind="list"),), "tables": (TableRows("user", 9),)},
            InputError,
            r"id column 'user': got int32; expected list of integer.*Set kind='single'",
        ),
        (
            {"ids": (IdColumn("unused"),), "tables": (TableRows("unused", 9, "rows"),)},
            InputError,
            r"'unused': got string; expected integer or boolean. Set ids='hash'",
        ),
        (
            {"ids": (IdColumn("x"),), "tables": (TableRows("x", 9),)},
            InputError,
            r"'x': got double; expected integer or text or boolean. Store ids as integers or text, or set boundaries",
        ),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_reading(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    settings: dict[str, Any] = {"labels": (LabelColumn("y"),), **change}
    with pytest.raises(error, match=message):
        TableDataset(_table(5), Columns(**settings))


def test_data_without_training_rows_is_refused() -> None:
    with pytest.raises(InputError, match="no rows to train on"):
        TableDataset(_table(0), COLUMNS)
    with pytest.raises(InputError, match="Hold out less"):
        TableDataset(_table(5), COLUMNS, hold_out=HoldOut(column="when", at_least="2000-01-01"))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"epoch": -1}, "epoch: got -1"),
        ({"start": -1}, "start: got -1"),
        ({"rank": 2, "world_size": 2}, "rank: got 2 of world_size=2"),
        ({"rank": -1}, "rank: got -1 of world_size=1"),
    ],
)
def test_ranks_and_positions_that_do_not_exist_are_refused(place: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        next(TableDataset(_table(10), COLUMNS).train_shares(**{"batch_size": 4, **place}))


def test_a_split_by_a_column_with_missing_times_is_refused_whatever_the_row_groups(tmp_path: Path) -> None:
    table = _table(20).append_column("at", pa.array([float("nan") if n == 15 else float(n) for n in range(20)]))
    for group in (20, 7, 3):
        parquet.write_table(table, tmp_path / "a.parquet", row_group_size=group)
        with pytest.raises(InputError, match=r"hold_out column 'at': got 1 missing values; expected a value"):
            TableDataset(ParquetGroups(tmp_path), COLUMNS, hold_out=HoldOut(column="at", at_least="5"))


def test_settings_that_contradict_are_refused() -> None:
    for arguments in ({"lanes": 0}, {"shuffle_rows": 0}, {"read_ahead_bytes": -1}):
        with pytest.raises(ConfigError, match="expected at least 1"):
            TableDataset(_table(5), COLUMNS, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="seed: got -1; expected at least 0"):
        TableDataset(_table(5), COLUMNS, seed=-1)
    with pytest.raises(ConfigError, match="expected one of them"):
        TableDataset(_table(5), COLUMNS, hold_out=HoldOut(every=2), held_out_data=_table(2))
    with pytest.raises(ConfigError, match=r"hold_out.at_least: got 'soon'"):
        TableDataset(_table(5), COLUMNS, hold_out=HoldOut(column="when", at_least="soon"))
    with pytest.raises(ConfigError, match="lanes: got 2 on 3 ranks"):
        next(TableDataset(_table(5), COLUMNS, lanes=2).train_shares(1, world_size=3))
