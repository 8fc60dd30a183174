"""Counts of ids: equal to a dictionary's, however many runs are on disk; and the command that writes them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner

from tilerec.cli import app
from tilerec.data.columns import Columns, IdColumn, LabelColumn, TableRows
from tilerec.data.id_counts import write_vocabularies
from tilerec.data.parquet_files import ParquetGroups
from tilerec.data.rows import hash_values
from tilerec.data.table_dataset import TableDataset
from tilerec.data.vocabulary import IdVocabulary
from tilerec.errors import ConfigError, InputError
from tilerec.file_kind import VOCABULARY


@pytest.fixture
def data(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    users = draw.zipf(1.3, 5000) % 700
    friends = [draw.integers(0, 900, n).tolist() for n in draw.integers(0, 4, 5000)]
    table = pa.table(
        {
            "user": pa.array([None if n % 17 == 0 else int(user) for n, user in enumerate(users)], pa.int64()),
            "friends": pa.array(friends, pa.list_(pa.int64())),
            "city": pa.array([f"city {user % 31}" for user in users]),
            "price": pa.array(draw.random(5000)),
            "y": pa.array(draw.integers(0, 2, 5000)),
        }
    )
    path = tmp_path / "data.parquet"
    parquet.write_table(table, path, row_group_size=400)
    return path


def _expected(path: Path, columns: list[str]) -> Counter[object]:
    found: Counter[object] = Counter()
    for column in columns:
        for value in parquet.read_table(path).column(column).to_pylist():
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    return found


def _rows(vocabulary: IdVocabulary, values: list[object]) -> list[int]:
    texts = isinstance(values[0], str)
    hashed = hash_values(pa.array([str(v).encode() for v in values]) if texts else np.array(values, np.int64))
    return [int(row) for row in vocabulary.rows_of(hashed)]


@pytest.mark.parametrize("memory_bytes", [1 << 28, 4096, 64])
def test_counts_equal_those_of_a_dictionary_with_any_memory(data: Path, tmp_path: Path, memory_bytes: int) -> None:
    tables = {"users": ["user", "friends"], "city": ["city"]}
    seen: list[tuple[int, int]] = []
    written = write_vocabularies(
        ParquetGroups(data),
        tables,
        tmp_path / "ids",
        min_count=5,
        memory_bytes=memory_bytes,
        report=lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (5000, 5000)
    assert len(seen) == 13
    for summary, columns in zip(written, tables.values(), strict=True):
        expected = _expected(data, columns)
        frequent = {value: count for value, count in expected.items() if count >= 5}
        assert summary.distinct == len(expected)
        assert summary.kept == len(frequent)
        assert summary.occurrences == sum(expected.values())
        assert summary.covered == sum(frequent.values())
        vocabulary = IdVocabulary.read(summary.path)
        by_row = sorted(zip(_rows(vocabulary, list(frequent)), frequent.values(), strict=True))
        assert [row for row, _ in by_row] == list(range(1, len(frequent) + 1))
        assert [count for _, count in by_row] == sorted(frequent.values(), reverse=True)
        rare = [value for value, count in expected.items() if count < 5]
        assert not rare or set(_rows(vocabulary, rare)) == {0}
    assert sorted(path.name for path in (tmp_path / "ids").iterdir()) == ["city.parquet", "users.parquet"]


def test_batches_have_the_rows_of_the_vocabulary(data: Path, tmp_path: Path) -> None:
    write_vocabularies(ParquetGroups(data), {"user": ["user"], "city": ["city"]}, tmp_path, min_count=3, max_rows=20)
    vocabularies = {name: IdVocabulary.read(tmp_path / f"{name}.parquet") for name in ("user", "city")}
    columns = Columns(
        (LabelColumn("y"),),
        ids=(IdColumn("user", missing="row"), IdColumn("city")),
        tables=tuple(TableRows(name, 20, "vocabulary", str(tmp_path / f"{name}.parquet")) for name in vocabularies),
    )
    batch, table = next(iter(TableDataset(ParquetGroups(data), columns).rows(5000, ["user", "city"])))
    for name, vocabulary in vocabularies.items():
        values = table.column(name).to_pylist()
        expected = [0 if value is None else _rows(vocabulary, [value])[0] for value in values]
        assert batch.sparse_features[name].values().tolist() == expected
        assert max(expected) == 19


def test_a_table_that_is_too_small_is_refused_before_the_first_batch(data: Path, tmp_path: Path) -> None:
    write_vocabularies(ParquetGroups(data), {"city": ["city"]}, tmp_path)
    columns = Columns(
        (LabelColumn("y"),),
        ids=(IdColumn("city"),),
        tables=(TableRows("city", 31, "vocabulary", str(tmp_path / "city.parquet")),),
    )
    with pytest.raises(ConfigError, match="got rows=31 for a vocabulary of 31 ids; expected at least 32"):
        TableDataset(ParquetGroups(data), columns)


@pytest.mark.parametrize(
    ("tables", "options", "message"),
    [
        ({}, {}, "got no tables"),
        ({"user": ["usr"]}, {}, "did you mean 'user'"),
        ({"user": ["user"]}, {"min_count": 0}, "got min_count=0"),
        ({"user": ["user"]}, {"max_rows": 1}, "max_rows=1"),
    ],
)
def test_wrong_settings_are_refused(
    data: Path, tmp_path: Path, tables: dict[str, list[str]], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_vocabularies(ParquetGroups(data), tables, tmp_path / "ids", **options)
    assert not (tmp_path / "ids").exists()


def test_a_column_of_numbers_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="id column 'price': got double; expected integers, text"):
        write_vocabularies(ParquetGroups(data), {"price": ["price"]}, tmp_path / "ids")


def test_the_command_writes_vocabularies_and_prints_what_they_cover(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "ids"
    arguments = ["data", "vocabulary", str(data), "--table", "city", "--table", "users=user,friends"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out), "--min-count", "5"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "31" in result.output
    assert "100.00%" in result.output
    assert IdVocabulary.read(out / "city.parquet").num_rows == 32
    assert VOCABULARY.has(out / "city.parquet")
    wrong = CliRunner().invoke(app, ["data", "vocabulary", str(data), "--table", "town", "--out", str(out)])
    assert wrong.exit_code == 1
    assert "'town'" in wrong.output
    twice = CliRunner().invoke(app, [*arguments, "--table", "city=user", "--out", str(out)], env={"COLUMNS": "200"})
    assert "expected each table once" in twice.output
