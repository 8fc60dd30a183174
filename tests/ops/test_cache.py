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
from tilerec.ops.cache.definition import BOOKS, TOTALS, HeaderColumn, Plan
from tilerec.spec.cache import CacheAlgorithm

OPS = torch.ops.tilerec
BY_OP = {
    name: getattr(OPS, name)
    for name in ("cache_ask_", "cache_plan", "cache_move_", "cache_seat_", "cache_lines_")
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
            model.request(
                {int(i) for a, b, own in segments if own == t for i in ids[a:b]}, max(1, serial - ahead)
            )
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
    with pytest.raises(InputError, match=r"Table 'u': id 5 of feature 'g' \(position 2 of"):
        OPS.cache_ask_(ids, [0, 2], [1, 3], [0, 1], tables.books, [1, 1], 2, clock, "f@t,g@u")
    with pytest.raises(InputError, match=r"id 9 of feature number 0 \(position 1\) is outside \[0, 9\)"):
        OPS.cache_ask_(ids, [0], [2], [0], tables.books, [1, 1], 2, clock, "")


def test_keys_ascend_by_set_then_by_row() -> None:
    places, last, dtype = cache.key_ranges(CachedTables([Shape(5, 2, 0)], 1).books, [2])
    assert [places[0][0] + row % 2 * places[0][1] + row // 2 for row in range(5)] == [0, 3, 1, 4, 2]
    assert (last, dtype) == (6, torch.int32)
