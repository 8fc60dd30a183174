"""Ids of a batch part: features of several row groups, with and without lists and weights, in an array that grows."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from tilerec.data.chosen_rows import ChosenRows
from tilerec.data.fields import BagIds
from tilerec.data.part_ids import PartIds, gather_ids, join_ids
from tilerec.data.pooled_memory import Blocks

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
