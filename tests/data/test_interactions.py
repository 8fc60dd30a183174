"""Interaction logs as samples: histories, splits, shares of ranks, positions, other logs with the same vocabulary."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from tilerec.data.batch import Batch
from tilerec.data.interaction_log import InteractionLog, LogColumns, ValueRows, read_log
from tilerec.data.interactions import KEYS, Interactions, LogSplit
from tilerec.data.row_groups import TableGroups
from tilerec.errors import ConfigError, InputError


def log(rows: list[tuple[Any, Any]], times: list[float] | None = None) -> InteractionLog:
    users, items = zip(*rows, strict=True) if rows else ([], [])
    table = pa.table({"user": list(users), "item": list(items), "time": times or [0] * len(rows)})
    return read_log(TableGroups(table, rows_per_group=3), LogColumns(time="time" if times else ""))


ROWS = [(7, "a"), (9, "x"), (7, "b"), (7, "c"), (9, "a"), (7, "d"), (5, "a"), (7, "e"), (9, "b")]


def samples(batch: Batch) -> list[tuple[int, ...]]:
    """Return (user, items, history, seen) of each sample, as rows."""
    bags = [[one.tolist() for one in batch.sparse_features[key].to_dense()] for key in KEYS]
    return [tuple(map(tuple, one)) for one in zip(*bags, strict=True)]  # type: ignore[misc]


def all_samples(batches: Any) -> list[tuple[int, ...]]:
    return [one for batch in batches for one in samples(batch)]


def test_every_interaction_is_a_sample_with_the_items_before_it() -> None:
    data = Interactions(log(ROWS), max_length=2)
    # Rows: users 5, 7, 9 are 1, 2, 3; items a, b, c, d, x are 1 to 5. The last item of 7 and of 9 is held out.
    assert sorted(all_samples(data.train(4))) == [
        ((1,), (1,), (), ()),
        ((2,), (1,), (), ()),
        ((2,), (2,), (1,), ()),
        ((2,), (3,), (1, 2), ()),
        ((2,), (4,), (2, 3), ()),
        ((3,), (1,), (5,), ()),
        ((3,), (5,), (), ()),
    ]
    # Item e occurs in the held-out part only: row 0. User 5 has one interaction, which stays in the training part.
    assert all_samples(data.held_out(10)) == [((2,), (0,), (3, 4), (1, 2, 3, 4)), ((3,), (2,), (5, 1), (5, 1))]
    assert [feature.num_rows for feature in data.sparse_features] == [4, 6, 6, 6]
    assert data.catalog("item").values.to_pylist() == ["a", "b", "c", "d", "x"]
    assert data.catalog("item").counts.tolist() == [3, 1, 1, 1, 1]


def test_every_user_is_a_sample_with_the_last_items() -> None:
    data = Interactions(log(ROWS), samples="users", max_length=2)
    assert sorted(all_samples(data.train(4))) == [((2,), (4,), (2, 3), ()), ((3,), (1,), (5,), ())]


def test_times_order_the_items_and_split_them() -> None:
    rows = [(1, 10), (1, 11), (1, 12), (2, 10), (2, 13), (3, 14)]
    data = Interactions(log(rows, [5.0, 3.0, 9.0, 1.0, 8.0, 9.5]), hold_out=LogSplit("time", fraction=0.5))
    assert sorted(all_samples(data.train(9))) == [
        ((1,), (1,), (2,), ()),  # item 10 follows item 11
        ((1,), (2,), (), ()),
        ((2,), (1,), (), ()),
    ]
    # User 3 has no training interactions, so no query; item 13 is not in the training part.
    assert all_samples(data.held_out(9)) == [((1,), (0,), (2, 1), (2, 1)), ((2,), (0,), (1,), (1,))]
    last = Interactions(log(rows, [5.0, 3.0, 9.0, 1.0, 8.0, 9.5]), hold_out=LogSplit(per_user=5))
    assert [len(one[1]) for one in all_samples(last.held_out(9))] == [1, 1]  # half of 3 and of 2
    none = Interactions(log(rows), hold_out=LogSplit("none"))
    assert (len(all_samples(none.train(9))), all_samples(none.held_out(9))) == (6, [])


def test_a_split_by_time_keeps_equal_times_together() -> None:
    held = LogSplit("time", fraction=0.5).held(np.zeros(6, np.int64), np.array([1, 1, 2, 2, 2, 2]))
    assert held.tolist() == [False, False, True, True, True, True]
    same = LogSplit("time", fraction=0.5).held(np.zeros(3, np.int64), np.array([4, 4, 4]))
    assert not same.any()


def test_a_random_split_holds_out_a_fraction_of_each_user() -> None:
    users = np.repeat([0, 1, 2], [8, 4, 3])
    held = LogSplit("random", fraction=0.25, seed=1).held(users, None)
    assert np.bincount(users[held], minlength=3).tolist() == [2, 1, 0]
    draws = {tuple(LogSplit("random", fraction=0.25, seed=seed).held(users, None)) for seed in range(20)}
    assert len(draws) > 10
    assert held.tolist() == LogSplit("random", fraction=0.25, seed=1).held(users, None).tolist()


def test_items_that_a_kept_vocabulary_lacks_are_no_samples() -> None:
    trained = Interactions(log(ROWS)).vocabularies()
    data = Interactions(log([(7, "a"), (7, "new"), (7, "b")]), hold_out=LogSplit("none"), vocabulary=trained)
    assert sorted(all_samples(data.train(9))) == [((2,), (1,), (), ()), ((2,), (2,), (1,), ())]


def _random_log(rows: int = 200) -> InteractionLog:
    draw = random.Random(0)
    return log([(draw.randrange(30), draw.randrange(20)) for _ in range(rows)], [draw.random() for _ in range(rows)])


@pytest.mark.parametrize("kind", ["interactions", "users"])
def test_ranks_and_positions_give_the_batches_of_one_process(kind: Any) -> None:
    data = Interactions(_random_log(), samples=kind, max_length=3, seed=4)
    whole = [samples(batch) for batch in data.train(16, epoch=2)]
    for start in (0, 16):
        shares = [list(data.train_shares(16, 2, rank=rank, world_size=3, start=start)) for rank in range(3)]
        joined = [[one for share in row for one in samples(share.batch)] for row in zip(*shares, strict=True)]
        assert joined == whole[start // 16 :]
        assert [share.end for share in shares[0]][-1] == sum(map(len, whole))
    assert [samples(batch) for batch in data.train(16, epoch=2)] == whole
    other = [samples(batch) for batch in data.train(16, epoch=3)]
    assert other != whole
    assert sorted(one for batch in other for one in batch) == sorted(one for batch in whole for one in batch)


def test_histories_are_those_of_a_loop() -> None:
    found = _random_log()
    data = Interactions(found, max_length=4, hold_out=LogSplit("none"))
    order = sorted(range(200), key=lambda i: (found.users[i].as_py(), found.times[i]))  # type: ignore[index]
    expected, history, user = [], [], None
    for i in order:
        if found.users[i].as_py() != user:
            user, history = found.users[i].as_py(), []
        item = found.items[i].as_py() + 1
        expected.append(((user + 1,), (item,), tuple(history[-4:]), ()))
        history.append(item)
    assert sorted(all_samples(data.train(33))) == sorted(expected)


def test_another_log_has_the_rows_of_the_vocabulary() -> None:
    trained = Interactions(log(ROWS))
    other = log([(9, "b"), (4, "a"), (4, "zzz"), (9, "x")])
    data = Interactions(other, hold_out=LogSplit("none"), vocabulary=trained.vocabularies(), labelled=False)
    ((batch, keys),) = data.rows(10, ["user"])
    # User 4 and item zzz are unknown: no id.
    assert keys["user"].to_pylist() == [4, 9]
    assert samples(batch) == [((), (), (1,), (1,)), ((3,), (), (2, 5), (2, 5))]
    labelled = Interactions(other, hold_out=LogSplit("none"), vocabulary=trained.vocabularies())
    (batch, keys), _ = labelled.rows(1)
    assert (samples(batch), keys.num_columns) == ([((), (1,), (), ())], 0)
    unknown = log([(9, "zzz"), (7, "b")])
    nothing = Interactions(unknown, hold_out=LogSplit("none"), vocabulary=trained.vocabularies(), labelled=False)
    ((batch, keys),) = nothing.rows(9, ["user"])
    assert (samples(batch), keys["user"].to_pylist()) == ([((2,), (), (2,), (2,)), ((3,), (), (), ())], [7, 9])
    some = Interactions(unknown, hold_out=LogSplit("none"), vocabulary=trained.vocabularies())
    assert [keys["user"].to_pylist() for _, keys in some.rows(9, ["user"])] == [[7]]


def test_a_vocabulary_of_another_type_is_refused() -> None:
    trained = Interactions(log(ROWS)).vocabularies()
    with pytest.raises(InputError, match=r"table: item: got integers; expected text, as in the training data"):
        Interactions(log([(7, 1)]), vocabulary=trained)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LogSplit("first"), "split: got 'first'"),  # type: ignore[arg-type]
        (lambda: LogSplit(per_user=0), "per_user: got 0"),
        (lambda: LogSplit(fraction=1.0), "fraction: got 1.0"),
        (lambda: Interactions(log(ROWS), max_length=0), "max_length: got 0"),
        (lambda: Interactions(log(ROWS), hold_out=LogSplit("time")), "got 'time' without data.time"),
        (lambda: Interactions(log([])), "no interactions to train on"),
        (lambda: Interactions(log(ROWS)).catalog("item", ["genre"]), r"features \['item', 'genre'\]"),
        (lambda: read_log(TableGroups({"user": [1], "itm": [2]}), LogColumns()), "did you mean 'itm'"),
    ],
)
def test_bad_settings_name_the_next_move(build: Any, message: str) -> None:
    with pytest.raises((ConfigError, InputError), match=message):
        build()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user": [1, None], "item": [1, 2]}, r"table, rows 0 to 1: column 'user': got 1 missing values"),
        ({"user": [1.5, 2.0], "item": [1, 2]}, r"column 'user': got double; expected integers or text"),
        ({"user": [1, 2], "item": [[1], [2]]}, r"column 'item': got list<.*>; expected integers or text"),
        ({"user": [1, 2], "item": [1, 2], "time": [1.0, float("nan")]}, r"column 'time': got a value that is not"),
        ({"user": [1, 2], "item": [1, 2], "time": ["a", "b"]}, r"column 'time': got string; expected numbers or times"),
        ({"user": [1, 2], "item": [1, 2], "stars": ["a", "b"]}, r"column 'stars': got string; expected numbers"),
    ],
)
def test_columns_that_are_no_log_are_refused_by_name(columns: dict[str, Any], message: str) -> None:
    roles = LogColumns(time="time" if "time" in columns else "", rating="stars" if "stars" in columns else "")
    with pytest.raises(InputError, match=message):
        read_log(TableGroups(columns), roles)


def test_types_of_a_column_read_alike() -> None:
    """Dictionaries, dates, unsigned integers and low ratings."""
    table = pa.table(
        {
            "user": pa.array(["b", "a", "b"]).dictionary_encode(),
            "item": pa.array([3, 4, 5], pa.uint16()),
            "time": pa.array([3, 2, 1], pa.timestamp("s")),
            "stars": [5, 5, 1],
        }
    )
    found = read_log(TableGroups(table), LogColumns(time="time", rating="stars", at_least=4))
    assert found.users.to_pylist() == [b"b", b"a"]
    assert found.items.to_pylist() == [3, 4]
    assert found.times is not None
    assert found.times.tolist() == [3, 2]
    assert found.rows == 3
    data = Interactions(read_log(TableGroups(table), LogColumns(time="time")), hold_out=LogSplit("none"))
    assert sorted(all_samples(data.train(3))) == [((1,), (2,), (), ()), ((2,), (1,), (3,), ()), ((2,), (3,), (), ())]
    assert data.row_count().rows == 3


def test_values_that_are_no_text_stay_bytes() -> None:
    values = ValueRows.of(pa.array([b"\xff", b"a"], pa.large_binary()), "item").values
    assert values.to_pylist() == [b"a", b"\xff"]
    data = Interactions(InteractionLog(pa.array([1, 1]), pa.array([b"\xff", b"a"], pa.large_binary()), None, 2, "log"))
    assert data.catalog("item").values.to_pylist() == [b"\xff"]
    assert torch.equal(data.histories()[1], torch.tensor([1]))


def test_an_item_that_is_held_out_twice_is_relevant_once() -> None:
    rows = [(1, "a"), (1, "b"), (1, "c"), (1, "d"), (1, "x"), (1, "a"), (1, "x"), (1, "a")]
    data = Interactions(log(rows), hold_out=LogSplit(per_user=4))
    # The held-out items are x, a, x, a; x is unknown.
    assert [one[1] for one in all_samples(data.held_out(4))] == [(0, 1)]


def test_one_column_may_have_several_roles() -> None:
    table = TableGroups(pa.table({"user": [1, 1, 2], "time": [3, 1, 2]}), rows_per_group=2)
    found = read_log(table, LogColumns(item="time", time="time", rating="time", at_least=2))
    assert found.items.to_pylist() == [3, 2]
    with pytest.raises(InputError, match=r"got no row with time of at least 9; expected some\. Lower data\.at_least"):
        read_log(table, LogColumns(item="time", rating="time", at_least=9))
