"""Requests of cached tables by Triton's kernels: the reference's plans, books and rows, number by number."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.cache_tables import CachedTables, Shape, batch, moving
from tests.ops.triton.gates import Gate, compiled, nightly
from tests.ops.triton.interpreter import quick
from tests.ops.triton.launches import counted
from tilerec.errors import InputError
from tilerec.ops.cache import definition as reference
from tilerec.ops.cache.definition import BOOKS, HeaderColumn
from tilerec.ops.cache.triton.backend import KERNELS
from tilerec.ops.runtime.triton import library

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels run on the GPU here: see tests/cuda")

REFERENCES = {
    "cache_ask_": reference.cache_ask_reference,
    "cache_plan": reference.cache_plan_reference,
    "cache_move_": reference.cache_move_reference_,
    "cache_seat_": reference.cache_seat_reference_,
    "cache_lines_": reference.cache_lines_reference_,
}


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def both(shapes: list[Shape], ways: int) -> tuple[CachedTables, CachedTables]:
    torch.manual_seed(1)
    one = CachedTables(shapes, ways)
    torch.manual_seed(1)
    return one, CachedTables(shapes, ways)


MORE = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="one of four that differ little: nightly")


@pytest.mark.parametrize(
    ("lfu", "ahead"),
    [(True, 2), *[pytest.param(*own, marks=MORE) for own in ((True, 0), (False, 0), (False, 2))]],
)
def test_requests_are_those_of_the_reference(lfu: bool, ahead: int) -> None:
    shapes = [
        Shape(60, 2, 90, lfu, (5, 0)), Shape(0, 0, 3, lfu), Shape(33, 1, 70), Shape(40, 0, 90, lfu, (3, 0)),
        Shape(20, 5, 0, lfu, (2,)),
    ]  # fmt: skip
    got, want = both(shapes, 4)
    rng = random.Random(ahead)
    for i in range(4):
        segments, ids = batch(rng, shapes, 16, torch.int32 if i % 2 else torch.int64)
        total = sum(end - begin for begin, end, _ in segments)
        mine, theirs = (
            got.request(KERNELS, segments, ids, ahead),
            want.request(REFERENCES, segments, ids, ahead),
        )
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
        assert torch.equal(moving(mine[0], mine[2], total), moving(theirs[0], theirs[2], total))
        for a, b in zip([*got.books, *got.host], [*want.books, *want.host], strict=True):
            assert torch.equal(a, b)
        assert torch.equal(got.update(KERNELS, segments, ids), want.update(REFERENCES, segments, ids))
        got.check()
    totals = torch.stack(got.books[reference.TOTALS :: BOOKS]).sum(0)
    assert int(totals[HeaderColumn.SPARE]) > 0
    assert int(totals[HeaderColumn.EVICTIONS]) > 0
    assert int(totals[HeaderColumn.WRITES]) > 0


def test_an_id_that_is_no_row_is_told_and_changes_nothing() -> None:
    shapes = [Shape(9, 2, 4), Shape(5, 0, 9)]
    got, _ = both(shapes, 2)
    segments, ids = [(0, 2, 1), (2, 5, 0)], torch.tensor([4, 1, 8, 9, -1])
    with pytest.raises(InputError, match=r"id (9|-1) of feature number 1 .* outside \[0, 9\) of table number 0"):
        got.request(KERNELS, segments, ids, 0)
    lines = KERNELS["cache_lines_"](ids, [2, 0], [5, 2], [0, -1], got.books[:1], [], [7])
    assert lines.tolist() == [-1, 7, 7, 4, 1]


def test_one_row_a_thousand_times_and_no_ids_at_all() -> None:
    shapes = [Shape(9, 1, 4, True), Shape(5, 0, 9)]
    got, want = both(shapes, 4)
    for segments, ids in (
        ([(0, 1000, 0), (1000, 1001, 1)], torch.tensor([7] * 1000 + [2])),
        ([(0, 0, 0), (0, 0, 1)], torch.zeros(0, dtype=torch.int64)),
        ([], torch.zeros(0, dtype=torch.int64)),
    ):
        mine, theirs = got.request(KERNELS, segments, ids, 0), want.request(REFERENCES, segments, ids, 0)
        assert torch.equal(mine[0], theirs[0])
        for a, b in zip([*got.books, *got.lines], [*want.books, *want.lines], strict=True):
            assert torch.equal(a, b)
    assert got.books[reference.COUNTS][7] == 1, "a request counts a row once"


def test_rows_of_odd_bytes_and_of_several_types_move_whole() -> None:
    shapes = [
        Shape(40, 1, 40, False, (3,), torch.float8_e4m3fn), Shape(40, 1, 40, False, (3, 5), torch.bfloat16),
        Shape(40, 1, 40, False, (300,)),
    ]  # fmt: skip
    got, want = both(shapes, 2)
    rng = random.Random(7)
    for _ in range(2):
        segments, ids = batch(rng, shapes, 12)
        got.request(KERNELS, segments, ids, 1)
        want.request(REFERENCES, segments, ids, 1)
        for t in range(3):  # every line is written to
            for tables in (got, want):
                tables.books[BOOKS * t + reference.DIRTY] |= tables.books[BOOKS * t + reference.ROW_IN] >= 0
    for a, b in zip([*got.lines, *got.host], [*want.lines, *want.host], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


BOOK = {"ints": "*i32", "longs": "*i64", "bytes": "*u8"}
TABLES = {"TABLES": 32, "TILE": 128}
COUNTS = {"segment_count": "i32", "table_count": "i32"}
GATES = [
    Gate(
        "ask", "tilerec.ops.cache.triton.request:ask_kernel",
        {"ids": "*i64", "segments": "*i64", "tables": "*i64", "clock": "*i64", "ints": "*i32", "longs": "*i64",
         "header": "*i64", "unsorted": "*i32", "report": "*i64", **COUNTS, "last_key": "i32"}, {"TILE": 128},
    ),
    Gate(
        "give", "tilerec.ops.cache.triton.plan:give_kernel",
        {"ids": "*i64", "segments": "*i64", "tables": "*i64", "clock": "*i64", "ints": "*i32", "longs": "*i64",
         "header": "*i64", "keys": "*i64", "order": "*i64", "given": "*i32", "flags": "*i32", "total": "i32",
         "spares": "i32", **COUNTS}, {**TABLES, "ENTRIES": 1, "WAYS": 32},
    ),
    Gate(
        "plan", "tilerec.ops.cache.triton.plan:plan_kernel",
        {"ids": "*i64", "segments": "*i64", "tables": "*i64", **BOOK, "header": "*i64", "keys": "*i64", "order": "*i64",
         "given": "*i32", "flags": "*i32", "sums": "*i64", "plan": "*i64", "total": "i32", "spares": "i32", **COUNTS},
        {**TABLES, "STEPS": 20},
    ),
    *[
        Gate(
            f"carry {way}", "tilerec.ops.cache.triton.move:carry_kernel",
            {"plan": "*i64", "header": "*i64", "units": "*i32", "firsts": "*i64", "movers": "*i64", "total": "i32",
             "spares": "i32", "table_count": "i32", "mover_count": "i32", "most": "i32"},
            {"COMES": way == "in", "TABLES": 32, "ROWS": 4, "COLUMNS": 128},
        )
        for way in ("in", "out")
    ],
    Gate(
        "seat", "tilerec.ops.cache.triton.seat:seat_kernel",
        {"plan": "*i64", "header": "*i64", "tables": "*i64", "clock": "*i64", **BOOK, "total": "i32", "spares": "i32",
         "table_count": "i32"}, TABLES,
    ),
    Gate(
        "lines", "tilerec.ops.cache.triton.lines:lines_kernel",
        {"ids": "*i64", "segments": "*i64", "tables": "*i64", "line_of": "*i32", "dirty": "*u8", "out": "*i32",
         **COUNTS},
        {"WRITES": True, "TILE": 128},
    ),
]  # fmt: skip


def test_a_request_is_six_launches_and_four_kernels_and_a_new_batch_compiles_nothing() -> None:
    shapes = [Shape(60, 2, 90, True, (5, 0)), Shape(33, 1, 70, True), Shape(40, 0, 90)]
    tables, _ = both(shapes, 4)
    ops = {name: getattr(torch.ops.tilerec, name) for name in KERNELS}
    variants = []
    for most in (40, 3, 17):
        segments, ids = batch(random.Random(most), shapes, most)
        clock = torch.ones(3, 3, dtype=torch.int64)
        with counted() as given:
            _asked(tables, ops, segments, ids, clock)
        assert given.launches == [
            "ask_kernel", "give_kernel", "plan_kernel", "carry_kernel", "carry_kernel", "seat_kernel",
        ]  # fmt: skip
        named = [name.split(".")[1] for name in given.kernels]
        assert named == ["zeros", "sort", "zeros", "cumsum"]
        assert given.copies.count("report") == 1
        variants.append(set(given.variants))
    assert variants[0] == variants[1] == variants[2]


def _asked(tables: CachedTables, ops: Any, segments: Any, ids: torch.Tensor, clock: torch.Tensor) -> None:
    """A request as the host makes it."""
    begins, ends, own = ([s[k] for s in segments] for k in range(3))
    ask = (ids, begins, ends, own, tables.books, tables.sets, tables.ways, clock)
    header, keys, order = ops["cache_ask_"](*ask, "")
    plan = ops["cache_plan"](*ask, header, keys, order)
    for comes in (False, True):
        ops["cache_move_"](plan, header, tables.lines, tables.host, tables.tables, keys.shape[0], comes)
    ops["cache_seat_"](plan, header, tables.books, clock, keys.shape[0])


@nightly
def test_the_compiler_spills_nothing() -> None:
    for name, found in compiled(GATES).items():
        assert found.spilled == 0, name
        assert found.registers <= 168, name
