"""Ids of a batch part: features of several row groups, with and without lists and weights, in an array that grows."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from tilerec.data.chosen_rows import ChosenRows, RowHash
from tilerec.data.fields import BagIds
from tilerec.data.part_ids import PartIds, gather_ids, join_ids
from tilerec.data.pooled_memory import Blocks
from tilerec.data.rows import hash_rows

BAGS = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=9)


def _bag_ids(bags: list[list[int]], weighted: bool) -> BagIds:
    values = np.array([value for bag in bags for value in bag], np.int64)
    offsets = np.cumsum([0, *map(len, bags)])
    weights = values.astype(np.float32) + np.float32(0.5) if weighted else None
    if all(len(bag) == 1 for bag in bags):
        return BagIds(values, None, weights)
    return BagIds(values, offsets.astype(np.int32) if len(bags) % 2 else offsets, weights)


def _bags(part: PartIds, feature: int) -> list[list[int]]:
    found = part.feature(feature)
    assert found.offsets is not None
    return [bag.tolist() for bag in np.split(found.values, found.offsets[1:-1])]


@given(
    groups=st.lists(BAGS, min_size=1, max_size=3),
    data=st.data(),
    room=st.integers(0, 40),
    weighted=st.booleans(),
)
def test_parts_get_the_bags_of_their_rows(
    groups: list[list[list[int]]], data: st.DataObject, room: int, weighted: bool
) -> None:
    rows = [bag for group in groups for bag in group]
    chosen = [data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12)) for _ in range(2)]
    parts = [PartIds(3, len(one), room, weighted=weighted, blocks=Blocks()) for one in chosen]
    orders = ChosenRows([np.array(one, np.int64) for one in chosen])
    for with_weights in (weighted, False, weighted):
        gather_ids([_bag_ids(group, with_weights) for group in groups], parts, orders)
    for part, one in zip(parts, chosen, strict=True):
        expected = [rows[row] for row in one]
        assert part.counts == [sum(map(len, expected))] * 3
        for feature in range(3):
            assert [len(bag) for bag in expected] == part.lengths_Fb[feature].tolist()
            if one:
                assert _bags(part, feature) == expected
            weights = part.feature(feature).weights
            assert (weights is None) == (not weighted)
            if weights is not None:
                ids = part.feature(feature).values.tolist()
                assert weights.tolist() == [1.0 if feature == 1 else value + 0.5 for value in ids]
    whole = join_ids(parts)
    assert whole.counts == [sum(part.counts[feature] for part in parts) for feature in range(3)]
    together = [rows[row] for one in chosen for row in one]
    if together:
        assert all(_bags(whole, feature) == together for feature in range(3))


def test_row_groups_with_rows_and_with_ids_to_hash_give_rows() -> None:
    """A row group with missing ids has rows already; in the next one, ids are hashed as they are taken."""
    ids = np.array([-5, 2**62, 7], np.int64)
    later, ready = BagIds(ids, row_hash=RowHash(100, 1)), BagIds(np.array([0, 44], np.int64))
    hashed = hash_rows(ids, 100, first_row=1)
    order = np.array([2, 4, 0, 3, 1], np.int64)
    for found, rows in (([later], hashed), ([later, ready], [*hashed, 0, 44]), ([ready, later], [0, 44, *hashed])):
        chosen = ChosenRows([order[order < len(rows)], order[:1]])
        parts = [PartIds(1, count, 9, weighted=False, blocks=Blocks()) for count in chosen.counts]
        gather_ids(found, parts, chosen)
        for part, rows_b in zip(parts, chosen.by_part, strict=True):
            assert part.values.tolist() == np.asarray(rows)[rows_b].tolist()


def test_ids_to_hash_beside_lists_give_rows() -> None:
    ids = np.array([-5, 2**62], np.int64)
    later, lists = BagIds(ids, row_hash=RowHash(100, 1)), BagIds(np.array([3, 4], np.int64), np.array([0, 2, 2]))
    parts, chosen = [PartIds(1, 3, 9, weighted=False, blocks=Blocks())], ChosenRows([np.array([2, 1, 3])])
    gather_ids([later, lists], parts, chosen)
    assert parts[0].values.tolist() == [3, 4, hash_rows(ids, 100, first_row=1)[1]]
    assert parts[0].lengths_Fb.tolist() == [[2, 1, 0]]
