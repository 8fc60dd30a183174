"""TorchRec's Criteo readers. Expected rows of each rank are those of TorchRec 1.8, read from the same arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilerec.compat.datasets.criteo import (
    DEFAULT_COLUMN_NAMES,
    BinaryCriteoUtils,
    InMemoryBinaryCriteoIterDataPipe,
    criteo_kaggle,
    criteo_terabyte,
)
from tilerec.errors import ConfigError


@pytest.fixture
def files(tmp_path: Path) -> list[list[str]]:
    """Arrays of days of 23 and 18 rows; ids and labels are the number of the row."""
    begin = 0
    for day, rows in enumerate((23, 18)):
        numbers = np.arange(begin, begin + rows, dtype=np.int32)[:, None]
        np.save(tmp_path / f"dense{day}.npy", np.full((rows, 13), day, np.float32))
        np.save(tmp_path / f"sparse{day}.npy", numbers.repeat(26, 1))
        np.save(tmp_path / f"labels{day}.npy", numbers)
        begin += rows
    return [[str(tmp_path / f"{kind}{day}.npy") for day in (0, 1)] for kind in ("dense", "sparse", "labels")]


def rows(files: list[list[str]], stage: str, rank: int, world: int, **more: Any) -> list[list[int]]:
    pipe = InMemoryBinaryCriteoIterDataPipe(stage, *files, batch_size=4, rank=rank, world_size=world, **more)
    batches = list(pipe)
    assert len(batches) == len(pipe)
    for batch in batches:
        assert batch.sparse_features["cat_3"].values().tolist() == batch.labels.tolist()
        assert batch.dense_features[:, 0].tolist() == [float(row >= 23) for row in batch.labels.tolist()]
    return [batch.labels.tolist() for batch in batches]


def test_ranks_take_turns_and_share_the_last_rows(files: list[list[str]]) -> None:
    span = [list(range(begin, begin + 4)) for begin in range(0, 40, 4)]
    assert rows(files, "train", 0, 2) == [*span[0:8:2], [32, 33, 34, 35, 36]]
    assert rows(files, "train", 1, 2) == [*span[1:9:2], [37, 38, 39, 40]]
    assert rows(files, "train", 2, 3) == [span[2], span[5], span[8], [40]]
    assert rows(files, "train", 2, 3, drop_last=True) == [span[2], span[5], span[8]]
    assert rows(files, "train", 1, 2, mmap_mode=True) == rows(files, "train", 1, 2)


def test_validation_and_test_share_the_first_file(files: list[list[str]]) -> None:
    assert rows(files, "val", 0, 2) == [[0, 1, 2, 3], [8, 9, 10, 11], [27, 28, 29, 30], [35, 36, 37]]
    assert rows(files, "test", 2, 3) == [[20, 21, 22, 23], [32, 33, 34, 35], [40]]


def test_a_shuffled_training_set_has_torchrecs_permutation(files: list[list[str]]) -> None:
    first = rows(files, "train", 0, 2, shuffle_training_set=True)
    assert first[:2] == [[40, 28, 13, 39], [3, 22, 33, 26]]
    assert first[-1] == [11]
    assert rows(files, "train", 1, 2, shuffle_training_set=True)[-1] == [19, 12, 38, 14]
    assert rows(files, "train", 0, 2, shuffle_training_set=True, shuffle_training_set_random_seed=3)[0][:2] == [37, 19]


def test_shuffled_batches_have_the_same_rows(files: list[list[str]]) -> None:
    np.random.seed(0)
    assert rows(files, "train", 0, 2, shuffle_batches=True)[0] == [2, 3, 1, 0]


def test_hashes_take_ids_modulo(files: list[list[str]]) -> None:
    pipe = InMemoryBinaryCriteoIterDataPipe("train", *files, batch_size=9, rank=0, world_size=1, hashes=[7] * 26)
    assert next(iter(pipe)).sparse_features["cat_25"].values().tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_bad_arguments_raise(files: list[list[str]]) -> None:
    with pytest.raises(ConfigError, match="stage: got 'eval'"):
        InMemoryBinaryCriteoIterDataPipe("eval", *files, batch_size=1, rank=0, world_size=1)
    with pytest.raises(ConfigError, match="got 1, 2 and 2 files"):
        InMemoryBinaryCriteoIterDataPipe("val", files[0][:1], *files[1:], batch_size=1, rank=0, world_size=1)
    with pytest.raises(ConfigError, match="expected rows below 23"):
        BinaryCriteoUtils.load_npy_range(files[0][0], 20, 9)


def test_shares_of_files_are_those_of_torchrec(files: list[list[str]]) -> None:
    share = BinaryCriteoUtils.get_file_row_ranges_and_remainder
    assert share([23, 18], 1, 3) == ({0: (14, 22), 1: (0, 4)}, 2)
    assert share([23, 18], 0, 2, start_row=3, last_row=30) == ({0: (3, 16)}, 0)
    assert BinaryCriteoUtils.get_shape_from_npy(files[1][0]) == (23, 26)


def test_text_becomes_arrays_and_rows(tmp_path: Path) -> None:
    text = tmp_path / "day"
    lines = [["1", "5", *["-1"] * 12, "0000000f", *[""] * 25], ["0", "", *["2"] * 12, "ff", *["1"] * 25]]
    text.write_text("\n".join("\t".join(line) for line in lines) + "\n")
    out = [str(tmp_path / f"{kind}.npy") for kind in ("dense", "sparse", "labels")]
    BinaryCriteoUtils.tsv_to_npys(str(text), *out)
    dense, sparse, labels = (np.load(path) for path in out)
    np.testing.assert_allclose(dense[:, :2], np.log([[8.0, 2.0], [3.0, 5.0]]), rtol=1e-6)
    assert sparse[:, :2].tolist() == [[15, 0], [255, 1]]
    assert labels.tolist() == [[1], [0]]
    row = next(iter(criteo_kaggle(str(text))))
    assert (row["label"], row["int_0"], row["int_1"], row["cat_0"]) == (1, 5, -1, "0000000f")
    assert set(row) == set(DEFAULT_COLUMN_NAMES)
    assert len(list(criteo_terabyte([str(text)] * 2, row_mapper=None).batch(3))) == 2


def test_frequent_ids_are_numbered_over_all_files(tmp_path: Path) -> None:
    days = [str(tmp_path / f"day_{i}.npy") for i in (0, 1)]
    np.save(days[0], np.array([[7], [9], [7]]))
    np.save(days[1], np.array([[9], [3], [9]]))
    BinaryCriteoUtils.sparse_to_contiguous(days, str(tmp_path), frequency_threshold=2, columns=1)
    assert np.load(tmp_path / "day_0_contig_freq.npy").tolist() == [[2], [3], [2]]
    assert np.load(tmp_path / "day_1_contig_freq.npy").tolist() == [[3], [1], [3]]
