"""Requests of cached tables: the worked example, and the reference beside a cache in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from tests.ops.cache_tables import CachedTables, Shape, batch
from tests.ops.op_cases import cases
from tests.storage.cache_model import ModelCache
from tilerec.errors import InputError
from tilerec.ops.cache import definition as cache
from tilerec.ops.cache.definition import BOOKS, COUNTS, LINE_OF, TOTALS, HeaderColumn, Plan
from tilerec.spec.cache import CacheAlgorithm

OPS = torch.ops.tilerec
BY_OP = {
    name: getattr(OPS, name) for name in ("cache_ask_", "cache_plan", "cache_move_", "cache_seat_", "cache_lines_")
}


def test_the_worked_example() -> None:
    plan, header, books, clock, total = cases("cpu")["cache_seat_"]()
    assert header[0].tolist() == [2, 1, 1, 0, 2, 1, 1, 0]
    assert plan[:, 0].tolist() == [0, 8, 0, 4, -1, 1]
    lines, host = torch.arange(6.0), -torch.arange(9.0)
    OPS.cache_move_(plan, header, [lines], [host], [0], total, False)
    lines[0] = 40.0  # dirty, and written: not any more
    OPS.cache_move_(plan, header, [lines], [host], [0], total, True)
    assert host[4] == 0
    assert lines.tolist() == [-8, 1, 2, 3, 4, 5]
    OPS.cache_seat_(plan, header, books, clock, total)
    assert books[0].clamp(min=-1).tolist() == [-1, 2, -1, -1, -1, -1, 1, -1, 0]
    assert books[1].tolist() == [8, 6, 1, -1, -1, -1]
    assert books[2].tolist() == [4, 4, 3, 0, 0, 0]
    assert not books[5][0]


@pytest.mark.parametrize("lfu", [False, True])
@pytest.mark.parametrize("ahead", [0, 2])
def test_all_tables_in_one_request_do_what_each_does_in_plain_python(lfu: bool, ahead: int) -> None:
    shapes = [
        Shape(60, 2, 60, lfu),
        Shape(0, 0, 3, lfu),
        Shape(33, 1, 33, lfu, (1,)),
        Shape(40, 0, 40, lfu, (3, 0)),
    ]
    tables = CachedTables(shapes, 4)
    algorithm = CacheAlgorithm.LFU if lfu else CacheAlgorithm.LRU
    models = [ModelCache(shape.sets, 4, algorithm) for shape in shapes]
    rng = random.Random(ahead)
    for serial in range(1, 16):
        segments, ids = batch(rng, shapes, 14)
        tables.request(BY_OP, segments, ids, ahead)
        for t, model in enumerate(models):
            model.request({int(i) for a, b, own in segments if own == t for i in ids[a:b]}, max(1, serial - ahead))
            row_in = tables.books[BOOKS * t + 1]
            assert set(row_in[row_in >= 0].tolist()) == model.resident()
            totals = tables.books[BOOKS * t + TOTALS]
            assert totals[HeaderColumn.ROWS] - totals[HeaderColumn.MISSES] == model.hits
            assert totals[HeaderColumn.MISSES] == model.misses
            assert totals[HeaderColumn.SPARE] == model.conflicts
            assert totals[HeaderColumn.EVICTIONS] == model.evictions
        tables.update(BY_OP, segments, ids)
        tables.check()


def test_what_lacks_spare_lines_is_planned_again() -> None:
    tables = CachedTables([Shape(20, 1, 1)], 2)
    clock = torch.tensor([[1], [1], [1]])
    ask = (torch.tensor([0, 1, 2, 3]), [0], [4], [0], tables.books, [1], 2, clock)
    header, keys, order = OPS.cache_ask_(*ask, "")
    OPS.cache_plan(*ask, header, keys, order)
    assert header[0, [HeaderColumn.SPARE, HeaderColumn.FREE]].tolist() == [2, 1]
    for book, value in ((1, -1), (2, 0), (3, 0), (5, 0)):
        tables.books[book] = torch.cat((tables.books[book], tables.books[book].new_full((1,), value)))
    plan = OPS.cache_plan(*ask, header, keys, order)
    assert header[0, [HeaderColumn.SPARE, HeaderColumn.FREE]].tolist() == [2, 2]
    assert plan[Plan.LINE, :4].tolist() == [0, 1, 2, 3]


def test_an_id_that_is_no_row_is_totals() -> None:
    tables = CachedTables([Shape(9, 1, 4), Shape(5, 1, 4)], 2)
    clock = torch.tensor([[1, 1], [1, 1], [1, 1]])
    ids = torch.tensor([3, 9, 5])
    with pytest.raises(InputError, match=r"Table 'u': got id 5 of feature 'g' \(position 2 of"):
        OPS.cache_ask_(ids, [0, 2], [1, 3], [0, 1], tables.books, [1, 1], 2, clock, "f@t,g@u")
    with pytest.raises(InputError, match=r"id 9 of feature number 0 \(position 1\) is outside \[0, 9\)"):
        OPS.cache_ask_(ids, [0], [2], [0], tables.books, [1, 1], 2, clock, "")


def test_keys_ascend_by_set_then_by_row() -> None:
    places, last, dtype = cache.key_ranges(CachedTables([Shape(5, 2, 0)], 1).books, [2])
    assert [places[0][0] + row % 2 * places[0][1] + row // 2 for row in range(5)] == [0, 3, 1, 4, 2]
    assert (last, dtype) == (6, torch.int32)


def _named(tables: CachedTables, rows: list[int], ahead: int = 0) -> list[int]:
    """Request rows of a single table, while the `ahead` requests before are in flight; the header's numbers."""
    header, _, _ = tables.request(BY_OP, [(0, len(rows), 0)], torch.tensor(rows, dtype=torch.int64), ahead)
    tables.check()
    return [int(header[0, column]) for column in (HeaderColumn.MISSES, HeaderColumn.SPARE, HeaderColumn.EVICTIONS)]


@pytest.mark.parametrize("lfu", [False, True])
def test_a_cache_of_as_many_lines_as_rows_loads_each_row_once(lfu: bool) -> None:
    tables, rng, loaded = CachedTables([Shape(64, 2, 0, lfu)], 32), random.Random(0), 0
    for _ in range(40):
        rows = [min(int(rng.paretovariate(0.6)) - 1, 63) for _ in range(30)]
        misses, conflicts, evictions = _named(tables, rows, ahead=30)
        loaded += misses
        assert (conflicts, evictions) == (0, 0)
    assert loaded == int((tables.books[LINE_OF] >= 0).sum())


def test_a_frequent_row_keeps_its_line_and_the_rare_one_has_a_spare_line() -> None:
    tables = CachedTables([Shape(10, 1, 1, lfu=True)], 1)
    for _ in range(3):
        _named(tables, [5])
    for misses in (
        1,
        0,
    ):  # row 7 was named less often than row 5; the second time, its spare line still has it
        assert _named(tables, [7]) == [misses, misses, 0]
        assert tables.books[LINE_OF][7] == 1
    assert _named(tables, [7]) == [0, 0, 1]  # as often: it comes in
    assert tables.books[LINE_OF][7] == 0


def test_a_row_leaves_its_spare_line_for_one_of_its_set_as_soon_as_there_is_one() -> None:
    tables = CachedTables([Shape(10, 1, 2)], 1)
    _named(tables, [1, 2])
    assert tables.books[LINE_OF][[1, 2]].tolist() == [0, 1]
    assert _named(tables, [2]) == [0, 0, 1]
    assert tables.books[LINE_OF][2] == 0
    assert _named(tables, [3, 2], ahead=1) == [1, 1, 0]  # row 2 holds its line, row 3 gets a spare one
    assert _named(tables, [3], ahead=1) == [0, 0, 0]  # row 2 was named by the batch before and is held
    assert _named(tables, [3]) == [0, 0, 1]
    assert tables.books[LINE_OF][[3, 2]].tolist()[0] == 0
    assert tables.books[LINE_OF][2] < 0


def test_no_rows_and_no_table() -> None:
    for rows in (0, 5):
        assert _named(CachedTables([Shape(rows, 1 if rows else 0, 0)], 2), []) == [0, 0, 0]


def test_counts_of_requests_end_at_the_largest_number() -> None:
    """They do not wrap around, which would make the most frequent row the first to be evicted."""
    tables = CachedTables([Shape(6, 1, 1, lfu=True)], 1)
    most = 2**31 - 1
    _named(tables, [3])
    counts = tables.books[COUNTS]
    counts[[3, 4]] = torch.tensor([most - 1, most], dtype=torch.int32)
    for _ in range(2):
        _named(tables, [3])
        assert counts[3] == most
    assert tables.books[LINE_OF][3] == 0
    _named(tables, [5])
    assert tables.books[LINE_OF][3] == 0, "a row that was named once is not admitted"
    _named(tables, [4])
    assert tables.books[LINE_OF][4] == 0, "one that was named as often is admitted"
    assert counts[[3, 4]].tolist() == [most, most]
