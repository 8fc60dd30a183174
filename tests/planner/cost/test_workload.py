"""What is known of ids: present bags, distinct rows, and traffic of row ranges, against counting."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tilerec.errors import ConfigError
from tilerec.planner.cost.frequency import _log
from tilerec.planner.cost.workload import LOAD_FACTOR, Reads, Skew, TableWork, Workload
from tilerec.spec import optimizer as specs
from tilerec.spec.plan import Wire
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


@pytest.mark.parametrize(("exponent", "load_factor"), [(0.0, 0.3), (1.05, 0.05), (1.05, 0.3), (1.05, 1.0), (0.6, 0.01)])
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
        (lambda: Skew(0), "distinct=0"),
        (lambda: Skew(True), "distinct=True"),
        (lambda: Skew(1.0), "distinct=1.0"),  # type: ignore[arg-type]
        (lambda: Skew(3, float("nan")), "exponent=nan"),
        (lambda: Skew(3, 8.5), "got exponent=8.5; expected a number from 0 to 8"),
        (lambda: Skew(3, -0.1), "exponent=-0.1"),
        (lambda: Skew(3, "1"), "exponent='1'"),  # type: ignore[arg-type]
        (lambda: Reads(1e12), "bags is 1000000000000.0"),
        (lambda: Reads(True), "bags is True"),
        (lambda: Reads(10, 1e12), "ids_per_bag is 1000000000000.0"),
        (lambda: TableWork("t", 10, 0), "Table 't': dim is 0"),
        (lambda: TableWork("t", True, 8), "Table 't': rows is True"),
        (lambda: TableWork("t", 10, 8.0), "Table 't': dim is 8.0"),  # type: ignore[arg-type]
        (lambda: TableWork("t", 10, 8, load_factor=1.5), "Table 't': load_factor is 1.5"),
        (lambda: TableWork("t", 10, 8, load_factor=-0.5), "Table 't': load_factor is -0.5"),
        (lambda: Reads(-1), "bags is -1"),
        (lambda: Reads(10, float("nan")), "ids_per_bag is nan"),
        (lambda: TableWork("t", 0, 8), "Table 't': rows is 0"),
        (lambda: TableWork("t", 10, 8, skew=Skew(11)), "Table 't': got a skew of 11"),
        (lambda: Workload([TableWork("t", 10, 8)] * 2), "Table 't' is there twice"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_numbers_at_the_ends_of_what_is_allowed_are_taken() -> None:
    assert Skew(1, 8).exponent == 8
    assert (Skew(1).exponent, Skew(1).ordered) == (0.0, False)
    assert Reads(0, 0).ids_per_bag == 0
    assert Reads(5) == Reads(5, 1.0, False)
    for factor in (0, 1, 0.5):
        assert TableWork("t", 1, 1, load_factor=factor).load_factor == factor
    assert TableWork("t", 10, 8, skew=Skew(10)).skew == Skew(10)


def test_without_a_word_a_table_is_read_by_one_feature_of_512_bags_and_cached_for_a_fifth() -> None:
    work = TableWork("t", 10, 8)
    assert work.reads == (Reads(512),)
    assert (work.each_id, work.cached, work.collection, work.sums_in_hosts) == (False, False, "", None)
    assert work.load_factor == LOAD_FACTOR == 0.2


@pytest.mark.parametrize(
    ("sums", "each_id", "fan_in"),
    [(None, False, 5.0), (True, False, 2.0), (False, False, 1.0), (True, True, 1.0), (None, True, 1.0)],
)
def test_rows_are_added_up_inside_hosts_where_a_bag_has_several_ids_or_it_is_said(
    sums: bool | None, each_id: bool, fan_in: float
) -> None:
    reads = [Reads(10, 5.0), Reads(10, 1.0)]
    work = TableWork("t", 10, 8, reads=reads, each_id=each_id, sums_in_hosts=sums)
    assert work.fan_in == Workload([work]).fan_in[0] == fan_in
    assert TableWork("t", 10, 8, reads=[]).fan_in == 0.0


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("fp32", [4, 0]), ("fp16", [2, 0]), ("bf16", [2, 0]), ("int8", [1, 4]), ("fp8", [1, 4])],
)
def test_a_cell_and_a_row_take_these_bytes_in_each_number_format(name: Any, wanted: list[int]) -> None:
    load = Workload([TableWork("t", 10, 8), TableWork("u", 10, 8, wire=Wire(name, "bf16"))])
    assert load.forward[:, 1].tolist() == wanted
    assert load.backward[:, 1].tolist() == [2, 0]
    assert load.forward[:, 0].tolist() == load.backward[:, 0].tolist() == [4, 0]


def test_each_table_has_numbers_of_its_own_kind() -> None:
    load = Workload(
        [
            TableWork("a", 10, 8, DataType.BF16, specs.SGD(0.1), [Reads(4, 2, True), Reads(6, 3)]),
            TableWork("b", 20, 4, DataType.FP32, specs.RowWiseAdagrad(0.1), [Reads(5, 3, True)], each_id=True),
            TableWork("c", 30, 2, skew=Skew(3, ordered=True), cached=True, load_factor=0.5, collection="x"),
        ]
    )
    assert load.names == ("a", "b", "c")
    assert (load.rows.tolist(), load.dim.tolist(), load.element.tolist()) == (
        [10, 20, 30],
        [8, 4, 2],
        [2, 4, 4],
    )
    assert load.attached.tolist() == [True, True, False]
    assert (load.sums.tolist(), load.talks.tolist()) == ([0, 1, 0], [0, 1, 0])
    assert (load.cached.tolist(), load.load_factor.tolist()) == ([False, False, True], [0.2, 0.2, 0.5])
    assert load.ordered.tolist() == [False, False, True]
    assert load.table.tolist() == [0, 0, 1, 2]
    assert load.bags.tolist() == [4, 6, 15, 512]  # where rows are not pooled, each id is a bag
    assert load.ids_per_bag.tolist() == [2, 3, 1, 1]
    assert load.weighted.tolist() == [True, False, False, False]
    assert load.ids.tolist() == [26, 15, 512]
    assert load.per_table(np.array([1.0, 10.0, 100.0, 1000.0])).tolist() == [11, 100, 1000]
    assert (load.collections, load.wide) == (2, 4)


def test_a_part_of_a_workload_is_in_steps_of_all_of_it() -> None:
    tables = [TableWork("a", 10, 8), TableWork("b", 10, 8, DataType.FP64, collection="x")]
    load = Workload(tables)
    assert (load.collections, load.wide) == (2, 8)
    part = load.part(tables[:1])
    assert (part.names, part.collections, part.wide) == (("a",), 2, 8)
    assert (Workload(tables[:1]).collections, Workload(tables[:1]).wide, Workload([]).collections) == (
        1,
        4,
        1,
    )


def test_lengths_travel_where_bags_have_several_ids() -> None:
    """One id more than bags, and a half of one: a part's lengths are left out where it has no more than half an id."""
    load = Workload([TableWork("t", 10, 8, reads=[Reads(100, 1.01)]), TableWork("u", 10, 8, reads=[Reads(100, 1.004)])])
    assert load.present(1.0)[2].tolist() == [100.0, 0.0]
    assert load.present(np.array([0.5, 1.0]))[1].tolist() == pytest.approx([50.5, 100.4])


def test_positions_travel_of_members_that_have_not_all_of_a_sums_bags() -> None:
    """Half of the rows have an id of three quarters of the bags of two, and of a half of those of one."""
    load = Workload(
        [
            TableWork("t", 10, 8, reads=[Reads(100, 2), Reads(10, 1)]),
            TableWork("u", 10, 8, reads=[Reads(100, 60)]),  # all of them, but for less than one
        ]
    )
    assert load.positions(0.5, 2.0).tolist() == [75 + 5, 0]
    assert load.positions(0.5, 1.0).tolist() == [0, 0]
    assert load.positions(np.array([0.5, 0.001]), 1000.0)[1] == pytest.approx(100 * (1 - 0.999**60))


def test_ranks_may_be_a_number_for_each_table() -> None:
    load = Workload([TableWork("t", 50, 8, reads=[Reads(10)]), TableWork("u", 50, 8, skew=Skew(50), reads=[Reads(10)])])
    both = load.distinct(np.array([1.0, 4.0]))
    assert both.tolist() == [load.distinct(1)[0], load.distinct(4)[1]]
    assert both.tolist() == pytest.approx([50 * (1 - 0.98**10), 50 * (1 - 0.98**40)], rel=1e-6)


def test_a_law_of_equal_shares_is_an_even_one() -> None:
    """Exponent 0: each of 40 ids has a fortieth, in buckets of any width; the last is cut at the fortieth."""
    load = Workload([TableWork("t", 90, 8, skew=Skew(40, 0.0, ordered=True), reads=[Reads(7)])])
    for row in (0, 1, 2, 5, 7, 8, 20, 39, 40, 90):
        assert float(load.share(0, 0, row)) == pytest.approx(min(row, 40) / 40, rel=1e-9)
    assert load.distinct(3)[0] == pytest.approx(40 * (1 - (1 - 1 / 40) ** 21), rel=1e-9)


def test_the_first_ids_of_a_law_are_counted_one_by_one() -> None:
    """Shares of 1, 1/2, 1/3, 1/4 of five ids by themselves, to rounding."""
    law = zipf(5, 1.0)
    load = Workload([TableWork("t", 90, 8, skew=Skew(5, 1.0, ordered=True)), TableWork("u", 9, 8, skew=Skew(1))])
    assert [float(load.share(0, k, k + 1)) for k in range(6)] == pytest.approx([*law, 0.0], rel=1e-12)
    assert load.distinct(1)[1] == 1.0
    two = Workload(
        [TableWork("u", 9, 8), TableWork("t", 9, 8, skew=Skew(2, 1.0, ordered=True)),
         TableWork("v", 9, 8, skew=Skew(4, 2.0, ordered=True))]
    )  # fmt: skip
    shares = two.share(np.array([0, 1, 2]), 0, np.array([3, 1, 1]))
    assert shares.tolist() == pytest.approx([1 / 3, 2 / 3, 1 / (1 + 1 / 4 + 1 / 9 + 1 / 16)])


def test_fewer_ids_than_their_law_has_draws_are_no_more_than_draws() -> None:
    load = Workload([TableWork("t", 10**6, 8, skew=Skew(10**6, 0.5), reads=[Reads(1)])])
    assert load.distinct(1)[0] <= 1.0


@pytest.mark.parametrize(("factor", "wanted"), [(0.5, 0.5), (0.9, 0.1), (0.25, 0.75)])
def test_of_rows_all_alike_a_step_misses_those_that_the_cache_does_not_hold(factor: float, wanted: float) -> None:
    load = Workload([TableWork("t", 100_000, 8, reads=[Reads(200)], cached=True, load_factor=factor)])
    assert load.missed(2)[0] == pytest.approx(400 * wanted, rel=0.005)
    assert load.missed(1)[0] == pytest.approx(200 * wanted, rel=0.005)
    few = Workload([TableWork("t", 1000, 8, reads=[Reads(1)], cached=True, load_factor=factor)])
    assert few.missed(1)[0] == pytest.approx(wanted, rel=0.005)


def test_nothing_is_missed_where_all_that_occurs_fits_and_all_where_a_step_is_more_than_the_lines() -> None:
    fits = TableWork("t", 1000, 8, reads=[Reads(300)], skew=Skew(99), cached=True, load_factor=0.1)
    just = dataclasses.replace(fits, name="just", skew=Skew(100))
    over = dataclasses.replace(fits, name="over", skew=Skew(102))
    flood = TableWork("flood", 1000, 8, reads=[Reads(10_000)], cached=True, load_factor=0.5)
    load = Workload([fits, just, over, flood])
    found = load.missed(1)
    assert found[:2].tolist() == [0.0, 0.0]
    assert found[2] > 0
    assert found[3] == load.distinct(1)[3]


def test_a_cache_that_just_holds_a_steps_rows_holds_those_of_the_step_before() -> None:
    """One line, and one id of 100 a step: one in a hundred is the one before. With 2 ids and 1 line, none is held."""
    work = TableWork("t", 100, 8, reads=[Reads(1)], cached=True, load_factor=0.01)
    load = Workload([work, dataclasses.replace(work, name="two", reads=[Reads(2)])])
    assert load.missed(1).tolist() == pytest.approx([0.99, load.distinct(1)[1]])


def test_a_measured_curve_takes_the_place_of_zipfs_law_as_far_as_it_goes() -> None:
    """Half of the reads are of three ids; the other ids have the rest by Zipf's law."""
    curve = ((1, 0.3), (3, 0.5))
    skew = Skew(1000, 1.0, ordered=True, curve=curve)
    load = Workload([TableWork("t", 2000, 8, skew=skew, reads=[Reads(50)]), TableWork("u", 2000, 8, skew=Skew(1000))])
    shares = [float(load.share(0, 0, k)) for k in (1, 2, 3, 1000, 2000)]
    assert shares == pytest.approx([0.3, 0.4, 0.5, 1.0, 1.0])
    law = zipf(1000, 1.0)
    law = np.array([0.3, 0.1, 0.1, *(law[3:] / law[3:].sum() * 0.5)])
    for k in (4, 10, 100, 500):
        assert float(load.share(0, 0, k)) == pytest.approx(law[:k].sum(), abs=0.005)
    assert load.distinct(4)[0] == pytest.approx((1 - (1 - law) ** 200).sum(), rel=0.01)
    assert (
        load.distinct(1)[1] == Workload([TableWork("u", 2000, 8, skew=Skew(1000), reads=[Reads(512)])]).distinct(1)[0]
    )


def test_a_curve_of_all_ids_leaves_nothing_to_a_law() -> None:
    load = Workload([TableWork("t", 9, 8, skew=Skew(4, 2.0, True, ((1, 0.5), (2, 0.75), (4, 1.0))))])
    assert [float(load.share(0, k, k + 1)) for k in range(5)] == pytest.approx([0.5, 0.25, 0.125, 0.125, 0.0])


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        (((5, 0.5),), "numbers of ids that rise, up to 4"),
        (((2, 0.5), (1, 0.6)), "numbers of ids that rise"),
        (((1, 0.5), (2, 0.4)), "shares that rise, up to 1"),
        (((1, 1.5),), "shares that rise, up to 1"),
        (((1, 0.1), (2, 0.4)), "adds no more than the one before"),
        (((1, 0.5), (4, 0.9)), "shares that reach 1 at 4"),
        (((1,),), "numbers of ids that rise"),
        ((("many", 1.0),), "numbers of ids that rise"),
        (((1.5, 0.5),), "numbers of ids that rise"),
    ],
)
def test_a_curve_that_is_none_is_refused(curve: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"Skew: got the curve .*{message}"):
        Skew(4, 1.0, curve=curve)
