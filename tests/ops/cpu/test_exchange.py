"""The native exchange kernels against the reference: same bits for any number of threads and any vectors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.exchange import definition as exchange
from tilerec.ops.exchange.cpu import kernels
from tilerec.ops.runtime.cpu.library import library

LIBRARY = library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native CPU library is not built")
LEVELS = range(LIBRARY.tr_isa_widest() + 1 if LIBRARY is not None else 0)


@pytest.fixture(scope="module")
def native() -> dict[str, Callable[..., Any]]:
    assert LIBRARY is not None
    return kernels(LIBRARY)


@pytest.fixture(params=LEVELS, ids=["base", "avx2", "avx512"][: len(LEVELS)], autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    assert LIBRARY is not None
    before = LIBRARY.tr_isa()
    LIBRARY.tr_isa_choose(request.param)
    yield
    LIBRARY.tr_isa_choose(before)


def _cuts(rows: int, parts: int, kind: str) -> list[int]:
    """Even cuts, even ones whose last parts are empty, or cuts that crowd at the table's beginning."""
    if kind == "even":
        return [rows * p // parts for p in range(parts + 1)]
    if kind == "ceiling":
        return [min(-(-rows // parts) * p, rows) for p in range(parts + 1)]
    return [*(min(p // 2, rows) for p in range(parts)), rows]


def _batch(
    kind: str, lengths: str, rows: int, parts: int, ids: torch.dtype, each_id: bool, seed: int = 3
) -> tuple[Any, ...]:
    """Arguments of `route_ids` that are big enough for threads: four keys, one read twice, a route that drops parts."""
    generator = torch.Generator().manual_seed(seed)
    bags, keys = 1500, [2, 0, 3, 1, 2]
    lengths_S = torch.randint(0, 5, (4 * bags,), generator=generator)
    if lengths == "ones":
        lengths_S.fill_(1)
    if lengths == "one long":
        lengths_S[77] = 20_000
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_S.cumsum(0)])
    values = torch.randint(0, rows, (int(offsets[-1]),), generator=generator).to(ids)
    ranges = [parts, 1, parts, 1, 3]
    cuts = [cut for n in ranges for cut in _cuts(rows, n, kind)]
    travels = [True] * (2 * parts + 2) + [False, True, False]
    order = torch.randperm(sum(travels), generator=generator).tolist()
    places = iter(order)
    wire = [next(places) if moves else -1 for moves in travels]
    return values, offsets, keys, [bags], cuts, ranges, wire, each_id, ids, "a@t,b@t,c@t,d@t,a@u"


def _equal(result: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for one, other in zip(result, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("kind", "lengths", "rows", "parts"),
    [
        ("even", "mixed", 100_003, 2),
        ("even", "ones", 100_003, 64),
        ("ceiling", "one long", 1000, 300),
        ("ceiling", "mixed", 7, 64),
        ("crowded", "mixed", 2**31 - 1, 64),
    ],
)
def test_native_routing_equals_the_reference(
    native: dict[str, Callable[..., Any]], kind: str, lengths: str, rows: int, parts: int, threads: int
) -> None:
    for each_id, ids in ((False, torch.int32), (True, torch.int64)):
        batch = _batch(kind, lengths, rows, parts, ids, each_id)
        expected = exchange._route_ids_reference(*batch)
        torch.set_num_threads(threads)
        _equal(native["route_ids"](*batch), expected)
        _equal(native["route_ids"](*batch, False), (*expected[:4], expected[4][:0]))
        _equal(exchange._route_ids_reference(*batch, False), (*expected[:4], expected[4][:0]))


def test_more_parts_than_two_bytes_count_are_told_apart(native: dict[str, Callable[..., Any]]) -> None:
    parts = 70_000
    ids = torch.tensor([69_999, 0, 65_535, 65_536, 65_534])
    batch = (
        ids, torch.tensor([0, 5]), [0], [1], range(parts + 1), [parts], range(parts), False, torch.int64, "f@t",
    )  # fmt: skip
    told, lengths, local, slots, positions = native["route_ids"](*batch)
    counts = told[1:].view(parts, 2)
    assert counts.nonzero()[:, 0].unique().tolist() == sorted(ids.tolist())
    assert (lengths.tolist(), local.tolist(), slots.tolist()) == ([1] * 5, [0] * 5, [0] * 5)
    assert positions.tolist() == [1, 4, 2, 3, 0]


@pytest.mark.parametrize("threads", [1, 5])
def test_the_first_bad_id_is_named_whichever_thread_meets_it(
    native: dict[str, Callable[..., Any]], threads: int
) -> None:
    values, *rest = _batch("even", "mixed", 1000, 4, torch.int64, False)
    offsets = rest[0]
    torch.set_num_threads(threads)
    first, last = int(offsets[2 * 1500 + 700]), int(offsets[3 * 1500])  # key 2 is read first
    values = values.clone()
    values[first:last:3] = 1000
    values[: int(offsets[1500])] = -1
    with pytest.raises(InputError, match=rf"id 1000 of feature 'a' \(position {first} "):
        native["route_ids"](values, *rest)
    values[first:last:3] = 0
    with pytest.raises(InputError, match=r"id -1 of feature 'b' \(position 0 "):
        native["route_ids"](values, *rest)


@pytest.mark.parametrize("threads", [1, 5])
def test_the_first_offset_that_falls_is_named(native: dict[str, Callable[..., Any]], threads: int) -> None:
    values, offsets, *rest = _batch("even", "mixed", 1000, 4, torch.int64, False)
    offsets = offsets.clone()
    torch.set_num_threads(threads)
    offsets[3500], offsets[1200] = -1, 2**62
    with pytest.raises(InputError, match=r"Feature 'a': offsets\[3500\] is -1"):
        native["route_ids"](values, offsets, *rest)


def test_other_integers_and_strides_are_read_as_they_are(native: dict[str, Callable[..., Any]]) -> None:
    batch = _batch("even", "mixed", 100, 3, torch.int64, False)
    expected = exchange._route_ids_reference(*batch)
    values, offsets, *rest = batch
    spread = torch.stack([values, values * 0 - 1], dim=1)[:, 0]
    _equal(native["route_ids"](spread, offsets.int(), *rest), expected)
    _equal(native["route_ids"](values.to(torch.int16), offsets, *rest), expected)


def _segments(bags: int, columns: list[int], order: str, adds: bool) -> tuple[tuple[Any, ...], int]:
    """Segments into `[bags, sum of columns]`, for every column block one, or two that add; slots as `order` says."""
    generator = torch.Generator().manual_seed(5)
    lists: list[list[int]] = [[], [], [], [], [], []]
    slots: list[Tensor] = []
    place = 0
    for width in columns:
        for _ in range(1 + adds):
            own = torch.randperm(bags, generator=generator)[: bags * 2 // 3]
            if order == "ascending":
                own = own.sort()[0]
            if order == "repeated" and adds:
                own = own // 3
            dense = order == "dense"
            start = -1 if dense else sum(map(len, slots))
            numbers = (bags if dense else len(own), width, start, place, sum(columns), int(adds))
            for values, number in zip(lists, numbers, strict=True):
                values.append(number)
            if not dense:
                slots.append(own)
        place += width
    joined = torch.cat(slots).int() if slots else torch.empty(0, dtype=torch.int32)
    return (joined, *lists), bags * sum(columns)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("order", ["dense", "ascending", "shuffled", "repeated"])
@pytest.mark.parametrize(("bags", "columns"), [(700, [64, 128, 64]), (700, [1, 3, 257]), (3001, [16, 48]), (3, [64])])
def test_native_rows_equal_the_reference(
    native: dict[str, Callable[..., Any]], bags: int, columns: list[int], order: str, threads: int
) -> None:
    generator = torch.Generator().manual_seed(9)
    for dtype, adds in (
        (torch.float32, True),
        (torch.float32, False),
        (torch.float64, True),
        (torch.int16, False),
    ):
        (slots, *lists), size = _segments(bags, columns, order, adds)
        count = sum(n * width for n, width in zip(lists[0], lists[1], strict=True))
        rows = (torch.randn(count, generator=generator) * 99).to(dtype)
        out = (torch.randn(size, generator=generator) * 99).to(dtype)
        expected = out.clone()
        exchange._place_rows_reference_(expected, rows, slots, *lists)
        picked = exchange._pick_rows_reference(expected, slots, *lists[:-1])
        torch.set_num_threads(threads)
        native["place_rows_"](out, rows, slots, *lists)
        assert torch.equal(out, expected)
        assert torch.equal(native["pick_rows"](out, slots, *lists[:-1]), picked)
        anything = torch.full_like(out, 7)
        native["place_rows_"](anything, rows, slots, *lists, True)
        expected = torch.zeros_like(out)
        exchange._place_rows_reference_(expected, rows, slots, *lists)
        assert torch.equal(anything, expected)


def test_rows_written_past_the_caches_equal_the_reference(native: dict[str, Callable[..., Any]]) -> None:
    (slots, *lists), size = _segments(20_000, [64, 64, 80], "dense", False)
    for shift in (0, 1):  # whole cache lines, or none
        memory = torch.zeros(size + 16)
        out = memory[shift : shift + size]
        rows = torch.arange(size, dtype=torch.float32)
        native["place_rows_"](out, rows, slots, *lists)
        blocks = rows.split([20_000 * width for width in (64, 64, 80)])
        expected = torch.cat([b.view(20_000, -1) for b in blocks], dim=1)
        assert torch.equal(out.view(20_000, -1), expected)
        assert not memory[:shift].any()
        assert not memory[shift + size :].any()
        assert torch.equal(native["pick_rows"](out, slots, *lists[:-1]), rows)


def test_calls_of_several_threads_do_not_meet(native: dict[str, Callable[..., Any]]) -> None:
    batches = [_batch("even", "mixed", 1000, 5, torch.int64, False, seed) for seed in range(4)]
    expected = [exchange._route_ids_reference(*batch) for batch in batches]
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        results[i] = [native["route_ids"](*batches[i]) for _ in range(5)]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for i, wanted in enumerate(expected):
        for result in results[i]:
            _equal(result, wanted)
