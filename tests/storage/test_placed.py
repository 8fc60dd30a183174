"""`placed`: whether a batch's ids are read where they lie, or put one after another first."""

from __future__ import annotations

import pytest

from tilerec.storage.placed import _line_up


@pytest.mark.parametrize(
    ("segments", "starts", "bags", "total", "expected"),
    [
        ([(0, 2), (2, 5)], [0, 1], [1, 2], 5, True),
        ([], [], [], 0, True),
        ([(0, 2), (2, 5)], [0, 1], [1, 2], 6, False),  # an id behind
        ([(0, 2), (3, 5)], [0, 1], [1, 2], 5, False),  # an id between
        ([(1, 2), (2, 5)], [0, 1], [1, 2], 5, False),  # an id before
        ([(0, 2), (2, 5)], [0, 2], [1, 2], 5, False),  # a bag between
        ([(2, 5), (0, 2)], [1, 0], [2, 1], 5, False),  # in another order
    ],
)
def test_features_line_up_where_their_ids_and_bags_are_all_there_is(
    segments: list[tuple[int, int]], starts: list[int], bags: list[int], total: int, expected: bool
) -> None:
    assert _line_up(segments, starts, bags, total) is expected
