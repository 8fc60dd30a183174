"""`movielens_table`: MovieLens ratings with the movies' genres and years, as one Arrow table with a split by time.

    column         content
    user, movie    rows of embedding tables; 0 for users and movies that the training part lacks
    genres         list of rows of the genres' table, from 1 on
    year           of the movie's release, from its title; null if the title has none
    age            years from the release to the rating; null if the year is
    timestamp      of the rating, in seconds since 1970
    rating         0.5 to 5
    part           0 for training, 1 for validation, 2 for the test

Source of the format: Harper and Konstan, The MovieLens Datasets: History and Context, ACM TiiS 5(4), 2015.

Legend: n ratings, M movies.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as arrow
from pyarrow import csv

from tilerec.errors import ConfigError, FileError, InputError

_SECONDS_PER_YEAR = 365.2425 * 86_400
_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class MovieLensTable:
    """Ratings with features.

    Attributes:
        rows: the table; see the head of the file.
        users, movies, genres: rows of their embedding tables, row 0 included.
    """

    rows: pa.Table
    users: int
    movies: int
    genres: int


def movielens_table(
    path: str | Path, *, per_user: int = 10, latest: float = 0.0, validation: bool = False
) -> MovieLensTable:
    """Read `ratings.csv` and `movies.csv` of a folder.

    Args:
        path: the folder.
        per_user: K: the last K ratings of each user are the test part, and the K before them the validation part; of a
            user with fewer than 3 K ratings, a third (rounded down) each. Not used if `latest` is above 0.
        latest: the share of all ratings that is the test part, by time; as many before them are the validation part.
        validation: leave out the test part, so that settings can be chosen without it. Users and movies that occur only
            in the validation part then count as unknown.

    Raises:
        InputError: a file is missing, lacks a column, or has a value of another type.
        ConfigError: `per_user` is below 1, or `latest` is not from 0 to 0.4.
    """
    if per_user < 1:
        raise ConfigError(f"per_user: got {per_user}; expected at least 1.")
    if not 0 <= latest <= 0.4:
        raise ConfigError(f"latest: got {latest}; expected 0 to 0.4, because as much again is for validation.")
    ratings = _read(
        Path(path) / "ratings.csv",
        {"userId": pa.int64(), "movieId": pa.int64(), "rating": pa.float64(), "timestamp": pa.int64()},
    )
    movies = _read(Path(path) / "movies.csv", {"movieId": pa.int64(), "title": pa.string(), "genres": pa.string()})
    user_n, movie_n = _ints(ratings["userId"]), _ints(ratings["movieId"])
    time_n = _ints(ratings["timestamp"])
    part_n = _latest_of_all(time_n, latest) if latest else _latest_of_users(user_n, time_n, per_user)
    if validation:
        keep_n = part_n < 2
        ratings = ratings.filter(pa.array(keep_n))
        user_n, movie_n, time_n, part_n = (column[keep_n] for column in (user_n, movie_n, time_n, part_n))
    trained_n = part_n < (1 if validation else 2)
    users, movie_ids = np.unique(user_n[trained_n]), np.unique(movie_n[trained_n])
    at_n = _places(movie_n, _ints(movies["movieId"]), path)
    year_n = _years(movies["title"]).take(pa.array(at_n))
    age_n = arrow.subtract(pa.array(1970 + time_n / _SECONDS_PER_YEAR), year_n)
    genre_lists, genres = _genres(movies["genres"])
    rows = pa.table(
        {
            "user": _rows(user_n, users),
            "movie": _rows(movie_n, movie_ids),
            "genres": genre_lists.take(pa.array(at_n)),
            "year": year_n,
            "age": age_n,
            "timestamp": time_n,
            "rating": ratings["rating"],
            "part": part_n,
        }
    )
    return MovieLensTable(rows, len(users) + 1, len(movie_ids) + 1, genres + 1)


def _read(path: Path, types: dict[str, pa.DataType]) -> pa.Table:
    try:
        found = csv.read_csv(
            path,
            convert_options=csv.ConvertOptions(column_types=types, include_columns=list(types)),
            parse_options=csv.ParseOptions(newlines_in_values=False),
        )
    except OSError as error:
        raise FileError(
            f"{path}: got '{error.strerror or error}'; expected a readable file. Pass the folder of a MovieLens "
            "edition with ratings.csv and movies.csv.",
            error.errno,
        ) from error
    except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise InputError(
            f"{path}: got '{error}'; expected the columns {', '.join(types)} of a MovieLens edition. Pass its folder."
        ) from error
    if not found.num_rows:
        raise InputError(f"{path}: got no rows; expected some. Pass the folder of a MovieLens edition.")
    for name in types:
        if found[name].null_count:
            raise InputError(
                f"{path}: got an empty value in column {name!r}; expected a value in each row. Fill it in."
            )
    return found


def _ints(column: Any) -> _Ints:
    return np.asarray(column.to_numpy(), dtype=np.int64)


def _latest_of_all(time_n: _Ints, share: float) -> _Ints:
    """Return the part of each rating; ratings of one second stay together."""
    order = np.sort(time_n)
    count = max(1, round(share * len(time_n)))
    if 2 * count >= len(time_n):
        raise InputError(
            f"MovieLens: got {len(time_n)} ratings; expected enough for three parts. Use a larger edition."
        )
    test, validation = order[-count], order[-2 * count]
    return (time_n >= validation).astype(np.int64) + (time_n >= test)


def _latest_of_users(user_n: _Ints, time_n: _Ints, per_user: int) -> _Ints:
    """Return the part of each rating; of equal times, later lines are later."""
    order_n = np.lexsort((np.arange(len(user_n)), time_n, user_n))
    _, first, inverse_n, counts = np.unique(user_n[order_n], return_index=True, return_inverse=True, return_counts=True)
    from_last_n = (first + counts)[inverse_n] - 1 - np.arange(len(user_n))
    size_n = np.minimum(counts[inverse_n] // 3, per_user)
    part_n = np.zeros(len(user_n), np.int64)
    part_n[order_n] = (from_last_n < 2 * size_n).astype(np.int64) + (from_last_n < size_n)
    return part_n


def _places(movie_n: _Ints, known_M: _Ints, path: str | Path) -> _Ints:
    """Return the row of each rating's movie in movies.csv."""
    order_M = np.argsort(known_M)
    at_n = order_M[np.minimum(np.searchsorted(known_M, movie_n, sorter=order_M), len(known_M) - 1)]
    missing = movie_n[known_M[at_n] != movie_n]
    if len(missing):
        raise InputError(
            f"{path}: got ratings of movie {missing[0]}, which movies.csv lacks; expected all. Use both files of one "
            "edition."
        )
    return at_n


def _rows(ids_n: _Ints, known: _Ints) -> _Ints:
    """Return 1 + the place of each id among the sorted known ones; 0 for others."""
    at_n = np.minimum(np.searchsorted(known, ids_n), len(known) - 1)
    return np.where(known[at_n] == ids_n, at_n + 1, 0)


def _years(titles: Any) -> pa.Array:
    found = arrow.extract_regex(titles.combine_chunks(), pattern=r"\((?P<year>\d{4})\)\s*$")
    return arrow.struct_field(found, "year").cast(pa.float64())


def _genres(column: Any) -> tuple[pa.Array, int]:
    """Return the rows of each movie's genres, and the number of genres."""
    lists = arrow.split_pattern(column.combine_chunks(), "|")
    encoded = lists.flatten().dictionary_encode()
    return pa.ListArray.from_arrays(lists.offsets, arrow.add(encoded.indices.cast(pa.int64()), 1)), len(
        encoded.dictionary
    )
