"""Powers and expectations: what they equal, and that they are made of exact operations only."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerec.planner.cost.portable import Draws, distinct_uniform, exponential, missed, power


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


def test_far_from_zero_an_exponential_is_that_of_700() -> None:
    assert exponential([-1e9, 1e9]).tolist() == exponential([-700.0, 700.0]).tolist()
    assert float(exponential(700.0)) == pytest.approx(math.exp(700.0), rel=1e-11)
    assert float(exponential(-700.0)) == pytest.approx(math.exp(-700.0), rel=1e-11)
    assert float(exponential(0.0)) == 1.0


@given(st.floats(-0.3466, 0.3466))
def test_exponentials_near_zero_are_as_good_as_is_said(x: float) -> None:
    assert float(exponential(x)) == pytest.approx(math.exp(x), rel=1e-12)


def test_powers_with_exponents_of_few_bits_are_those_by_all_squares() -> None:
    base, exponent = np.array([0.999, 0.5, 1.0 - 2.0**-30]), np.array([3 << 20, 1 << 20, 0])
    expected = np.ones(3)
    for bit in range(22):
        square = base.copy()
        for _ in range(bit):
            square *= square
        expected *= np.where(exponent >> bit & 1, square, 1.0)
    assert power(base, exponent).tolist() == expected.tolist()


def test_draws_that_are_kept_are_missed_with_the_bits_of_other_draws() -> None:
    numbers = np.array([3.5, 0.0, 200.0, 1.0, 7.25, 0.5, 1e19, 64.0, 2.0**40 + 1])
    draws = Draws(numbers)
    for share in (np.linspace(0.0, 1.0, 9), np.linspace(1e-13, 1e-9, 9), 0.3):
        assert draws.missed(share).tolist() == missed(share, numbers).tolist()
    assert Draws(np.zeros(0)).missed(0.5).tolist() == []
    assert Draws(np.zeros(2)).missed(0.5).tolist() == [1.0, 1.0]


def test_powers_of_whole_exponents_begin_at_one() -> None:
    assert power([0.0, 0.5, 3.0], 0).tolist() == [1.0, 1.0, 1.0]
    assert power(0.5, [1, 2, 3, 60]).tolist() == [0.5, 0.25, 0.125, 0.5**60]


def test_among_more_rows_than_digits_can_tell_every_draw_is_new() -> None:
    """1 - (1 - 1e-12) has four digits left, so more rows than 10^12 are taken as without end."""
    many = np.concatenate([np.linspace(1.01e12, 2e12, 50), [1e15, 1e18]])
    assert distinct_uniform(many, 12345.0).tolist() == [12345.0] * 52
    assert float(distinct_uniform(1e6, 1e3)) == pytest.approx(1e6 * (1 - (1 - 1e-6) ** 1e3), rel=1e-9)
    assert float(distinct_uniform(1e12, 1.0)) <= 1.0
    # With as many draws as rows, 1 - 1/e of them are found: up to 10^12 rows they are counted.
    assert float(distinct_uniform(1e12, 1e12)) == pytest.approx(1e12 * (1 - math.exp(-1)), rel=1e-3)


def test_more_draws_than_64_bits_count_find_everything() -> None:
    assert float(missed(0.5, 1e300)) == 0.0
    assert float(missed(0.0, 1e300)) == 1.0
