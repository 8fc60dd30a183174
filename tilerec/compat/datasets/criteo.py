"""TorchRec's names for the Criteo data: columns, text to arrays, and batches of arrays in memory.

Arrays of a day: `*_dense.npy` float32 `[n, 13]`, `*_sparse.npy` integers `[n, 26]`, `*_labels.npy` int32 `[n, 1]`.

`tilerec.data` reads the text files directly, converts them to Parquet and shuffles them (docs/data.md).

Legend: n rows of a file, N rows of all files, W ranks, B samples of a batch.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset

from tilerec.atomic_file import open_replacement
from tilerec.compat.datasets.readers import PATH_MANAGER_KEY, Rows, TextRows, safe_cast
from tilerec.data.batch import Batch
from tilerec.errors import ConfigError
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DAYS = 24
FREQUENCY_THRESHOLD = 3
TOTAL_TRAINING_SAMPLES = 4195197692
DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES = [f"int_{i}" for i in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES = [f"cat_{i}" for i in range(CAT_FEATURE_COUNT)]
DEFAULT_COLUMN_NAMES = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]

Array = npt.NDArray[Any]
RowMapper = Callable[[list[str]], Any]


def _row_of(texts: list[str]) -> dict[str, int | str]:
    """Return the values of a line by column name: label and counts as integers (0 if missing), categories as text."""
    head = 1 + INT_FEATURE_COUNT
    values = [safe_cast(text, int, 0) for text in texts[:head]] + [safe_cast(text, str, "") for text in texts[head:]]
    return dict(zip(reversed(DEFAULT_COLUMN_NAMES), reversed(values), strict=True))


class CriteoIterDataPipe(Rows):
    """Rows of tab-separated files, in the order of the files.

    Args:
        paths: the files.
        row_mapper: maps the texts of a line to a row; None: the texts as they are.
        open_kw: arguments of `open`.
    """

    def __init__(self, paths: Iterable[str], *, row_mapper: RowMapper | None = _row_of, **open_kw: Any) -> None:
        super().__init__(TextRows(list(paths), row_mapper, delimiter="\t", **open_kw))


def criteo_terabyte(paths: Iterable[str], *, row_mapper: RowMapper | None = _row_of, **open_kw: Any) -> Rows:
    """Return the rows of the day files of the Terabyte data."""
    return CriteoIterDataPipe(paths, row_mapper=row_mapper, **open_kw)


def criteo_kaggle(path: str, *, row_mapper: RowMapper | None = _row_of, **open_kw: Any) -> Rows:
    """Return the rows of `train.txt` or `test.txt` of the Kaggle data; lines of the latter have no label."""
    return CriteoIterDataPipe((path,), row_mapper=row_mapper, **open_kw)


class BinaryCriteoUtils:
    """Functions that make arrays of text files and read parts of arrays."""

    @staticmethod
    def tsv_to_npys(
        in_file: str, out_dense_file: str, out_sparse_file: str, out_labels_file: str,
        dataset_name: str = "criteo_1tb", path_manager_key: str = PATH_MANAGER_KEY,
    ) -> None:  # fmt: skip
        """Convert a text file of a day to three arrays. Dense values are `log(x - min + 2)`: min of all,
        missing values as 0."""
        with open(in_file, newline="") as lines:
            rows = list(csv.reader(lines, delimiter="\t"))
        head = 1 + INT_FEATURE_COUNT
        labels = np.array([[int(row[0])] for row in rows], np.int32).reshape(-1, 1)
        counts = np.array([[int(text or 0) for text in row[1:head]] for row in rows], np.int64)
        ids = np.array([[int(text or "0", 16) for text in row[head:]] for row in rows], np.int64)
        dense = np.log((counts - counts.min() + 2).astype(np.float32))
        for path, array in ((out_dense_file, dense), (out_sparse_file, ids), (out_labels_file, labels)):
            _save(path, array)

    @staticmethod
    def get_shape_from_npy(path: str, path_manager_key: str = PATH_MANAGER_KEY) -> tuple[int, ...]:
        """Return the shape of an array in a file, without reading it."""
        return tuple(np.load(path, mmap_mode="r").shape)

    @staticmethod
    def get_file_row_ranges_and_remainder(
        lengths: list[int], rank: int, world_size: int, start_row: int = 0, last_row: int | None = None
    ) -> tuple[dict[int, tuple[int, int]], int]:
        """Return a rank's share of consecutive rows: file -> (first, last row in it), and N modulo W.

        Args:
            lengths: rows of each file.
            start_row, last_row: first and last row of all that are shared out; None: the last one.
        """
        last = sum(lengths) - 1 if last_row is None else last_row
        each, rest = divmod(last - start_row + 1, world_size)
        first = start_row + rank * each + min(rank, rest)
        end = first + each + (rank < rest)
        ranges, begin = {}, 0
        for file, length in enumerate(lengths):
            low, high = max(first, begin) - begin, min(end, begin + length) - begin
            if low < high:
                ranges[file] = low, high - 1
            begin += length
        return ranges, rest

    @staticmethod
    def load_npy_range(
        fname: str, start_row: int, num_rows: int, path_manager_key: str = PATH_MANAGER_KEY, mmap_mode: bool = False
    ) -> Array:
        """Return rows of an array in a file, mapped or in memory."""
        mapped = np.load(fname, mmap_mode="r")
        if start_row + num_rows > len(mapped):
            raise ConfigError(
                f"load_npy_range: {fname}: got rows {start_row} to {start_row + num_rows}; expected rows below "
                f"{len(mapped)}. Ask for fewer."
            )
        part: Array = mapped[start_row : start_row + num_rows]
        return part if mmap_mode else np.array(part)

    @staticmethod
    def sparse_to_contiguous(
        in_files: list[str], output_dir: str, frequency_threshold: int = FREQUENCY_THRESHOLD,
        columns: int = CAT_FEATURE_COUNT, path_manager_key: str = PATH_MANAGER_KEY,
        output_file_suffix: str = "_contig_freq.npy",
    ) -> None:  # fmt: skip
        """Number the ids of each column, over all files: 1 for ids below the threshold, others from 2 on."""
        arrays = [np.load(path) for path in in_files]
        out = [np.empty(array.shape, np.int32) for array in arrays]
        for column in range(columns):
            _, first, numbers, counts = np.unique(
                np.concatenate([array[:, column] for array in arrays]),
                return_index=True, return_inverse=True, return_counts=True,
            )  # fmt: skip
            frequent = np.flatnonzero(counts >= frequency_threshold)
            new = np.ones(len(counts), np.int32)
            new[frequent[np.argsort(first[frequent])]] = np.arange(2, 2 + len(frequent))
            begin = 0
            for array, result in zip(arrays, out, strict=True):
                result[:, column] = new[numbers[begin : begin + len(array)]]
                begin += len(array)
        for path, result in zip(in_files, out, strict=True):
            _save(str(Path(output_dir) / f"{Path(path).stem}{output_file_suffix}"), result)


class InMemoryBinaryCriteoIterDataPipe(IterableDataset[Batch]):
    """Batches of a rank, from arrays in files. Ranks take turns: rank r has batch r of each W batches.

    The last rows are shared out evenly; fewer than W of them join the batch before them. So every rank has the same
    number of batches. With `shuffle_training_set`, each rank has consecutive rows of one permutation of all.

    Args:
        stage: "train": all rows; "val" and "test": of the first file the first and the second half of its rows.
        dense_paths, sparse_paths, labels_paths: files of the days, in order.
        batch_size: B of a rank.
        rank, world_size: this rank, and W.
        drop_last: leave out the last rows that fill no batch.
        shuffle_batches: permute the rows inside each batch, by numpy's default generator.
        shuffle_training_set: permute the rows of "train".
        shuffle_training_set_random_seed: seed of that permutation.
        mmap_mode: map the files, and read rows when they are used; otherwise the rank's rows are read at once.
        hashes: number of ids of each column; ids are taken modulo these.

    Raises:
        ConfigError: the stage is unknown, or the lists of files differ in length.
    """

    def __init__(
        self, stage: str, dense_paths: list[str], sparse_paths: list[str], labels_paths: list[str], batch_size: int,
        rank: int, world_size: int, drop_last: bool | None = False, shuffle_batches: bool = False,
        shuffle_training_set: bool = False, shuffle_training_set_random_seed: int = 0, mmap_mode: bool = False,
        hashes: list[int] | None = None, path_manager_key: str = PATH_MANAGER_KEY,
    ) -> None:  # fmt: skip
        who = "InMemoryBinaryCriteoIterDataPipe"
        if stage not in ("train", "val", "test"):
            raise ConfigError(f"{who}: stage: got {stage!r}; expected 'train', 'val' or 'test'. Use one of these.")
        if not len(dense_paths) == len(sparse_paths) == len(labels_paths):
            raise ConfigError(
                f"{who}: got {len(dense_paths)}, {len(sparse_paths)} and {len(labels_paths)} files; expected one "
                "dense, one sparse and one labels file per day. Check the lists."
            )
        self._files = [[np.load(path, mmap_mode="r") for path in day] for day in
                       zip(dense_paths, sparse_paths, labels_paths, strict=True)]  # fmt: skip
        self._begins = np.cumsum([0, *(len(labels) for _, _, labels in self._files)])
        self._hashes = None if hashes is None else np.array(hashes, np.int64)
        self._shuffle_batches = shuffle_batches
        half = (int(self._begins[1]) + 1) // 2
        rows = np.arange(self._begins[-1])
        rows = rows if stage == "train" else np.concatenate(
            [rows[:half] if stage == "val" else rows[half : self._begins[1]], rows[self._begins[1] :]]
        )  # fmt: skip
        if shuffle_training_set and stage == "train":
            rows = np.argsort(np.random.RandomState(shuffle_training_set_random_seed).permutation(len(rows)))
            share = np.array_split(rows, world_size)[rank]
            self._batches = [share[i : i + batch_size] for i in range(0, len(share), batch_size)]
            self._batches = [b for b in self._batches if not drop_last or len(b) == batch_size]
        else:
            self._batches = _turns(rows, batch_size, rank, world_size, bool(drop_last))
        self._loaded = None if mmap_mode else [self._read(batch) for batch in self._batches]
        self.num_rows_per_file = [len(labels) for _, _, labels in self._files]
        self.keys = list(DEFAULT_CAT_NAMES)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for i, rows in enumerate(self._batches):
            dense, ids, labels = self._read(rows) if self._loaded is None else self._loaded[i]
            if self._shuffle_batches:
                order = np.random.permutation(len(labels))
                dense, ids, labels = dense[order], ids[order], labels[order]
            yield self._batch(dense, ids, labels)

    def _read(self, rows: Array) -> tuple[Array, Array, Array]:
        """Return dense features, ids and labels of rows of all files, in the order of the rows."""
        files = np.searchsorted(self._begins, rows, side="right") - 1
        out: list[Array] = []
        for part in range(3):
            first = self._files[0][part]
            values = np.empty((len(rows), *first.shape[1:]), first.dtype)
            for file in np.unique(files):
                own = files == file
                values[own] = self._files[file][part][rows[own] - self._begins[file]]
            out.append(values)
        dense, ids, labels = out
        if self._hashes is not None:
            ids = (ids % self._hashes).astype(ids.dtype)
        return dense, ids, labels.reshape(len(rows))

    def _batch(self, dense: Array, ids: Array, labels: Array) -> Batch:
        size = len(labels)
        values = torch.from_numpy(np.ascontiguousarray(ids.T).reshape(-1))
        lengths = torch.ones(len(self.keys) * size, dtype=torch.int32)
        features = KeyedJaggedTensor.from_lengths_sync(self.keys, values, lengths)
        return Batch(torch.from_numpy(np.ascontiguousarray(dense)), features, torch.from_numpy(labels))


def _turns(rows: Array, size: int, rank: int, ranks: int, drop_last: bool) -> list[Array]:
    """Return a rank's batches: its turn in each W batches, and its part of the last rows."""
    whole = len(rows) // (size * ranks)
    rest = len(rows) - whole * size * ranks
    if drop_last:
        rest = 0
    joined = whole > 0 and 0 < rest < ranks  # too few for a batch of each rank
    whole -= joined
    begin = whole * size * ranks
    batches = [rows[(turn * ranks + rank) * size :][:size] for turn in range(whole)]
    last = rows[begin : begin + rest + joined * size * ranks]
    return [*batches, np.array_split(last, ranks)[rank]] if len(last) else batches


def _save(path: str, array: Array) -> None:
    with open_replacement(path, "array") as file:
        np.save(file, array)
