"""Vocabularies: rows by frequency, row 0 for all other ids, and files that are refused unless they are whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tilerec.data.rows import hash_values
from tilerec.data.vocabulary import SCHEMA, IdVocabulary
from tilerec.errors import InputError


def _of(counts: dict[int, int], most: int = 0) -> IdVocabulary:
    hashes = hash_values(np.array(list(counts), np.int64))
    order = np.argsort(hashes)
    return IdVocabulary.ranked(hashes[order], np.array(list(counts.values()), np.int64)[order], most)


def test_frequent_ids_have_the_first_rows_and_unknown_ids_row_0() -> None:
    vocabulary = _of({10: 3, -5: 9, 2**62: 1})
    assert vocabulary.num_rows == 4
    assert vocabulary.rows_of(hash_values(np.array([-5, 10, 2**62, 11]))).tolist() == [1, 2, 3, 0]


def test_ids_with_equal_counts_have_rows_in_the_order_of_their_hashes() -> None:
    vocabulary = _of(dict.fromkeys(range(100), 7))
    assert vocabulary.rows.tolist() == list(range(1, 101))


def test_only_the_most_frequent_ids_are_kept() -> None:
    vocabulary = _of({10: 3, 20: 9, 30: 1}, most=2)
    assert vocabulary.rows_of(hash_values(np.array([20, 10, 30]))).tolist() == [1, 2, 0]
    assert sorted(vocabulary.counts.tolist()) == [3, 9]


def test_an_empty_vocabulary_gives_row_0() -> None:
    assert _of({}).num_rows == 1
    assert _of({}).rows_of(np.array([1, 2], np.uint64)).tolist() == [0, 0]


def test_a_file_holds_the_whole_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "ids.parquet"
    before = _of({n: n + 1 for n in range(1000)})
    before.write(path)
    after = IdVocabulary.read(path)
    for name in ("hashes", "rows", "counts"):
        assert np.array_equal(getattr(before, name), getattr(after, name)), name


def _file(tmp_path: Path, hashes: list[int], rows: list[int]) -> Path:
    path = tmp_path / "ids.parquet"
    columns = [pa.array(hashes, pa.uint64()), pa.array(rows, pa.int64()), pa.array([1] * len(rows), pa.int64())]
    parquet.write_table(pa.table(columns, SCHEMA), path)
    return path


@pytest.mark.parametrize(
    ("hashes", "rows"),
    [([2, 1], [1, 2]), ([1, 1], [1, 2]), ([1, 2], [0, 1]), ([1, 2], [1, 1]), ([1, 2], [2, 3])],
)
def test_a_file_with_wrong_hashes_or_rows_is_refused(tmp_path: Path, hashes: list[int], rows: list[int]) -> None:
    with pytest.raises(InputError, match="got unsorted hashes, or rows that are not 1 to 2"):
        IdVocabulary.read(_file(tmp_path, hashes, rows))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        IdVocabulary.read(tmp_path / "none.parquet")
    parquet.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"got columns \['a'\]; expected \['hash', 'row', 'count'\]"):
        IdVocabulary.read(tmp_path / "a.parquet")
    whole = _file(tmp_path, [1, 2], [1, 2])
    whole.write_bytes(whole.read_bytes()[:-20])
    with pytest.raises(InputError, match="cannot be read"):
        IdVocabulary.read(whole)
