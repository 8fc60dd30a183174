"""Rows in buckets: what fits, what is said of what does not, and which row is whose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilerec.errors import ConfigError
from tilerec.modules.buckets import Buckets, bucket_cuts, divisor_near
from tilerec.ops.hash.definition import zch_buckets


@pytest.mark.parametrize(
    ("rows", "count", "wanted"),
    [
        (
            1000,
            768,
            "got 1000 rows in 768 buckets; expected a multiple of the bucket count. "
            "Use 768 or 1536 rows, or 500 or 1000 buckets",
        ),
        (100, 768, "Use 768 rows, or 100 buckets"),
        (1009, 8, "Use 1008 or 1016 rows, or 1 buckets"),
    ],
)
def test_rows_that_do_not_fill_the_buckets_name_both_numbers_and_the_nearest_that_fit(
    rows: int, count: int, wanted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Buckets.of("Table 't'", rows, count)
    assert wanted in str(caught.value)


def test_sizes_are_whole_numbers_from_one_up() -> None:
    for rows, count in ((0, 1), (-8, 4), (8, 0), (8, True), (8.0, 4)):
        with pytest.raises(ConfigError, match="expected an integer of at least 1"):
            Buckets.of("t", rows, count)  # type: ignore[arg-type]


def test_a_bucket_of_one_row_has_none_to_share() -> None:
    with pytest.raises(ConfigError, match="Use at least 16 rows, fewer buckets, or disable_fallback"):
        Buckets.of("t", 8, 8, shares=True)
    assert Buckets.of("t", 8, 8).slots == 1


@given(
    size=st.integers(2, 9),
    count=st.integers(1, 5),
    percent=st.integers(0, 60),
    ids=st.lists(st.integers(-(2**63), 2**63 - 1)),
)
def test_own_and_shared_rows_are_all_rows_and_stay_in_their_buckets(
    size: int, count: int, percent: int, ids: list[int]
) -> None:
    if size - max(1, int(size * percent / 100)) < 1:
        return
    buckets = Buckets.of("t", size * count, count, shares=True, percent_shared=percent)
    places = torch.arange(-1, buckets.slots * count)
    own = buckets.rows_of(places)
    assert own[0] == -1
    shared = set(range(size * count)) - set(own.tolist())
    assert own[1:].unique().numel() == buckets.slots * count
    assert torch.equal(own[1:] // size, places[1:] // buckets.slots)
    ids_N = torch.tensor(ids, dtype=torch.int64)
    rows_N = buckets.shared_rows(ids_N)
    assert set(rows_N.tolist()) <= shared
    assert torch.equal(rows_N // size, zch_buckets(ids_N, count))


def test_ranks_hold_whole_buckets_as_even_as_they_come() -> None:
    assert bucket_cuts(8, 3) == (0, 2, 5, 8)
    assert bucket_cuts(5, 5) == (0, 1, 2, 3, 4, 5)
    assert bucket_cuts(768, 1) == (0, 768)


def test_the_largest_count_of_buckets_that_leaves_rows_enough() -> None:
    assert divisor_near(768 * 64, 768, 64) == 768
    assert divisor_near(1000, 768, 64) == 10
    assert divisor_near(1009, 768, 64) == 1
    assert divisor_near(3, 768, 64) == 1
