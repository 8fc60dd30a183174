from __future__ import annotations

import numpy as np
import pytest

from tilerec.data.hyperloglog import HyperLogLog
from tilerec.data.rows import mix
from tilerec.errors import ConfigError


def _hashes(start: int, stop: int) -> np.ndarray:
    return mix(np.arange(start, stop, dtype=np.uint64))


def test_nothing_is_counted_as_zero() -> None:
    sketch = HyperLogLog()
    sketch.add(_hashes(0, 0))
    assert sketch.count() == 0.0


@pytest.mark.parametrize("distinct", [1, 2, 10, 100, 1_000, 10_000, 40_000, 60_000, 100_000, 1_000_000])
def test_counts_lie_within_four_standard_errors_of_the_truth(distinct: int) -> None:
    sketch = HyperLogLog(14)
    sketch.add(_hashes(7, 7 + distinct))
    assert abs(sketch.count() - distinct) <= max(0.5, 4 * sketch.standard_error * distinct)


@pytest.mark.parametrize("precision", [4, 6, 10])
def test_the_error_over_many_streams_is_the_papers(precision: int) -> None:
    # 200 streams around the point where the estimators of 2007 changed over, 2.5 m.
    distinct = 3 << precision
    errors = []
    for stream in range(200):
        sketch = HyperLogLog(precision)
        sketch.add(_hashes(stream * distinct, (stream + 1) * distinct))
        errors.append(sketch.count() / distinct - 1)
    rms = float(np.sqrt(np.mean(np.square(errors))))
    assert rms <= 1.25 * sketch.standard_error
    assert abs(float(np.mean(errors))) <= 0.35 * sketch.standard_error


def test_repeats_and_order_change_nothing() -> None:
    once, often = HyperLogLog(8), HyperLogLog(8)
    once.add(_hashes(0, 5_000))
    for part in (_hashes(2_000, 5_000), _hashes(0, 3_000), _hashes(0, 5_000)[::-1]):
        often.add(part)
    assert once.count() == often.count()


def test_merging_counts_the_union() -> None:
    left, right, both = HyperLogLog(9), HyperLogLog(9), HyperLogLog(9)
    left.add(_hashes(0, 4_000))
    right.add(_hashes(3_000, 9_000))
    both.add(_hashes(0, 9_000))
    left.merge(right)
    assert left.count() == both.count()
    with pytest.raises(ConfigError, match="got precisions 9 and 10; expected equal"):
        left.merge(HyperLogLog(10))


def test_the_leading_zeros_of_extreme_hashes_are_exact() -> None:
    # All ones after the register's bits: a double would round them up to the next power of two.
    ones = HyperLogLog(4)
    ones.add(np.array([(1 << 60) - 1], np.uint64))
    assert ones._largest_m.max() == 1
    zeros = HyperLogLog(4)
    zeros.add(np.array([0], np.uint64))
    assert zeros._largest_m.max() == 61
    assert zeros.count() == pytest.approx(1.0, abs=0.1)


def test_a_precision_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected 4"):
        HyperLogLog(3)
