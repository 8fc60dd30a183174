"""MovieLens with features: joined columns and the parts of a split by time, against a slow reading of the files."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tilerec.data.movielens_table import movielens_table
from tilerec.errors import ConfigError, FileError, InputError

Rating = tuple[int, int, float, int]
MOVIES = {
    7: ("Grumpier, Old (1995)", "Comedy|Romance"),
    5: ("Alien (Director's Cut) (1979)", "Horror"),
    9: ("No Year", "(no genres listed)"),
    100: ("Heat (1995) ", "Comedy|Horror|Action"),
}


def _ratings(count: int = 120) -> list[Rating]:
    draw = random.Random(0)
    return [
        (min(draw.randrange(1, 9), draw.randrange(1, 9)), draw.choice(list(MOVIES)), draw.randrange(1, 11) / 2,
         10**9 + draw.randrange(12))
        for _ in range(count)
    ]  # fmt: skip


def _write(folder: Path, ratings: list[Rating]) -> Path:
    lines = ["userId,movieId,rating,timestamp", *(",".join(map(str, one)) for one in ratings)]
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    movies = [f'{movie},"{title}",{genres}' for movie, (title, genres) in MOVIES.items()]
    (folder / "movies.csv").write_text("\n".join(["movieId,title,genres", *movies]) + "\n")
    return folder


def _parts_by_user(ratings: list[Rating], per_user: int) -> list[int]:
    of_user: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for place, (user, _, _, time) in enumerate(ratings):
        of_user[user].append((time, place))
    parts = [0] * len(ratings)
    for places in of_user.values():
        size = min(per_user, len(places) // 3)
        last_first = [place for _, place in sorted(places, reverse=True)]
        for place in last_first[:size]:
            parts[place] = 2
        for place in last_first[size : 2 * size]:
            parts[place] = 1
    return parts


@pytest.mark.parametrize("per_user", [1, 3, 100])
def test_the_last_ratings_of_each_user_are_the_test_part(per_user: int, tmp_path: Path) -> None:
    ratings = _ratings()
    rows = movielens_table(_write(tmp_path, ratings), per_user=per_user).rows
    assert rows["part"].to_pylist() == _parts_by_user(ratings, per_user)
    assert rows["rating"].to_pylist() == [rating for _, _, rating, _ in ratings]


@pytest.mark.parametrize("latest", [0.01, 0.1, 0.3])
def test_the_latest_ratings_of_all_are_the_test_part(latest: float, tmp_path: Path) -> None:
    ratings = _ratings()
    rows = movielens_table(_write(tmp_path, ratings), latest=latest).rows
    times = sorted(time for *_, time in ratings)
    count = max(1, round(latest * len(ratings)))
    first, second = times[-2 * count], times[-count]
    assert rows["part"].to_pylist() == [(time >= first) + (time >= second) for *_, time in ratings]


def test_features_are_those_of_the_movie(tmp_path: Path) -> None:
    ratings = _ratings()
    table = movielens_table(_write(tmp_path, ratings))
    genre_rows: dict[str, int] = {}
    for found, (_, movie, _, time) in zip(table.rows.to_pylist(), ratings, strict=True):
        title, genres = MOVIES[movie]
        year = None if movie == 9 else int(title.strip()[-5:-1])
        assert found["year"] == year
        if year is None:
            assert found["age"] is None
        else:
            assert found["age"] == pytest.approx(1970 + time / 86_400 / 365.2425 - year, abs=1e-6)
        for genre, row in zip(genres.split("|"), found["genres"], strict=True):
            assert genre_rows.setdefault(genre, row) == row
    assert sorted(genre_rows.values()) == list(range(1, len(genre_rows) + 1))
    assert table.genres == len(genre_rows) + 1


@pytest.mark.parametrize("validation", [False, True])
def test_users_and_movies_that_training_lacks_share_row_0(validation: bool, tmp_path: Path) -> None:
    ratings: list[Rating] = [(1, 7, 4, t) for t in range(6)] + [
        (2, 5, 4, 6),
        (2, 7, 4, 7),
        (3, 9, 4, 8),
        (1, 100, 4, 9),
    ]
    table = movielens_table(_write(tmp_path, ratings), latest=0.2, validation=validation)
    trained = 6 if validation else 8
    known_users = sorted({user for user, *_ in ratings[:trained]})
    known_movies = sorted({movie for _, movie, *_ in ratings[:trained]})
    kept = ratings[: 8 if validation else 10]

    def row(value: int, known: list[int]) -> int:
        return known.index(value) + 1 if value in known else 0

    assert table.rows["user"].to_pylist() == [row(user, known_users) for user, *_ in kept]
    assert table.rows["movie"].to_pylist() == [row(movie, known_movies) for _, movie, *_ in kept]
    assert (table.users, table.movies) == (len(known_users) + 1, len(known_movies) + 1)


@pytest.mark.parametrize(
    ("file", "text", "error", "message"),
    [
        ("ratings.csv", None, FileError, "expected a readable file. Pass the folder of a MovieLens edition"),
        ("movies.csv", None, FileError, "expected a readable file"),
        (
            "ratings.csv",
            "userId,movieId,stars,timestamp\n1,7,4,1\n",
            InputError,
            "expected the columns userId",
        ),
        ("ratings.csv", "userId,movieId,rating,timestamp\n1,7,four,1\n", InputError, "expected the columns"),
        ("ratings.csv", "userId,movieId,rating,timestamp\n", InputError, "got no rows; expected some"),
        ("ratings.csv", "userId,movieId,rating,timestamp\n1,7,,1\n", InputError, "an empty value in column 'rating'"),
        ("ratings.csv", "userId,movieId,rating,timestamp\n1,8,4,1\n", InputError, "movie 8, which movies.csv lacks"),
    ],
)
def test_files_that_do_not_fit_are_named(file: str, text: str | None, error: Any, message: str, tmp_path: Path) -> None:
    _write(tmp_path, _ratings())
    if text is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(text)
    with pytest.raises(error, match=message.replace("(", r"\(")) as caught:
        movielens_table(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_settings_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="per_user: got 0; expected at least 1"):
        movielens_table(tmp_path, per_user=0)
    with pytest.raises(ConfigError, match=r"latest: got 0\.5; expected 0 to 0\.4"):
        movielens_table(tmp_path, latest=0.5)
    with pytest.raises(InputError, match="got 2 ratings; expected enough"):
        movielens_table(_write(tmp_path, _ratings(2)), latest=0.3)
