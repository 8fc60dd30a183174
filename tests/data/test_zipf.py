from __future__ import annotations

import math

import numpy as np
import pytest

from tilerec.data.zipf import MAX_EXTRAPOLATION, expected_distinct, fit, harmonic


def _draw(exponent: float, population: int, draws: int, seed: int = 0) -> np.ndarray:
    cdf = np.cumsum(np.arange(1, population + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(cdf / cdf[-1], np.random.default_rng(seed).random(draws))


def _counts(stream: np.ndarray) -> np.ndarray:
    return np.sort(np.unique(stream, return_counts=True)[1])[::-1]


@pytest.mark.parametrize("exponent", [0.3, 0.8, 1.0, 1.2, 1.6, 2.5])
def test_the_exponent_of_a_law_is_found(exponent: float) -> None:
    counts = _counts(_draw(exponent, 20_000, 300_000))
    found = fit(counts, 300_000, len(counts))
    assert found.exponent == pytest.approx(exponent, abs=0.02)
    assert found.distance < 0.01


@pytest.mark.parametrize(("exponent", "population"), [(0.0, 500_000), (0.6, 500_000), (1.0, 300_000)])
def test_ids_that_never_occurred_are_foreseen(exponent: float, population: int) -> None:
    stream = _draw(exponent, population, 200_000)
    counts = _counts(stream)
    found = fit(counts, 200_000, len(counts))
    assert len(counts) < 0.5 * population
    assert found.population == pytest.approx(population, rel=0.15)
    # What a planner asks: how many rows does a batch read?
    for draws in (1_000, 20_000):
        batches = stream.reshape(-1, draws)
        seen = float(np.mean([len(np.unique(batch)) for batch in batches]))
        assert expected_distinct(found.exponent, found.population, draws) == pytest.approx(seen, rel=0.02)


def test_an_even_stream_has_an_exponent_near_zero() -> None:
    counts = _counts(_draw(0.0, 1_000, 200_000))
    assert fit(counts, 200_000, 1_000).exponent < 0.1
    assert fit(_counts(_draw(0.0, 10**6, 10_000)), 10_000, 9_950).exponent == 0.0


def test_what_is_no_power_law_says_so_by_its_distance() -> None:
    # Half of the ids are one value, the rest even.
    found = fit(np.array([100_000, *[100] * 1_000]), 200_000, 1_001)
    assert found.distance > 0.1


def test_streams_of_nothing_and_of_one_id() -> None:
    assert fit(np.zeros(0, np.int64), 0, 0.0).population == 1
    one = fit(np.array([500]), 500, 1.0)
    assert (one.exponent, one.population) == (0.0, 1)


@pytest.mark.parametrize("distinct", [99_200.0, 99_900.0, 100_000.0])
def test_ids_that_never_repeat_do_not_repeat_in_batches_either(distinct: float) -> None:
    # A sketch may say a little less than 100,000 for ids that all differ: that must not change the answer.
    found = fit(np.zeros(0, np.int64), 100_000, distinct)
    assert found.population > 0.9 * MAX_EXTRAPOLATION * 100_000
    assert expected_distinct(found.exponent, found.population, 50_000) > 0.99 * 50_000


def test_the_population_is_never_below_what_was_seen_nor_beyond_its_limit() -> None:
    for exponent in (1.5, 2.0, 4.0):
        counts = _counts(_draw(exponent, 100_000, 50_000))
        found = fit(counts, 50_000, len(counts))
        assert len(counts) <= found.population <= MAX_EXTRAPOLATION * len(counts)


@pytest.mark.parametrize("s", [0.0, 0.5, 1.0, 1.7])
def test_harmonic_sums_are_those_of_their_terms(s: float) -> None:
    terms = np.arange(1, 300_001, dtype=np.float64) ** -s
    for first, last in ((1, 5), (1, 300_000), (1_500, 100_000), (2_001, 250_000), (9, 8)):
        assert harmonic(s, first, last) == pytest.approx(math.fsum(terms[first - 1 : last]), rel=1e-7)


def test_expected_distinct_is_that_of_the_terms() -> None:
    share = np.arange(1, 50_001, dtype=np.float64) ** -1.1
    share /= share.sum()
    exact = float(np.sum(1 - (1 - share) ** 10_000))
    assert expected_distinct(1.1, 50_000, 10_000) == pytest.approx(exact, rel=2e-3)
