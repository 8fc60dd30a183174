"""The order of a pass: every row once, on any number of ranks, from any position."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tilerec.data.order import PassOrder, RankPart, check_lanes
from tilerec.errors import ConfigError

GROUPS = st.lists(st.integers(0, 20), min_size=1, max_size=12)


def _rows(order: PassOrder, part: RankPart) -> list[tuple[int, int]]:
    """(lane, position) of each row."""
    return [(lane.lane, row) for lane in part.lanes for row in range(lane.start, lane.end)]


@given(groups=GROUPS, lanes=st.integers(1, 5), world=st.integers(1, 5), batch=st.integers(1, 30))
def test_ranks_divide_the_global_batches_that_one_rank_reads(
    groups: list[int], lanes: int, world: int, batch: int
) -> None:
    world = world if lanes == 1 else min(world, lanes)
    order = PassOrder(groups, seed=3, epoch=1, shuffle_rows=8, lanes=lanes)
    seen = []
    for start in range(0, order.rows, batch):
        whole = order.rank_part(start, batch, 0, 1)
        shares = [order.rank_part(start, batch, rank, world) for rank in range(world)]
        assert [row for share in shares for row in _rows(order, share)] == _rows(order, whole)
        assert all(share.total == min(batch, order.rows - start) for share in shares)
        assert all(share.end == start + share.total for share in shares)
        first = start
        for share in shares:
            assert share.first == first
            first += len(_rows(order, share))
        seen += _rows(order, whole)
    assert len(set(seen)) == len(seen) == sum(groups)


@given(groups=GROUPS, lanes=st.integers(1, 6))
def test_lanes_give_rows_in_proportion_to_their_lengths(groups: list[int], lanes: int) -> None:
    order = PassOrder(groups, seed=0, epoch=0, shuffle_rows=1, lanes=lanes)
    ends = order.lane_positions(order.rows)
    before = [0] * lanes
    for position in range(order.rows + 1):
        counts = order.lane_positions(position)
        assert sum(counts) == position
        assert all(low <= high for low, high in zip(before, counts, strict=True))
        assert all(
            abs(count - rows * position / max(order.rows, 1)) <= lanes for count, rows in zip(counts, ends, strict=True)
        )
        before = counts


@given(groups=GROUPS, shuffle=st.integers(1, 40))
def test_windows_hold_whole_groups_up_to_the_wanted_rows(groups: list[int], shuffle: int) -> None:
    order = PassOrder(groups, seed=0, epoch=0, shuffle_rows=shuffle)
    position, used = 0, []
    while position < order.rows:
        window = order.window_at(0, position)
        assert window.start <= position < window.end
        assert window.rows == sum(groups[group] for group in window.groups)
        assert window.rows >= shuffle or window.end == order.rows
        assert window.rows - groups[window.groups[-1]] < shuffle
        used += window.groups
        position = window.end
    assert sorted(used) == [group for group, rows in enumerate(groups) if rows]


def test_the_order_depends_on_the_seed_and_the_epoch() -> None:
    def groups(seed: int, epoch: int) -> tuple[int, ...]:
        order = PassOrder([1] * 50, seed=seed, epoch=epoch, shuffle_rows=50)
        return order.window_at(0, 0).groups

    assert groups(0, 0) == groups(0, 0)
    assert len({groups(0, 0), groups(1, 0), groups(0, 1)}) == 3


def test_a_rank_without_a_lane_is_refused() -> None:
    check_lanes(1, 64)
    check_lanes(8, 8)
    with pytest.raises(ConfigError, match=r"lanes: got 2 on 4 ranks; expected 1, or at least one lane per rank"):
        check_lanes(2, 4)
