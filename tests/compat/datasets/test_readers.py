"""TorchRec's pipes of rows: MovieLens ratings, splits, limits. Expected rows are those of TorchRec 1.8."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilerec.compat.datasets.movielens import movielens_20m, movielens_25m
from tilerec.compat.datasets.readers import (
    Limit,
    LoadFiles,
    ReadLinesFromCSV,
    Rows,
    idx_split_train_val,
    rand_split_train_val,
    safe_cast,
)
from tilerec.errors import ConfigError


def test_ratings_are_rows_with_or_without_their_movies(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,3.5,100\n1,3,4.0,101\n")
    (tmp_path / "movies.csv").write_text('movieId,title,genres\n2,"A, b (1995)",X|Y\n')
    first = {"userId": 1, "movieId": 2, "rating": 3.5, "timestamp": 100}
    assert next(iter(movielens_25m(str(tmp_path)))) == first
    both = list(movielens_20m(str(tmp_path), include_movies_data=True))
    assert both[0] == {**first, "title": "A, b (1995)", "genres": "X|Y"}
    assert both[1]["title"] == ""
    files = LoadFiles([str(tmp_path / "movies.csv")], mode="t", length=1)
    assert len(files) == 1
    assert list(ReadLinesFromCSV(files, skip_first_line=True)) == [["2", "A, b (1995)", "X|Y"]]


def test_splits_are_those_of_torchrec_and_repeat() -> None:
    train, val = rand_split_train_val(Rows(range(10)), 0.7)
    assert (list(train), list(val), list(train)) == ([2, 3, 4, 5, 7, 8, 9], [0, 1, 6], [2, 3, 4, 5, 7, 8, 9])
    train, val = idx_split_train_val(Rows(range(20)), 0.7, decimal_places=1)
    assert list(val) == [7, 8, 9, 17, 18, 19]
    assert len(list(train)) == 14
    assert list(Limit(Rows(range(9)), 3)) == [0, 1, 2]
    with pytest.raises(ConfigError, match="train_perc: got 70"):
        rand_split_train_val([], 70)
    assert (safe_cast("x", int, 3), safe_cast("4", int, 3)) == (3, 4)
