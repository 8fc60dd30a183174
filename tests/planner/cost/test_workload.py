"""What is known of ids: present bags, distinct rows, and traffic of row ranges, against counting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tilerec.errors import ConfigError
from tilerec.planner.cost.workload import Reads, Skew, TableWork, Workload, _log
from tilerec.spec import optimizer as specs
from tilerec.spec.table import DataType


def zipf(size: int, exponent: float) -> Any:
    weights = np.arange(1, size + 1) ** -exponent
    return weights / weights.sum()


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.05, 2.0])
@pytest.mark.parametrize("size", [1, 7, 1000, 30_000])
def test_distinct_rows_and_shares_follow_zipfs_law(size: int, exponent: float) -> None:
    work = TableWork("t", 40_000, 8, reads=[Reads(300, 5)], skew=Skew(size, exponent, ordered=True))
    load, law = Workload([work]), zipf(size, exponent)
    for ranks in (1, 4):
        assert load.distinct(ranks)[0] == pytest.approx((1 - (1 - law) ** (1500 * ranks)).sum(), rel=0.01)
    for r0, r1 in ((0, 1), (0, 40_000), (3, 700), (size // 2, size)):
        assert float(load.share(0, r0, r1)) == pytest.approx(law[r0:r1].sum(), abs=0.01)


def test_the_portable_logarithm_is_one_to_rounding() -> None:
    numbers = np.concatenate([np.linspace(1.0, 4.0, 1000), 10.0 ** np.arange(1, 19)])
    np.testing.assert_allclose(_log(numbers), np.log(numbers), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    ("exponent", "load_factor"), [(0.0, 0.3), (1.05, 0.05), (1.05, 0.3), (1.05, 1.0), (0.6, 0.01)]
)
def test_rows_missed_are_those_of_a_cache_that_drops_what_was_not_used_for_longest(
    exponent: float, load_factor: float
) -> None:
    rows, draws, steps = 8000, 400, 240
    skew = Skew(rows, exponent) if exponent else None
    work = TableWork("t", rows, 8, reads=[Reads(200, 2)], skew=skew, cached=True, load_factor=load_factor)
    law, random, lines = zipf(rows, exponent), np.random.default_rng(0), int(load_factor * rows)
    used = np.full(rows, -1)
    missed = []
    for step in range(steps):
        ids = np.unique(random.choice(rows, draws, p=law))
        held = np.argsort(used, kind="stable")[rows - lines :]
        missed.append(len(np.setdiff1d(ids, held[used[held] >= 0])))
        used[ids] = step
    # Until every row has been seen, a cache of all of them misses those that are new.
    counted = 0.0 if load_factor == 1.0 else float(np.mean(missed[steps // 2 :]))
    expected = Workload([work]).missed(1)[0]
    assert expected == pytest.approx(counted, rel=0.06)


def test_without_lines_every_row_that_is_read_is_missed() -> None:
    load = Workload([TableWork("t", 1000, 8, reads=[Reads(300)], cached=True, load_factor=0.0)])
    assert load.missed(2)[0] == load.distinct(2)[0]


def test_ids_that_lie_anywhere_spread_their_traffic_evenly() -> None:
    load = Workload([TableWork("t", 1000, 8, skew=Skew(500, 1.2)), TableWork("u", 100, 8)])
    assert load.share(np.array([0, 1]), 0, np.array([250, 25])).tolist() == [0.25, 0.25]


def test_present_bags_and_ids_are_summed_over_features() -> None:
    load = Workload(
        [
            TableWork("t", 10, 8, reads=[Reads(100, 2), Reads(50, 0.5)]),
            TableWork("none", 10, 8, reads=[]),
            TableWork("each", 10, 8, reads=[Reads(10, 3)], each_id=True),
        ]
    )
    bags, ids, lengths = load.present(0.5)
    assert bags.tolist() == pytest.approx([75 + 12.5, 0, 15])
    assert ids.tolist() == pytest.approx([100 + 12.5, 0, 15])
    assert lengths.tolist() == pytest.approx([75, 0, 0])  # bags of one id need no lengths
    assert [t.ids_per_bag for t in load.tables] == [2, 0.0, 1.0]


def test_state_is_counted_by_its_slots() -> None:
    def state(optimizer: Any, data_type: DataType = DataType.FP32) -> tuple[int, int, int, int]:
        load = Workload([TableWork("t", 10, 8, data_type, optimizer)])
        return tuple(int(x[0]) for x in (load.element, load.cell_state, load.row_state, load.talks))  # type: ignore[return-value]

    assert state(specs.SGD(0.1)) == (4, 0, 0, 0)
    assert state(specs.RowWiseAdagrad(0.1)) == (4, 0, 4, 1)
    assert state(specs.Adam(0.1), DataType.BF16) == (2, 8, 0, 0)
    assert state(None, DataType.FP64) == (8, 8, 0, 0)  # a dense gradient


def test_an_empty_workload_has_no_traffic() -> None:
    load = Workload([])
    assert load.distinct(4).tolist() == []
    assert [x.tolist() for x in load.present(0.5)] == [[], [], []]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Skew(0), "distinct is 0"),
        (lambda: Skew(3, float("nan")), "exponent is nan"),
        (lambda: Reads(-1), "bags is -1"),
        (lambda: Reads(10, float("nan")), "ids_per_bag is nan"),
        (lambda: TableWork("t", 0, 8), "Table 't': rows is 0"),
        (lambda: TableWork("t", 10, 8, skew=Skew(11)), "Table 't': skew says 11"),
        (lambda: Workload([TableWork("t", 10, 8)] * 2), "Table 't' is there twice"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
