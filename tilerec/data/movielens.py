"""MovieLens `ratings.csv`: a user likes a movie or not.

    label      1 if rating >= like
    sparse     user, movie: each known id has its own row; row 0 is for ids that the training part does not contain
    dense      none
    held out   the last interactions of each user, by timestamp (by line where timestamps are equal)

Source of the format: Harper and Konstan, The MovieLens Datasets: History and Context, ACM TiiS 5(4), 2015.

Legend: n rows of a block, U users, K held-out rows per user.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tilerec.data.batch import Batch
from tilerec.data.dataset import Dataset, SparseFeature
from tilerec.data.delimited import Block, Column, ColumnKind, DelimitedFile, OnBadRow, RowCount
from tilerec.data.read_ahead import arrays_ahead
from tilerec.data.rows import Vocabulary
from tilerec.data.shuffle import Rows, batched, check_seed
from tilerec.errors import ConfigError, InputError
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

_COLUMNS = (
    Column("userId", ColumnKind.INTEGER, low=0),
    Column("movieId", ColumnKind.INTEGER, low=0),
    Column("rating", ColumnKind.NUMBER, low=0, high=5),
    Column("timestamp", ColumnKind.INTEGER, low=0),
)

_Ints = npt.NDArray[np.int64]


class MovieLens(Dataset):
    """Ratings as likes, streamed from the file on every pass.

    The constructor reads the file once, to collect its users, its movies and the held-out lines. Its memory is
    proportional to distinct users and movies and `held_out_per_user` lines per user, not to the number of ratings.

    Args:
        path: `ratings.csv`, or the folder that holds it.
        held_out_per_user: K; a user with fewer than 2 K ratings has half of them (rounded down) held out.
        like: minimum rating of label 1.
        on_bad_row: "error", or "skip" to leave malformed lines out and count them.
        seed: seed of the order of the training part, which differs from epoch to epoch.
        shuffle_window: number of rows shuffled together; see `batched`. The file is sorted by user, so a window much
            smaller than the file gives batches of few users.
        block_bytes: bytes of text read at a time.

    Raises:
        InputError: the file does not exist, has no ratings, or has a malformed line.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        held_out_per_user: int = 10,
        like: float = 4.0,
        on_bad_row: OnBadRow = "error",
        seed: int = 0,
        shuffle_window: int = 1 << 20,
        block_bytes: int = 1 << 22,
    ) -> None:
        if held_out_per_user < 1:
            raise ConfigError(
                f"held_out_per_user: got {held_out_per_user}; expected at least 1. Leave it out for the default."
            )
        folder = Path(path)
        self._file = DelimitedFile(
            folder / "ratings.csv" if folder.is_dir() else folder,
            _COLUMNS,
            on_bad_row=on_bad_row,
            block_bytes=block_bytes,
        )
        self._like = like
        check_seed(seed)
        self._seed = seed
        self._window = shuffle_window
        self._count = RowCount()
        self._users, self._movies, self._held_out_lines = self._index(held_out_per_user)

    @property
    def sparse_features(self) -> tuple[SparseFeature, ...]:
        return (
            SparseFeature("user", self._users.num_rows),
            SparseFeature("movie", self._movies.num_rows),
        )

    @property
    def dense_features(self) -> tuple[str, ...]:
        return ()

    def train(self, batch_size: int, epoch: int = 0) -> Iterator[Batch]:
        order = np.random.default_rng([self._seed, epoch])
        chunks = self._rows(held_out=False)
        yield from _assembled(batched(chunks, batch_size, window=self._window, generator=order))

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        yield from _assembled(batched(self._rows(held_out=True), batch_size))

    def row_count(self) -> RowCount:
        return self._count

    def _index(self, held_out_per_user: int) -> tuple[Vocabulary, Vocabulary, _Ints]:
        """Return the users, the movies of the training part, and the held-out line numbers, ascending."""
        count = RowCount()
        ratings_of_user = _Tally()
        ratings_of_movie = _Tally()
        # The latest K ratings of every user so far, as columns user, time, line, movie.
        latest: _Ints = np.zeros((4, 0), np.int64)
        for block in self._file.blocks(count):
            user_n, movie_n = block.numbers["userId"], block.numbers["movieId"]
            ratings_of_user.add(user_n.astype(np.int64))
            ratings_of_movie.add(movie_n.astype(np.int64))
            seen = np.stack([user_n, block.numbers["timestamp"], block.lines, movie_n]).astype(np.int64)
            latest = _latest_of_each(np.concatenate([latest, seen], axis=1), held_out_per_user)
        if not count.rows:
            raise InputError(f"{self._file.path}: got no ratings; expected a MovieLens ratings.csv. Check the path.")
        self._count = count
        # A user with few ratings keeps at least half of them for training.
        half_n = ratings_of_user.count(latest[0]) // 2
        held_out = latest[:, _rank_from_last(latest[0]) < np.minimum(half_n, held_out_per_user)]
        held_out_of_movie = _Tally()
        held_out_of_movie.add(held_out[3])
        movies = ratings_of_movie.values
        trained = ratings_of_movie.count(movies) > held_out_of_movie.count(movies)
        return Vocabulary(ratings_of_user.values), Vocabulary(movies[trained]), np.sort(held_out[2])

    def _rows(self, *, held_out: bool) -> Iterator[Rows]:
        count = RowCount()
        for block in self._file.blocks(count):
            place_n = np.searchsorted(self._held_out_lines, block.lines)
            place_n = np.minimum(place_n, len(self._held_out_lines) - 1)
            is_held_out_n = (
                self._held_out_lines[place_n] == block.lines
                if len(self._held_out_lines)
                else np.zeros(len(block), np.bool_)
            )
            chosen_n = is_held_out_n == held_out
            if chosen_n.any():
                yield self._columns(block, chosen_n)
        self._count = count

    def _columns(self, block: Block, chosen_n: npt.NDArray[np.bool_]) -> Rows:
        user_n = self._users.rows(block.numbers["userId"][chosen_n].astype(np.int64))
        movie_n = self._movies.rows(block.numbers["movieId"][chosen_n].astype(np.int64))
        label_n = (block.numbers["rating"][chosen_n] >= self._like).astype(np.float32)
        return user_n, movie_n, label_n


class _Tally:
    """Counts of values; memory is proportional to the number of distinct values."""

    def __init__(self) -> None:
        self.values: _Ints = np.zeros(0, np.int64)
        self._counts: _Ints = np.zeros(0, np.int64)

    def add(self, values: _Ints) -> None:
        new, counts = np.unique(values, return_counts=True)
        both = np.concatenate([self.values, new])
        self.values, inverse = np.unique(both, return_inverse=True)
        total = np.zeros(len(self.values), np.int64)
        np.add.at(total, inverse, np.concatenate([self._counts, counts]))
        self._counts = total

    def count(self, values: _Ints) -> _Ints:
        """Return the number of occurrences of each of `values`; 0 for a value that was never added."""
        if not len(self.values):
            return np.zeros(len(values), np.int64)
        place = np.minimum(np.searchsorted(self.values, values), len(self.values) - 1)
        return np.where(self.values[place] == values, self._counts[place], 0)


def _rank_from_last(sorted_user_n: _Ints) -> _Ints:
    """Return each entry's distance from the end of its run of equal users: 0 for the last entry, 1 before it, …"""
    is_last_n = np.append(sorted_user_n[1:] != sorted_user_n[:-1], True) if len(sorted_user_n) else np.zeros(0, bool)
    last_at = np.flatnonzero(is_last_n)
    runs = np.diff(last_at, prepend=-1)
    return np.repeat(last_at, runs) - np.arange(len(sorted_user_n))


def _latest_of_each(ratings: _Ints, keep: int) -> _Ints:
    """Return the last `keep` columns of each user, ordered by (user, time, line)."""
    ordered = ratings[:, np.lexsort((ratings[2], ratings[1], ratings[0]))]
    return ordered[:, _rank_from_last(ordered[0]) < keep]


def _assembled(rows: Iterator[Rows]) -> Iterator[Batch]:
    """Yield batches of rows, read ahead by a thread."""
    with arrays_ahead((np.concatenate(each[:2]), np.array(each[2])) for each in rows) as ahead:
        yield from map(_batch, ahead)


def _batch(arrays: Rows) -> Batch:
    ids_2B, label_B = map(torch.from_numpy, arrays)
    size = len(label_B)
    return Batch(
        dense_features=torch.zeros(size, 0),
        sparse_features=KeyedJaggedTensor.from_lengths_sync(
            keys=["user", "movie"], values=ids_2B, lengths=torch.ones(2 * size, dtype=torch.int32)
        ),
        labels=label_B,
    )
