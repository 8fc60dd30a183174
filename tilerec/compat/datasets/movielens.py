"""TorchRec's names for the MovieLens files: rows of ratings. `tilerec.data.MovieLens` makes batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tilerec.compat.datasets.readers import Rows, TextRows, safe_cast

RATINGS_FILENAME = "ratings.csv"
MOVIES_FILENAME = "movies.csv"
DEFAULT_RATINGS_COLUMN_NAMES = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_COLUMN_NAMES = ["movieId", "title", "genres"]
DEFAULT_COLUMN_NAMES = DEFAULT_RATINGS_COLUMN_NAMES + DEFAULT_MOVIES_COLUMN_NAMES[1:]

RowMapper = Callable[[list[str]], Any]


def _row_of(texts: list[str]) -> dict[str, Any]:
    """Return the values of a line by column name; a number that is missing is 0."""
    kinds = (int, int, float, int, str, str)
    values = [safe_cast(text, kind, kind()) for text, kind in zip(texts, kinds, strict=False)]
    return dict(zip(DEFAULT_COLUMN_NAMES, values, strict=False))


class _WithMovies:
    """Lines of ratings, each with the title and genres of its movie."""

    def __init__(self, root: Path, row_mapper: RowMapper | None, **open_kw: Any) -> None:
        self._root, self._map, self._open_kw = root, row_mapper, open_kw

    def __iter__(self) -> Iterator[Any]:
        movies = {m[0]: m[1:] for m in TextRows([str(self._root / MOVIES_FILENAME)], None, header=True)}
        for texts in TextRows([str(self._root / RATINGS_FILENAME)], None, header=True, **self._open_kw):
            row = texts + movies.get(texts[1], ["", ""])
            yield row if self._map is None else self._map(row)


def _ratings(root: str, include_movies_data: bool, row_mapper: RowMapper | None, open_kw: dict[str, Any]) -> Rows:
    if include_movies_data:
        return Rows(_WithMovies(Path(root), row_mapper, **open_kw))
    return Rows(TextRows([str(Path(root) / RATINGS_FILENAME)], row_mapper, header=True, **open_kw))


def movielens_20m(
    root: str, *, include_movies_data: bool = False, row_mapper: RowMapper | None = _row_of, **open_kw: Any
) -> Rows:
    """Return the rows of `ratings.csv` in a folder.

    Args:
        include_movies_data: with title and genres, from `movies.csv`.
        row_mapper: maps the texts of a line to a row; None: the texts as they are.
        open_kw: arguments of `open`.
    """
    return _ratings(root, include_movies_data, row_mapper, open_kw)


def movielens_25m(
    root: str, *, include_movies_data: bool = False, row_mapper: RowMapper | None = _row_of, **open_kw: Any
) -> Rows:
    """Return the rows of `ratings.csv` in a folder; see `movielens_20m`."""
    return _ratings(root, include_movies_data, row_mapper, open_kw)
