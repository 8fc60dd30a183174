"""Bags of one session are stored once, and inverse indices give every sample its own bag back."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import torch
from hypothesis import given

from tilerec.data.columns import Columns, IdColumn, LabelColumn, TableRows
from tilerec.data.row_groups import TableGroups
from tilerec.data.table_dataset import TableDataset
from tilerec.modules.inverse_indices import check_samples, sample_bags
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

COLUMNS = Columns(
    labels=(LabelColumn("n"),),
    ids=(IdColumn("item"), IdColumn("past", kind="list", weights="w")),
    tables=(TableRows("item", 1000, "rows"), TableRows("past", 10, "rows")),
)


def _data(sessions: list[int], past: list[list[int]], shuffle_rows: int = 4) -> TableDataset:
    table = pa.table(
        {
            "n": [float(n) for n in range(len(sessions))],
            "session": sessions,
            "item": [session % 3 for session in sessions],
            "past": pa.array(past, pa.list_(pa.int64())),
            "w": pa.array([[float(i) for i in one] for one in past], pa.list_(pa.float32())),
        }
    )
    return TableDataset(
        TableGroups(table, rows_per_group=7), COLUMNS, group_by_session="session", shuffle_rows=shuffle_rows
    )


def _bags(features: KeyedJaggedTensor, key: str) -> list[list[int]]:
    """The ids of each sample."""
    check_samples("test", ["item", "past"], features)
    one = features[key]
    bags = [part.tolist() for part in one.values().split(one.lengths().tolist())]
    return [bags[index] for index in sample_bags(features)[key].tolist()]


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 2), max_size=3)), min_size=1, max_size=25),
    batch=st.integers(1, 9),
)
def test_every_sample_keeps_its_own_ids(rows: list[tuple[int, list[int]]], batch: int) -> None:
    sessions, past = [row[0] for row in rows], [row[1] for row in rows]
    data = _data(sessions, past)
    seen = []
    for share in data.train_shares(batch):
        features, numbers = share.batch.sparse_features, share.batch.labels.long().tolist()
        assert features.values().shape == features.weights().shape
        assert features.weights()[features.length_per_key()[0] :].tolist() == features["past"].values().tolist()
        for number, item, ids in zip(numbers, _bags(features, "item"), _bags(features, "past"), strict=True):
            assert item == [sessions[number] % 3]
            assert ids == past[number]
        seen += numbers
    assert sorted(seen) == list(range(len(rows)))


def test_equal_bags_of_a_session_are_stored_once() -> None:
    data = _data([5] * 6, [[1, 2], [1, 2], [1, 2], [1, 3], [1, 3], []])
    (share,) = data.train_shares(6)
    features = share.batch.sparse_features
    assert features.stride_per_key() == [1, 3]
    assert features["past"].values().tolist() == [1, 2, 1, 3]
    keys, index = features.inverse_indices()
    assert keys == ["item", "past"]
    assert torch.equal(index, torch.tensor([[0] * 6, [0, 0, 0, 1, 1, 2]], dtype=index.dtype))
    savings = data.session_savings()
    assert (savings.samples, savings.ids, savings.stored_ids) == (6, 16, 5)
    assert (savings.bags, savings.stored_bags) == (12, 4)
    assert savings.lookups_saved == 11 / 16
    assert savings.bytes_saved == 8 * 11 + 4 * 8 - 4 * 12


def test_bags_of_different_sessions_are_not_shared() -> None:
    data = _data([1, 2], [[1], [1]])
    (share,) = data.train_shares(2)
    assert share.batch.sparse_features.stride_per_key() == [2, 2]


def test_samples_of_a_session_stay_together_and_in_order() -> None:
    sessions = np.repeat(np.arange(12), 3).tolist()
    data = _data(sessions, [[0]] * 36, shuffle_rows=36)
    numbers = [n for share in data.train_shares(5) for n in share.batch.labels.long().tolist()]
    order = [sessions[n] for n in numbers]
    starts = sum(one != other for one, other in itertools.pairwise(order))
    # Row groups of 7 rows cut some sessions in two; the parts may lie apart.
    assert starts <= 12 + 5
    assert numbers != list(range(36))


def test_the_held_out_part_has_one_bag_per_sample() -> None:
    data = _data([1, 1], [[1], [1]])
    (batch, _) = next(data.rows(2))
    assert batch.sparse_features.inverse_indices_or_none() is None
