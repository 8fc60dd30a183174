"""Ids follow the law that the docstring states."""

from __future__ import annotations

import numpy as np
import pytest

from tilerec.data.power_law import (
    check_power_law,
    power_law_probabilities,
    power_law_ranks,
    scattered_ids,
)
from tilerec.errors import ConfigError


@pytest.mark.parametrize("num_rows", [1, 2, 100, 5000])
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.05, 2.0])
def test_ranks_have_the_stated_probabilities(num_rows: int, exponent: float) -> None:
    quantiles = (np.arange(200_000) + 0.5) / 200_000
    ranks = power_law_ranks(quantiles, num_rows, exponent)
    counted = np.bincount(ranks, minlength=num_rows) / len(quantiles)
    stated = power_law_probabilities(num_rows, exponent)
    assert stated.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(counted, stated, atol=1.1e-5)


def test_the_head_falls_by_the_exponent() -> None:
    stated = power_law_probabilities(100_000, 1.5)
    assert stated[99] / stated[9999] == pytest.approx(100**1.5, rel=0.02)


def test_docstring_example() -> None:
    assert power_law_ranks(np.array([0.4, 0.6, 0.9]), 3, 1.0).tolist() == [0, 1, 2]


@pytest.mark.parametrize("exponent", [0.0, 0.3, 1.0, 1.2, 20.0])
def test_the_ends_of_the_unit_interval_stay_inside_the_table(exponent: float) -> None:
    ends = np.array([0.0, np.nextafter(1.0, 0.0)])
    for num_rows in (1, 3, 2**31):
        ranks = power_law_ranks(ends, num_rows, exponent)
        assert ranks[0] == 0
        assert 0 <= ranks[1] < num_rows


@pytest.mark.parametrize("num_rows", [1, 2, 3, 97, 100, 1024])
def test_scattering_is_a_bijection(num_rows: int) -> None:
    assert sorted(scattered_ids(np.arange(num_rows), num_rows).tolist()) == list(range(num_rows))


def test_scattering_of_the_largest_table_stays_in_range() -> None:
    ids = scattered_ids(np.array([0, 1, 2**31 - 1]), 2**31)
    assert ((ids >= 0) & (ids < 2**31)).all()
    assert len(set(ids.tolist())) == 3


@pytest.mark.parametrize(("num_rows", "exponent"), [(0, 1.0), (2**31 + 1, 1.0), (10, -0.1), (10, float("nan"))])
def test_what_the_formula_does_not_hold_for_is_refused(num_rows: int, exponent: float) -> None:
    with pytest.raises(ConfigError):
        check_power_law(num_rows, exponent)
