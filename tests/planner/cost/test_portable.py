"""Powers and expectations: what they equal, and that they are made of exact operations only."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerec.planner.cost.portable import distinct_uniform, exponential, missed, power


@given(st.floats(0, 2), st.integers(0, 60))
def test_powers_are_those_of_mathematics(base: float, exponent: int) -> None:
    assert float(power(base, exponent)) == pytest.approx(base**exponent, rel=1e-12, abs=1e-300)


@given(st.floats(-690, 690))
def test_exponentials_are_those_of_mathematics(x: float) -> None:
    assert float(exponential(x)) == pytest.approx(math.exp(x), rel=1e-11)


def test_bags_between_two_sizes_are_of_either_as_often_as_the_mean_says() -> None:
    assert float(missed(0.5, 1.5)) == 0.375
    assert float(missed(0.25, 0.4)) == pytest.approx(0.6 + 0.4 * 0.75)
    assert missed([0.0, 1.0], 3).tolist() == [1.0, 0.0]


def test_distinct_ids_are_at_most_the_rows_and_the_draws() -> None:
    assert float(distinct_uniform(2, 2)) == 1.5
    rows = np.array([1, 10, 1000, 10**9, 10**13])
    found = distinct_uniform(rows, 500.0)
    assert np.all(found <= np.minimum(rows, 500))
    assert found[3:].tolist() == pytest.approx([500.0, 500.0], rel=1e-5)


def test_distinct_ids_are_what_drawing_gives() -> None:
    drawn = np.random.default_rng(0).integers(0, 300, (200, 400))
    counted = np.mean([len(set(row)) for row in drawn.tolist()])
    assert float(distinct_uniform(300, 400)) == pytest.approx(counted, rel=0.01)
