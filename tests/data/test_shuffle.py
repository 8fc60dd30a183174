"""Batches out of chunks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerec.data.shuffle import batched
from tilerec.errors import ConfigError


def _chunks(sizes: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
    start, chunks = 0, []
    for size in sizes:
        rows = np.arange(start, start + size)
        chunks.append((rows, rows * 10))
        start += size
    return chunks


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(1, 7), st.integers(0, 20), st.booleans())
def test_every_row_comes_once_and_all_batches_but_the_last_are_full(
    sizes: list[int], batch_size: int, window: int, shuffle: bool
) -> None:
    generator = np.random.default_rng(1) if shuffle else None
    batches = list(batched(_chunks(sizes), batch_size, window=window, generator=generator))
    rows = [row for batch in batches for row in batch[0].tolist()]
    assert sorted(rows) == list(range(sum(sizes)))
    if not shuffle:
        assert rows == sorted(rows)
    assert all(len(batch[0]) == batch_size for batch in batches[:-1])
    assert not batches or 1 <= len(batches[-1][0]) <= batch_size
    for first, second in batches:
        assert np.array_equal(first * 10, second)  # the columns stay together


def test_a_window_over_everything_shuffles_everything_and_the_seed_decides_how() -> None:
    def order(seed: int, window: int) -> list[int]:
        batches = batched(_chunks([50] * 4), 10, window=window, generator=np.random.default_rng(seed))
        return [row for batch in batches for row in batch[0].tolist()]

    assert order(1, 200) == order(1, 200)
    assert order(1, 200) != order(2, 200)
    assert max(abs(row - place) for place, row in enumerate(order(1, 200))) > 100
    assert max(abs(row - place) for place, row in enumerate(order(1, 50))) < 50


def test_a_batch_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size: got 0"):
        list(batched(_chunks([3]), 0))
