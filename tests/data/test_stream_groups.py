"""Iterable data sets: one order for any number of ranks and workers, exact continuation, streams that do not repeat."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import hypothesis.strategies as st
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from tilerec.data.batch import Batch
from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.hold_out import HoldOut
from tilerec.data.map_groups import MapGroups
from tilerec.data.stream_groups import StreamGroups
from tilerec.data.table_dataset import TableDataset
from tilerec.errors import ConfigError, InputError

COLUMNS = Columns(
    labels=(LabelColumn("y"),),
    dense=(DenseColumn("x"),),
    ids=(IdColumn("user"), IdColumn("items", kind="list")),
    tables=(TableRows("user", 10_000, "rows"), TableRows("items", 100, "rows")),
)


def _sample(n: int) -> dict[str, Any]:
    return {"y": n % 2, "x": n / 8, "user": n, "items": torch.full((n % 3,), n % 5), "unread": object}


class Clicks(IterableDataset[Any]):
    """Samples 0, 1, ..., divided among the workers of a `DataLoader`."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for n in range(first, self.rows, step):
            yield {**_sample(n), "unread": 0}


def _stream(rows: int, group: int = 4) -> StreamGroups:
    return StreamGroups(Clicks(rows), rows_per_group=group)


def _users(batches: Iterable[Batch]) -> list[int]:
    return [user for batch in batches for user in batch.sparse_features["user"].values().tolist()]


def test_a_stream_gives_the_values_of_its_samples_shuffled_within_windows() -> None:
    data = TableDataset(_stream(30), COLUMNS, shuffle_rows=8)
    batches = list(data.train(7))
    assert [batch.batch_size for batch in batches] == [7, 7, 7, 7, 2]
    users = _users(batches)
    for start in range(0, 30, 8):
        window = range(start, min(start + 8, 30))
        assert sorted(users[start : start + 8]) == list(window)
    assert users != sorted(users)
    for batch in batches:
        own = batch.sparse_features["user"].values()
        assert torch.equal(batch.labels, (own % 2).float())
        assert torch.equal(batch.dense_features[:, 0], own / 8)
        items = batch.sparse_features["items"]
        assert torch.equal(items.lengths(), (own % 3).to(items.lengths().dtype))
        assert torch.equal(items.values(), (own % 5).repeat_interleave(own % 3))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def users(seed: int, epoch: int) -> tuple[int, ...]:
        return tuple(_users(TableDataset(_stream(40), COLUMNS, seed=seed, shuffle_rows=16).train(8, epoch)))

    assert users(0, 0) == users(0, 0)
    assert len({users(0, 0), users(0, 1), users(1, 0)}) == 3


@given(
    rows=st.integers(1, 60),
    group=st.integers(1, 12),
    every=st.sampled_from([0, 0, 2, 5]),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch=st.integers(1, 20),
    shuffle=st.integers(1, 40),
    stop=st.integers(0, 6),
    by_column=st.booleans(),
)
def test_a_pass_continues_on_another_number_of_ranks(
    rows: int, group: int, every: int, worlds: tuple[int, int], batch: int, shuffle: int, stop: int, by_column: bool
) -> None:
    rule = HoldOut(column="user", at_least=str(rows // 2 + 1)) if by_column else HoldOut(every=every)
    data = TableDataset(_stream(rows, group), COLUMNS, shuffle_rows=shuffle, hold_out=rule)

    def global_batches(world: int, start: int = 0) -> list[list[int]]:
        ranks = [list(data.train_shares(batch, 2, rank=rank, world_size=world, start=start)) for rank in range(world)]
        out = []
        for shares in zip(*ranks, strict=True):
            assert len({(share.total, share.end) for share in shares}) == 1
            assert [share.first for share in shares] == sorted(share.first for share in shares)
            out.append([user for share in shares for user in _users([share.batch])])
            assert len(out[-1]) == shares[0].total
        return out

    whole = global_batches(1)
    held = _users(data.held_out(9))
    assert Counter(user for one in whole for user in one) + Counter(held) == Counter(range(rows))
    assert held == sorted(held)
    assert global_batches(worlds[0]) == whole
    start = sum(map(len, whole[:stop]))
    assert global_batches(worlds[1], start) == whole[stop:]
    assert all(len(one) == batch for one in whole[:-1])


def test_samples_before_the_position_are_skipped_and_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    converted: list[str] = []
    real = StreamGroups.begin

    def begin(self: StreamGroups, columns: Iterable[str], **options: Any) -> Any:
        groups = real(self, columns, **options)
        table = groups._table

        def counted(held: Any) -> pa.Table:
            converted.append(groups.name)
            return table(held)

        groups._table = counted  # type: ignore[method-assign]
        return groups

    data = TableDataset(_stream(60, 10), COLUMNS, shuffle_rows=10)
    monkeypatch.setattr(StreamGroups, "begin", begin)
    assert len(_users(share.batch for share in data.train_shares(5, start=35))) == 25
    assert len(converted) == 3  # samples 30 to 59: the window that holds the position, and those after it


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with fewer cores
@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_gives_the_same_batches(workers: int) -> None:
    alone = TableDataset(_stream(50), COLUMNS, shuffle_rows=16)
    loader: DataLoader[Any] = DataLoader(Clicks(50), batch_size=None, num_workers=workers)
    several = TableDataset(StreamGroups(loader, rows_per_group=4), COLUMNS, shuffle_rows=16)
    assert _users(several.train(8)) == _users(alone.train(8))
    rest = [share.batch for share in several.train_shares(8, rank=1, world_size=2, start=16)]
    assert _users(rest) == _users(share.batch for share in alone.train_shares(8, rank=1, world_size=2, start=16))


def _lists(rows: int) -> Iterator[Any]:
    for start in range(0, rows, 7):
        yield [{**_sample(n), "unread": 0} for n in range(start, min(start + 7, rows))]


def _tables(rows: int, kind: Callable[..., Any]) -> Iterator[Any]:
    for samples in _lists(rows):
        yield kind.from_pylist([{**sample, "items": sample["items"].tolist()} for sample in samples])  # type: ignore[attr-defined]


class Repeated:
    """An iterable that is no subclass of torch's; each pass is a new call."""

    def __init__(self, begin: Callable[..., Iterator[Any]], *arguments: Any) -> None:
        self._begin, self._arguments = begin, arguments

    def __iter__(self) -> Iterator[Any]:
        return self._begin(*self._arguments)


@pytest.mark.parametrize(
    "stream",
    [
        Repeated(_lists, 40),
        Repeated(_tables, 40, pa.Table),
        Repeated(_tables, 40, pa.RecordBatch),
        DataLoader(Clicks(40), batch_size=6, collate_fn=list),
    ],
)
def test_items_may_hold_several_samples(stream: Any) -> None:
    found = TableDataset(StreamGroups(stream, rows_per_group=4), COLUMNS, shuffle_rows=16)
    expected = TableDataset(_stream(40), COLUMNS, shuffle_rows=16)
    assert _users(found.train(8)) == _users(expected.train(8))
    assert _users(share.batch for share in found.train_shares(8, start=24)) == _users(expected.train(8))[24:]


def test_all_rows_come_in_order_with_their_keys_and_are_counted() -> None:
    data = TableDataset(Clicks(25), COLUMNS)
    assert data.row_count().rows == 0
    rows = list(data.rows(10, ["user", "unread"]))
    assert _users(batch for batch, _ in rows) == list(range(25))
    assert pa.concat_tables([keys for _, keys in rows]) == pa.table({"user": range(25), "unread": [0] * 25})
    assert data.row_count().rows == 25


def test_other_data_may_be_held_out() -> None:
    data = TableDataset(Clicks(20), COLUMNS, held_out_data=Clicks(5))
    assert _users(data.held_out(3)) == list(range(5))
    assert sorted(_users(data.train(6))) == list(range(20))
    assert data.row_count().rows == 25


def test_a_stream_has_a_catalog_of_items() -> None:
    columns = Columns(
        labels=(LabelColumn("y"),),
        ids=(IdColumn("item"), IdColumn("shop")),
        tables=(TableRows("item", 10, "rows"), TableRows("shop", 10, "rows")),
    )
    samples = [{"y": n % 2, "item": n % 4, "shop": 5 + n % 4} for n in range(20)]
    for others in ((), ("shop",)):
        found = TableDataset(Repeated(iter, samples), columns).catalog("item", others)
        expected = TableDataset(samples, columns).catalog("item", others)
        assert found.counts.tolist() == expected.counts.tolist() == [0, 5, 0, 5]
        assert found.values == expected.values
        assert found.features.to_dict().keys() == expected.features.to_dict().keys()
        assert torch.equal(found.features.values(), expected.features.values())


class Shuffled(IterableDataset[Any]):
    """Samples in an order by the epoch, or without one if it has no seed."""

    def __init__(self, seeded: bool) -> None:
        self.seeded, self.epoch = seeded, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(100))
        (random.Random(self.epoch) if self.seeded else random).shuffle(order)
        yield from map(_sample, order)


class SharedState(IterableDataset[Any]):
    """A data set whose passes share their position."""

    def __iter__(self) -> Iterator[Any]:
        self.next = 0
        while self.next < 50:
            self.next += 1
            yield _sample(self.next)


class Undivided(IterableDataset[Any]):
    """A data set that returns every sample to every worker."""

    def __iter__(self) -> Iterator[Any]:
        return map(_sample, range(50))


def test_the_epoch_is_passed_to_the_data_set() -> None:
    data = TableDataset(
        Shuffled(seeded=True), COLUMNS, shuffle_rows=1, hold_out=HoldOut(column="user", at_least="90"), seed=3
    )
    first, second = (_users(data.train(16, epoch)) for epoch in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(90))
    assert _users(data.train(16, 0)) == first
    assert _users(share.batch for share in data.train_shares(16, 1, start=32)) == second[32:]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (map(_sample, range(100)), "map: got other samples in a second pass"),
        (Shuffled(seeded=False), "Shuffled: got other samples in a second pass .* seed its shuffle"),
        (SharedState(), "SharedState: got other samples in a second pass .* Or write the samples to files"),
        (
            DataLoader(Clicks(9), batch_size=None, num_workers=1, persistent_workers=True),
            r"DataLoader of Clicks: got other samples in a second pass .* persistent_workers=False",
        ),
        (DataLoader(Undivided(), batch_size=None, num_workers=2), r"got each sample 2 times, .*\.get_worker_info"),
        (Repeated(iter, ()), "Repeated: got no samples; expected some"),
        ([], "list: got no samples; expected some"),
        ("clicks.parquet", r"TableDataset: got the path 'clicks\.parquet'; expected data\. Pass ParquetGroups"),
        (7, r"table: got a int .* or a data set of torch\.utils\.data"),
        (Repeated(iter, (1, 2)), "Repeated, samples 0 to 1: got int as sample 0; expected a dict"),
    ],
)
def test_streams_that_do_not_repeat_are_refused_when_they_are_opened(stream: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        TableDataset(stream, COLUMNS)


@pytest.mark.parametrize(
    ("stream", "options", "message"),
    [
        (DataLoader(Clicks(9), batch_size=3), {}, r"got batch_size=3 with the default collate_fn.*collate_fn=list"),
        (Clicks(9), {"lanes": 2}, "lanes: got 2 for Clicks, which is read in its order; expected 1"),
        (
            Shuffled(seeded=True),
            {"hold_out": HoldOut(every=10)},
            r"hold_out\.every: got 10 for Shuffled, whose set_epoch .* Set hold_out\.column, or pass held_out_data",
        ),
    ],
)
def test_settings_that_a_stream_lacks_name_the_way_out(stream: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TableDataset(stream, COLUMNS, **options)


def test_a_stream_has_no_length() -> None:
    data = TableDataset(Clicks(9), COLUMNS)
    for name in ("train_rows", "held_out_rows"):
        with pytest.raises(ConfigError, match=f"TableDataset.{name}: got Clicks, a stream of unknown length"):
            getattr(data, name)
    with pytest.raises(ConfigError, match="rows_per_group: got 0"):
        StreamGroups(Clicks(9), rows_per_group=0)


def test_a_stream_without_training_rows_is_refused() -> None:
    data = TableDataset(Clicks(9), COLUMNS, hold_out=HoldOut(column="user", at_least="0"))
    with pytest.raises(InputError, match=r"Clicks: got no samples to train on; expected some\. Hold out less"):
        list(data.train(4))
    assert len(_users(data.held_out(4))) == 9


def test_ids_may_be_unsigned_numbers_of_64_bits() -> None:
    columns = Columns(
        ids=(IdColumn("user"), IdColumn("items", kind="list")), tables=(TableRows("user", 99), TableRows("items", 99))
    )
    samples = [{"user": 2**63 + n, "items": [2**64 - 1 - n]} for n in range(9)]
    table = {
        "user": pa.array([sample["user"] for sample in samples], pa.uint64()),
        "items": pa.array([sample["items"] for sample in samples], pa.list_(pa.uint64())),
    }
    found, expected = (next(TableDataset(data, columns).rows(9))[0] for data in (samples, table))
    assert torch.equal(found.sparse_features.values(), expected.sparse_features.values())


def test_passes_of_other_lengths_are_refused() -> None:
    clicks = Clicks(90)
    data = TableDataset(clicks, COLUMNS)
    assert len(_users(data.train(32))) == 90
    clicks.rows = 80
    with pytest.raises(InputError, match="Clicks: got 80 samples in this pass and 90 in an earlier one"):
        _users(data.train(32))
    for rows, start in ((80, 96), (100, 128), (20, 64)):
        with pytest.raises(InputError, match=r"Clicks: got .* expected more than .*, where the pass continues"):
            list(TableDataset(StreamGroups(Clicks(rows), rows_per_group=32), COLUMNS).train_shares(32, start=start))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"user": "text"}, r"samples 70 to 79: column 'user': got values of several types"),
        ({"x": None}, r"samples 70 to 79: dense column 'x': got 1 missing values, the first in row 5"),
        ({"user": 7.5}, r"samples 70 to 79: id column 'user': got numbers with fractions; expected integers or text"),
        ({"user": 10_000}, r"samples 70 to 79: id column 'user': got id 10000 in row 5; expected row numbers"),
    ],
)
@pytest.mark.parametrize("kind", [Repeated, list])
def test_bad_samples_are_named(bad: dict[str, Any], message: str, kind: Any) -> None:
    samples = [{**_sample(n), "unread": 0, **(bad if n == 75 else {})} for n in range(90)]
    source = (
        MapGroups(samples, rows_per_group=10)
        if kind is list
        else StreamGroups(Repeated(iter, samples), rows_per_group=10)
    )
    with pytest.raises(InputError, match=message):
        list(TableDataset(source, COLUMNS).train(90))


def test_samples_without_a_column_are_named() -> None:
    samples = [{key: value for key, value in _sample(n).items() if n != 75 or key != "x"} for n in range(90)]
    for data in (Repeated(iter, samples), samples):
        with pytest.raises(InputError, match=r"samples 0 to 89: column 'x': got sample 75 without it"):
            list(TableDataset(data, COLUMNS).train(90))
    tables = [pa.table({"y": [0], "x": [0.5], "user": [1], "items": [[1]]})] * 70 + [pa.table({"y": [0]})]
    with pytest.raises(InputError, match=r"samples 0 to 70: column 'x': got a table without it"):
        list(TableDataset(Repeated(iter, tables), COLUMNS).train(90))


def test_columns_that_are_empty_at_the_start_have_the_types_of_later_samples() -> None:
    columns = Columns(
        labels=(LabelColumn("y"),),
        ids=(IdColumn("user", missing="row"), IdColumn("items", kind="list", missing="empty")),
        tables=(TableRows("user", 10_000), TableRows("items", 100)),
    )
    samples = [{"y": 1, "user": None, "items": []} for _ in range(80)] + [{"y": 1, "user": "a", "items": ["b"]}] * 2
    for data in (Repeated(iter, samples), samples):
        source = StreamGroups(data, rows_per_group=8) if data is not samples else MapGroups(data, rows_per_group=8)
        ((batch, _),) = TableDataset(source, columns).rows(82)
        features = batch.sparse_features
        assert features["items"].lengths().tolist() == [0] * 80 + [1, 1]
        assert features["user"].values()[:80].tolist() == [0] * 80
        assert len(set(features["user"].values()[79:].tolist())) == 2


class MapClicks(Dataset[Any]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**_sample(index), "unread": 0}


@pytest.mark.parametrize("samples", [MapClicks(), [_sample(n) for n in range(20)]])
def test_a_map_style_data_set_is_accepted_as_it_is(samples: Any) -> None:
    data = TableDataset(samples, COLUMNS, lanes=2, hold_out=HoldOut(every=5))
    assert sorted(_users(data.train(6)) + _users(data.held_out(6))) == list(range(20))
    assert (data.train_rows, data.held_out_rows) == (16, 4)


def test_samples_of_a_session_stay_together() -> None:
    samples = [{**_sample(n), "session": n // 4} for n in range(40)]
    data = TableDataset(Repeated(iter, samples), COLUMNS, group_by_session="session")
    users = [share.batch.sparse_features.to_dict() for share in data.train_shares(40)]
    assert len(users) == 1
    assert data.session_savings().samples == 40


def test_an_iterator_that_is_left_early_ends_the_pass() -> None:
    closed: list[str] = []

    def endless() -> Iterator[Any]:
        try:
            n = 0
            while True:
                yield _sample(n % 1000)
                n += 1
        finally:
            closed.append("pass")

    data = TableDataset(StreamGroups(Repeated(endless), rows_per_group=64), COLUMNS, shuffle_rows=64)
    closed.clear()
    shares = data.train_shares(16)
    assert next(shares).total == 16
    shares.close()  # type: ignore[attr-defined]
    assert closed == ["pass"]


def test_a_rank_without_rows_holds_no_windows() -> None:
    held: list[int] = []
    source = _stream(400, 4)
    real = source.begin

    def begin(columns: Iterable[str], **options: Any) -> Any:
        groups = real(columns, **options)
        fetch = groups.fetch

        def counted() -> bool:
            held.append(len(groups._tables))
            return fetch()

        groups.fetch = counted  # type: ignore[method-assign]
        return groups

    source.begin = begin  # type: ignore[method-assign]
    data = TableDataset(source, COLUMNS, shuffle_rows=8)
    for rank in (0, 1):  # a batch of one sample is that of the last rank
        shares = list(data.train_shares(1, rank=rank, world_size=2))
        assert sum(share.batch.batch_size for share in shares) == 400 * rank
    assert max(held) <= 5


def test_ranks_compare_the_first_samples() -> None:
    prints = [TableDataset(Repeated(iter, [_sample(n)]), COLUMNS).fingerprint for n in (1, 1, 2)]
    assert prints[0] == prints[1] != prints[2]
    table = {"y": [1], "x": [0.5], "user": [1], "items": [[1]]}
    assert TableDataset(table, COLUMNS).fingerprint == ""  # tables and files are not compared
    samples = [_sample(1), _sample(2)]
    assert TableDataset(samples, COLUMNS).fingerprint != TableDataset(samples[:1], COLUMNS).fingerprint
