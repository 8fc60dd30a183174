from __future__ import annotations

from pathlib import Path

import pytest

from tilerec.errors import ConfigError
from tilerec.recipes.data import CriteoData, MovieLensData, SyntheticData


def test_synthetic_settings_hold_for_one_table_or_for_all() -> None:
    data = SyntheticData(num_rows=(5, 7, 9), max_lengths=(1, 2, 3), min_lengths=(0,), held_out_rows=10).open()
    assert [(feature.name, feature.num_rows) for feature in data.sparse_features] == [
        ("feature_0", 5),
        ("feature_1", 7),
        ("feature_2", 9),
    ]
    batch = data.batch(0, 2000)
    assert [int(batch.sparse_features[f"feature_{index}"].lengths().max()) for index in range(3)] == [1, 2, 3]
    with pytest.raises(
        ConfigError, match=r"data\.exponents: got 2 numbers; expected 1, or one for each of the 3 tables"
    ):
        SyntheticData(num_rows=(5, 7, 9), exponents=(1.0, 2.0)).open()


def test_movielens_settings_reach_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    path.write_text("userId,movieId,rating,timestamp\n1,1,2,1\n1,2,2,2\n1,3,2,3\n1,4,1,4\nx\n")
    data = MovieLensData(str(path), held_out_per_user=1, like=2.0, on_bad_row="skip").open()
    (train,), (held_out,) = data.train(9), data.held_out(9)
    assert (train.labels.tolist(), held_out.labels.tolist()) == ([1.0] * 3, [0.0])
    assert data.row_count().skipped == 1


def test_criteo_settings_reach_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "c.txt"
    path.write_text("\t".join(["1", *[""] * 39]) + "\n" + "\t".join(["0", *[""] * 39]) + "\n" + "bad\n")
    sizes = tuple(range(10, 36))
    data = CriteoData(str(path), num_rows=sizes, missing="empty", held_out_every=2, on_bad_row="skip").open()
    assert tuple(feature.num_rows for feature in data.sparse_features) == sizes
    (held_out,) = data.held_out(5)
    assert held_out.sparse_features.values().numel() == 0
    assert held_out.labels.tolist() == [0.0]
    assert data.row_count().skipped == 1
    assert {feature.num_rows for feature in CriteoData(str(path)).open().sparse_features} == {100_000}
