"""MovieLens: labels, rows, and which interactions are held out, against a slow reading of the same file."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from tilerec.data.batch import Batch
from tilerec.data.movielens import MovieLens
from tilerec.errors import ConfigError, InputError

HEADER = "userId,movieId,rating,timestamp"
Rating = tuple[int, int, float, int]


def _ratings(users: int, movies: int, count: int, seed: int = 0) -> list[Rating]:
    """Random ratings with many equal timestamps; some users have very few."""
    draw = random.Random(seed)
    return [
        (
            min(draw.randrange(1, users + 1), draw.randrange(1, users + 1)),
            draw.randrange(1, movies + 1) * 7,
            draw.randrange(1, 11) / 2,
            draw.randrange(1000, 1012),
        )
        for _ in range(count)
    ]


def _write(folder: Path, ratings: list[Rating]) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [HEADER, *(f"{user},{movie},{rating},{time}" for user, movie, rating, time in ratings)]
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    return folder


def _expected_held_out(ratings: list[Rating], per_user: int) -> set[int]:
    """Positions of the ratings held out, user by user."""
    of_user = defaultdict(list)
    for place, (user, _, _, time) in enumerate(ratings):
        of_user[user].append((time, place))
    held = set()
    for places in of_user.values():
        keep = min(per_user, len(places) // 2)
        held.update(place for _, place in sorted(places)[len(places) - keep :])
    return held


def _samples(batches: list[Batch]) -> list[tuple[int, int, float]]:
    out = []
    for batch in batches:
        features = batch.sparse_features
        assert list(features.keys()) == ["user", "movie"]
        assert torch.equal(features.lengths(), torch.ones_like(features.lengths()))
        user, movie = features.values().view(2, -1).tolist()
        assert batch.dense_features.shape == (len(user), 0)
        out += list(zip(user, movie, batch.labels.tolist(), strict=True))
    return out


@pytest.mark.parametrize("per_user", [1, 3, 50])
@pytest.mark.parametrize("block_bytes", [50, 1 << 20])
def test_the_last_interactions_of_each_user_are_held_out(tmp_path: Path, per_user: int, block_bytes: int) -> None:
    ratings = _ratings(users=12, movies=30, count=200)
    data = MovieLens(_write(tmp_path, ratings), held_out_per_user=per_user, block_bytes=block_bytes)
    held = _expected_held_out(ratings, per_user)
    users = {user: row + 1 for row, user in enumerate(sorted({rating[0] for rating in ratings}))}
    trained = {rating[1] for place, rating in enumerate(ratings) if place not in held}
    movies = {movie: row + 1 for row, movie in enumerate(sorted(trained))}

    def sample(rating: Rating) -> tuple[int, int, float]:
        user, movie, stars, _ = rating
        return users[user], movies.get(movie, 0), float(stars >= 4)

    wanted = [sample(rating) for place, rating in enumerate(ratings) if place in held]
    assert _samples(list(data.held_out(7))) == wanted
    wanted = [sample(rating) for place, rating in enumerate(ratings) if place not in held]
    assert sorted(_samples(list(data.train(16)))) == sorted(wanted)
    assert [feature.num_rows for feature in data.sparse_features] == [len(users) + 1, len(movies) + 1]
    assert data.row_count().rows == 200


def test_epochs_differ_in_order_and_repeat_themselves(tmp_path: Path) -> None:
    folder = _write(tmp_path, _ratings(5, 9, 100))
    first, again, second = (_samples(list(MovieLens(folder, seed=3).train(10, epoch))) for epoch in (0, 0, 1))
    assert first == again
    assert first != second
    assert sorted(first) == sorted(second)
    assert first != _samples(list(MovieLens(folder, seed=4).train(10, 0)))


def test_the_file_itself_may_be_named_and_the_threshold_is_a_choice(tmp_path: Path) -> None:
    path = _write(tmp_path, [(1, 1, 3.0, 5), (1, 2, 2.5, 6)]) / "ratings.csv"
    (train,) = MovieLens(path, like=3.0, held_out_per_user=1).train(10)
    assert train.labels.tolist() == [1.0]


def test_users_with_one_rating_are_trained_on_and_nothing_is_held_out(tmp_path: Path) -> None:
    data = MovieLens(_write(tmp_path, [(user, 5, 4.0, user) for user in range(1, 6)]))
    assert list(data.held_out(10)) == []
    assert sum(batch.batch_size for batch in data.train(2)) == 5


def test_a_bad_line_is_an_error_or_is_left_out_and_counted(tmp_path: Path) -> None:
    folder = _write(tmp_path, _ratings(3, 4, 30))
    path = folder / "ratings.csv"
    lines = path.read_text().splitlines()
    lines.insert(11, "3,4,five,1004")
    lines.insert(20, "3,4")
    path.write_text("\n".join(lines))
    with pytest.raises(
        InputError, match=r"ratings\.csv:12: column 'rating': got 'five'; expected a number in \[0, 5\]"
    ):
        MovieLens(folder)
    data = MovieLens(folder, on_bad_row="skip")
    total = sum(batch.batch_size for part in (data.train(8), data.held_out(8)) for batch in part)
    assert (total, data.row_count().skipped) == (30, 2)


def test_leaving_a_pass_early_ends_its_thread_and_changes_no_later_pass(tmp_path: Path) -> None:
    data = MovieLens(_write(tmp_path, _ratings(6, 9, 300)), shuffle_window=50, block_bytes=500)
    whole = _samples(list(data.train(10)))
    threads = threading.active_count()
    batches = data.train(10)
    next(batches)
    batches.close()
    assert threading.active_count() == threads
    assert _samples(list(data.train(10))) == whole


def test_a_folder_without_ratings_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"ratings\.csv: got .* on opening it; expected a readable file"):
        MovieLens(tmp_path)
    with pytest.raises(InputError, match="got no ratings; expected"):
        MovieLens(_write(tmp_path, []))


def test_nothing_held_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="held_out_per_user: got 0; expected at least 1"):
        MovieLens(_write(tmp_path, _ratings(2, 2, 9)), held_out_per_user=0)


def test_huge_ids_and_times_are_read_exactly(tmp_path: Path) -> None:
    big = 2**62
    ratings = [(big, big + 1, 5.0, big), (big, big + 2, 1.0, big + 1), (big, big + 3, 5.0, big + 2)]
    data = MovieLens(_write(tmp_path, ratings), held_out_per_user=1)
    (held,) = data.held_out(5)
    assert held.sparse_features.values().tolist() == [1, 0]
    assert np.prod([feature.num_rows for feature in data.sparse_features]) == 2 * 3
