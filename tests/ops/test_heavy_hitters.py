from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilerec.errors import ConfigError
from tilerec.ops.hot.heavy_hitters import HeavyHitters


def _fed(stream: list[int], counters: int, block: int) -> HeavyHitters:
    found = HeavyHitters(counters)
    for at in range(0, len(stream), block):
        keys, counts = np.unique(np.array(stream[at : at + block], np.int64), return_counts=True)
        found.add(keys, counts)
    return found


@given(st.lists(st.integers(-4, 30), max_size=200), st.integers(1, 40), st.integers(1, 50))
@settings(max_examples=150, deadline=None)
def test_counts_hold_their_bounds_on_any_stream(stream: list[int], counters: int, block: int) -> None:
    found = _fed(stream, counters, block)
    true = {key: stream.count(key) for key in set(stream)}
    held = dict(zip(found.keys.tolist(), found.counts.tolist(), strict=True))
    assert len(held) <= counters
    assert found.keys.tolist() == sorted(held)
    assert found.error * (counters + 1) <= len(stream) - sum(held.values())
    for key, count in true.items():
        assert held.get(key, 0) <= count <= held.get(key, 0) + found.error
        if count * (counters + 1) > len(stream):
            assert key in held


def test_few_values_are_counted_exactly() -> None:
    found = _fed([5, -1, 5, 5, 9] * 100, 3, 7)
    keys, counts = found.top(10)
    assert (keys.tolist(), counts.tolist(), found.error) == ([5, -1, 9], [300, 100, 100], 0)


def test_the_worked_example() -> None:
    found = HeavyHitters(2)
    found.add(np.array([1, 2, 3], np.int64), np.array([5, 3, 2], np.int64))
    assert (found.keys.tolist(), found.counts.tolist(), found.error) == ([1, 2], [3, 1], 2)


def test_the_frequent_ids_of_a_power_law_are_found_in_order() -> None:
    ranks = np.arange(1, 200_001, dtype=np.float64)
    cdf = np.cumsum(ranks**-1.1)
    stream = np.searchsorted(cdf / cdf[-1], np.random.default_rng(3).random(300_000))
    found = _fed(stream.tolist(), 512, 20_000)
    true = np.bincount(stream)
    keys, counts = found.top(20)
    assert keys.tolist() == np.argsort(-true, kind="stable")[:20].tolist()
    assert np.all(true[keys] - counts <= found.error)
    assert found.error <= 300_000 / 513


def test_no_counters_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        HeavyHitters(0)
