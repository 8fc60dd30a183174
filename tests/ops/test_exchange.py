"""The exchange ops: worked examples, brute force over bags and rows, what they refuse, and as torch programs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

from tilerec.errors import InputError
from tilerec.ops import backends as backends
from tilerec.ops.exchange import definition as exchange

OPS = torch.ops.tilerec
NO_SLOTS = torch.empty(0, dtype=torch.int32)
# The op as it is dispatched here (native where that is built), and its reference.
ROUTE: dict[str, Callable[..., Any]] = {"op": OPS.route_ids, "reference": exchange._route_ids_reference}
PLACE: dict[str, Callable[..., Any]] = {"op": OPS.place_rows_, "reference": exchange._place_rows_reference_}


def _into(pick_: Callable[..., None]) -> Callable[..., torch.Tensor]:
    """`pick_rows_` as `pick_rows`, into the middle of a tensor whose ends it must leave alone."""

    def pick(source: torch.Tensor, slots: torch.Tensor, counts: list[int], widths: list[int], *rest: Any) -> Any:
        size = sum(count * width for count, width in zip(counts, widths, strict=True))
        memory = torch.full((size + 4,), 77).to(source.dtype)
        pick_(memory[2 : 2 + size], source, slots, counts, widths, *rest)
        assert (memory[:2] == 77).all()
        assert (memory[2 + size :] == 77).all()
        return memory[2 : 2 + size]

    return pick


PICK: dict[str, Callable[..., Any]] = {
    "op": OPS.pick_rows,
    "reference": exchange._pick_rows_reference,
    "op into": _into(OPS.pick_rows_),
    "reference into": _into(exchange._pick_rows_reference_),
}
BOTH = pytest.mark.parametrize("which", ["op", "reference"])
PICKS = pytest.mark.parametrize("which", list(PICK))


class Batch(NamedTuple):
    """Arguments of `route_ids`."""

    ids: Tensor
    offsets: Tensor
    keys: Sequence[int] = (0,)
    batches: Sequence[int] = (2,)
    cuts: Sequence[int] = (0, 2, 4)
    ranges: Sequence[int] = (2,)
    wire: Sequence[int] = (1, 0)
    each_id: bool = False
    dtype: torch.dtype = torch.int32
    names: str = "clicks@items"


def _lists(results: Sequence[Tensor]) -> list[Any]:
    return [result.tolist() for result in results]


def _route_by_hand(batch: Batch) -> list[list[Any]]:
    """Part by part: bags in order, ids in order."""
    ids, offsets = batch.ids.tolist(), batch.offsets.tolist()
    uniform = len(batch.batches) == 1
    sizes = list(batch.batches) * (max(batch.keys, default=0) + 1) if uniform else list(batch.batches)
    first_bags = list(itertools.accumulate(sizes, initial=0))
    by_place: dict[int, list[tuple[int, list[tuple[int, int]]]]] = {}
    cuts, wire = iter(batch.cuts), iter(batch.wire)
    for key, ranges in zip(batch.keys, batch.ranges, strict=True):
        own = [next(cuts) for _ in range(ranges + 1)]
        bags = [range(offsets[b], offsets[b + 1]) for b in range(first_bags[key], first_bags[key] + sizes[key])]
        if batch.each_id:
            bags = [range(p, p + 1) for bag in bags for p in bag]
        for low, high in itertools.pairwise(own):
            found = [
                (number, [(ids[p] - low, p) for p in bag if low <= ids[p] < high]) for number, bag in enumerate(bags)
            ]
            place = next(wire)
            if place >= 0:
                by_place[place] = [(number, inside) for number, inside in found if inside]
    parts = [by_place[place] for place in range(len(by_place))]
    present = [bag for part in parts for bag in part]
    return [
        [0, *(n for part in parts for n in (len(part), sum(len(inside) for _, inside in part)))],
        [len(inside) for _, inside in present],
        [local for _, inside in present for local, _ in inside],
        [number for number, _ in present],
        [position for _, inside in present for _, position in inside],
    ]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    key_count = draw(st.integers(1, 3))
    if draw(st.booleans()):
        sizes = [draw(st.integers(0, 4))]
        bags = sizes[0] * key_count
    else:
        sizes = draw(st.lists(st.integers(0, 4), min_size=key_count, max_size=key_count))
        sizes = [*sizes, 0] if key_count == 1 else sizes
        bags = sum(sizes)
    rows = draw(st.sampled_from([1, 3, 257]))
    lengths = draw(st.lists(st.integers(0, 4), min_size=bags, max_size=bags))
    ids = draw(st.lists(st.integers(0, rows - 1), min_size=sum(lengths), max_size=sum(lengths)))
    keys = draw(st.lists(st.integers(0, key_count - 1), max_size=4))
    cuts: list[int] = []
    ranges = []
    for _ in keys:
        inner = sorted(draw(st.lists(st.integers(0, rows), max_size=5)))
        cuts += [0, *inner, rows]
        ranges.append(len(inner) + 1)
    travels = draw(st.lists(st.booleans() | st.just(True), min_size=sum(ranges), max_size=sum(ranges)))
    places = iter(draw(st.permutations(range(sum(travels)))))
    return Batch(
        torch.tensor(ids, dtype=draw(st.sampled_from([torch.int32, torch.int64]))),
        torch.tensor([0, *lengths]).cumsum(0),
        keys,
        sizes,
        cuts,
        ranges,
        [next(places) if moves else -1 for moves in travels],
        draw(st.booleans()),
        draw(st.sampled_from([torch.int32, torch.int64])),
        ",".join("f@t" for _ in keys),
    )


@BOTH
def test_routing_gives_the_worked_example(which: str) -> None:
    batch = Batch(torch.tensor([3, 0, 1]), torch.tensor([0, 2, 3]))
    told, lengths, local, slots, positions = ROUTE[which](*batch)
    assert told.tolist() == [0, 1, 1, 2, 2]
    assert lengths.tolist() == [1, 1, 1]
    assert local.tolist() == [1, 0, 1]
    assert slots.tolist() == [0, 0, 1]
    assert positions.tolist() == [0, 1, 2]
    assert [t.dtype for t in (told, lengths, local, slots, positions)] == [
        torch.int64, torch.int32, torch.int32, torch.int32, torch.int64,
    ]  # fmt: skip


@BOTH
@given(batch=batches())
def test_routing_keeps_the_order_of_the_batch_in_each_part(which: str, batch: Batch) -> None:
    result = ROUTE[which](*batch)
    assert _lists(result) == _route_by_hand(batch)
    assert result[2].dtype == batch.dtype


@BOTH
def test_routing_numbers_each_id_within_its_key(which: str) -> None:
    batch = Batch(
        torch.tensor([9, 9, 3, 0, 1]),
        torch.tensor([0, 2, 2, 4, 5]),
        keys=[1],
        batches=[2],
        cuts=[0, 4],
        ranges=[1],
        wire=[0],
        each_id=True,
    )
    assert _lists(ROUTE[which](*batch)) == [[0, 3, 3], [1, 1, 1], [3, 0, 1], [0, 1, 2], [2, 3, 4]]


@BOTH
@pytest.mark.parametrize(
    "batch",
    [
        Batch(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), [], [3], [], [], [], names=""),
        Batch(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), batches=[0]),
        Batch(torch.empty(0, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)),
        Batch(torch.tensor([3, 1]), torch.tensor([0, 1, 2]), wire=[-1, -1]),
        Batch(torch.empty(0, dtype=torch.int32), torch.zeros(3, dtype=torch.int64), cuts=[0, 0], ranges=[1], wire=[0]),
    ],
    ids=["no route", "no bag", "no id", "no part travels", "no row"],
)  # fmt: skip
def test_routing_of_nothing_gives_nothing(which: str, batch: Batch) -> None:
    told, *rest = ROUTE[which](*batch)
    assert told.shape == (1 + 2 * sum(place >= 0 for place in batch.wire),)
    assert told.sum() == 0
    assert [t.shape for t in rest] == [(0,)] * 4


@BOTH
@pytest.mark.parametrize("ranges", [1, 2])
@pytest.mark.parametrize("bad", [-1, 4, 2**31 + 1, -(2**63)])
def test_routing_names_the_first_id_outside_its_table(which: str, ranges: int, bad: int) -> None:
    batch = Batch(
        torch.tensor([0, 1, bad, bad]),
        torch.tensor([0, 1, 1, 2, 4]),
        keys=[0, 1],
        cuts=[0, 4] * 2 if ranges == 1 else [0, 2, 4] * 2,
        ranges=[ranges] * 2,
        wire=range(2 * ranges),
        names="views@items,clicks@items",
    )
    wanted = rf"Table 'items': got id {bad} of feature 'clicks' \(position 2 .* expected ids in \[0, 4\)"
    with pytest.raises(InputError, match=wanted):
        ROUTE[which](*batch)


@BOTH
@pytest.mark.parametrize("split_first", [False, True])
def test_routing_names_the_first_bad_id_whether_or_not_its_route_is_split(which: str, split_first: bool) -> None:
    split, whole = ([0, 2, 4], 2), ([0, 4], 1)
    (cuts, ranges), (more_cuts, more_ranges) = (split, whole) if split_first else (whole, split)
    batch = Batch(
        torch.tensor([0, 8, 9, 1]), torch.tensor([0, 1, 2, 3, 4]), [0, 1], [2], cuts + more_cuts,
        [ranges, more_ranges], [0, 1, 2], names="a@t,b@t",
    )  # fmt: skip
    with pytest.raises(InputError, match=r"id 8 of feature 'a' \(position 1 "):
        ROUTE[which](*batch)


# Where every id is a bag of its own, only the ends of a key's run are read.
FALLING = [[0, 3, 2], [0, 2**62, 3], [0, -5, 3]]
OUTSIDE = [[-1, 0, 2], [0, 1, 5], [4, 4, 4], [3, 3, 0]]


@BOTH
@pytest.mark.parametrize(
    ("each_id", "offsets"),
    [(False, offsets) for offsets in FALLING + OUTSIDE] + [(True, offsets) for offsets in OUTSIDE],
)
def test_routing_refuses_offsets_that_fall_or_leave_the_ids(which: str, each_id: bool, offsets: list[int]) -> None:
    batch = Batch(torch.tensor([0, 1, 2]), torch.tensor(offsets), each_id=each_id)
    with pytest.raises(InputError, match=r"Feature 'clicks': offsets\[\d\] is .* must not fall .* \[0, 3\]"):
        ROUTE[which](*batch)


@BOTH
@pytest.mark.parametrize(("keys", "sizes"), [([0], [3]), ([1], [2]), ([1], [1, 2]), ([0], [-1]), ([2**40], [2])])
def test_routing_refuses_batch_sizes_that_the_offsets_do_not_hold(
    which: str, keys: list[int], sizes: list[int]
) -> None:
    batch = Batch(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3]), keys, sizes)
    with pytest.raises(InputError, match=r"hold fewer bags than the batch sizes require \(3 offsets"):
        ROUTE[which](*batch)


@BOTH
@pytest.mark.parametrize(
    "wrong",
    [
        {"wire": [0, 0]},
        {"wire": [1, 2]},
        {"wire": [0]},
        {"cuts": [0, 4]},
        {"cuts": [1, 2, 4]},
        {"cuts": [0, 3, 2]},
        {"cuts": [0, 2, 4, 5]},
        {"ranges": [3]},
        {"ranges": [1]},
    ],
)
def test_routing_refuses_a_layout_that_contradicts_itself(which: str, wrong: dict[str, list[int]]) -> None:
    batch = Batch(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3]))._replace(**wrong)
    with pytest.raises(AssertionError, match="route_ids"):
        ROUTE[which](*batch)


# ---------------------------------------------------------------------------------------------------- rows


class Moves(NamedTuple):
    """Segments between `flat` and rows."""

    slots: Tensor
    counts: list[int]
    widths: list[int]
    slot_starts: list[int]
    places: list[int]
    strides: list[int]
    adds: list[int]


def _elements(moves: Moves) -> list[tuple[int, bool]]:
    """For each element of the rows: its element of the flat side, and whether it is added."""
    slots = moves.slots.tolist()
    return [
        (place + (i if start < 0 else slots[start + i]) * stride + c, bool(add))
        for count, width, start, place, stride, add in zip(*moves[1:], strict=True)
        for i in range(count)
        for c in range(width)
    ]


@st.composite
def segments(draw: st.DrawFn, distinct: bool = True) -> tuple[Moves, int]:
    """Some segments in a flat side of bags x columns; its size."""
    bags, columns = draw(st.integers(1, 5)), draw(st.sampled_from([1, 3, 257]))
    moves = Moves(NO_SLOTS, [], [], [], [], [], [])
    slots: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        width = draw(st.integers(0, columns))
        add = draw(st.booleans())
        own = draw(st.lists(st.integers(0, bags - 1), max_size=bags, unique=distinct or not add))
        dense = draw(st.booleans())
        moves.counts.append(len(own))
        moves.widths.append(width)
        moves.slot_starts.append(-1 if dense else len(slots))
        moves.places.append(draw(st.integers(0, columns - width)))
        moves.strides.append(columns)
        moves.adds.append(int(add))
        if not dense:
            slots += own
    return moves._replace(slots=torch.tensor(slots, dtype=torch.int32)), bags * columns


@BOTH
def test_placing_gives_the_worked_example(which: str) -> None:
    out = torch.zeros(9)
    slots = torch.tensor([0, 2], dtype=torch.int32)
    PLACE[which](out, torch.tensor([1.0, 2.0, 3.0, 4.0]), slots, [2], [2], [0], [1], [3], [0])
    assert out.tolist() == [0, 1, 2, 0, 0, 0, 0, 3, 4]
    assert PICK[which](out, slots, [2], [2], [0], [1], [3]).tolist() == [1, 2, 3, 4]


@BOTH
@given(drawn=segments(distinct=False))
def test_placing_takes_rows_in_order_and_adds_where_told(which: str, drawn: tuple[Moves, int]) -> None:
    moves, size = drawn
    elements = _elements(moves)
    rows = torch.arange(1, len(elements) + 1, dtype=torch.float64)
    expected = [0.5] * size
    for value, (place, add) in zip(rows.tolist(), elements, strict=True):
        expected[place] = value + (expected[place] if add else 0)
    out = torch.full((size,), 0.5, dtype=torch.float64)
    PLACE[which](out, rows, *moves)
    assert out.tolist() == expected


@PICKS
@given(drawn=segments())
def test_picking_reads_what_placing_would_write(which: str, drawn: tuple[Moves, int]) -> None:
    moves, size = drawn
    source = torch.arange(size)
    assert PICK[which](source, *moves[:-1]).tolist() == [place for place, _ in _elements(moves)]


@BOTH
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8]
)
def test_rows_of_every_type_are_moved_and_added(which: str, dtype: torch.dtype) -> None:
    out, rows = torch.arange(12).to(dtype), torch.tensor([20, 21, 22, 23, 7, 8]).to(dtype)
    slots = torch.tensor([2, 0], dtype=torch.int32)
    PLACE[which](out, rows, slots, [2, 1], [2, 2], [0, -1], [1, 1], [4, 4], [0, 1])
    assert out.tolist() == [0, 29, 31, 3, 4, 5, 6, 7, 8, 20, 21, 11]
    assert PICK[which](out, slots, [2], [2], [0], [1], [4]).tolist() == [20, 21, 29, 31]


BAD_MOVES: dict[str, dict[str, Any]] = {
    "place behind the end": {"places": [7]},
    "negative place": {"places": [-1]},
    "last row behind the end": {"strides": [4]},
    "wide row behind the end": {"widths": [1], "places": [9]},
    "huge stride": {"strides": [2**62]},
    "slot behind the end": {"slots": torch.tensor([0, 3], dtype=torch.int32)},
    "negative slot": {"slots": torch.tensor([-1, 2], dtype=torch.int32)},
    "slots that are not there": {"slot_starts": [1]},
    "slots far away": {"slot_starts": [2**62]},
    "more rows than there are": {"slot_starts": [-1], "counts": [3], "strides": [0]},
    "huge count": {"slot_starts": [-1], "counts": [2**62]},
    "negative count": {"counts": [-1]},
    "negative width": {"widths": [-1]},
    "negative stride": {"strides": [-1], "places": [6]},
}


@BOTH
@pytest.mark.parametrize("case", list(BAD_MOVES))
def test_a_segment_outside_its_tensors_is_refused_before_anything_is_written(which: str, case: str) -> None:
    good: dict[str, Any] = {
        "slots": torch.tensor([0, 2], dtype=torch.int32),
        "counts": [2],
        "widths": [2],
        "slot_starts": [0],
        "places": [1],
        "strides": [3],
        "adds": [0],
    }
    bad = good | BAD_MOVES[case]
    bad["slot_starts"] = [start + 2 if start >= 0 else -1 for start in bad["slot_starts"]]
    lists = [good[name] + bad[name] for name in Moves._fields[1:]]
    both = Moves(torch.cat([good["slots"], bad["slots"]]), *lists)
    out = torch.zeros(9)
    with pytest.raises(AssertionError, match="segment 1 has"):
        PLACE[which](out, torch.ones(8), *both)
    assert out.tolist() == [0] * 9
    if case in ("more rows than there are", "huge count"):
        return  # picking makes as many rows as it is asked for
    with pytest.raises((AssertionError, RuntimeError)):
        PICK[which](out, *both[:-1])


@BOTH
def test_a_fresh_output_begins_as_zeros_also_where_no_rows_go(which: str) -> None:
    out = torch.full((6,), float("nan"))
    slots = torch.tensor([1], dtype=torch.int32)
    PLACE[which](out, torch.tensor([1.0, 2.0]), slots, [1], [2], [0], [0], [3], [1], True)
    assert out.tolist() == [0, 0, 0, 1, 2, 0]
    PLACE[which](out.fill_(3), torch.empty(0), slots, [], [], [], [], [], [], True)
    assert not out.any()


@BOTH
def test_rows_and_places_of_other_types_are_refused(which: str) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        PLACE[which](torch.zeros(4), torch.ones(2, dtype=torch.float64), NO_SLOTS, [1], [2], [-1], [0], [2], [0])


def test_a_strided_output_is_refused_and_not_written_elsewhere() -> None:
    out = torch.zeros(4, 4).t()
    with pytest.raises(RuntimeError):
        OPS.place_rows_(out, torch.ones(2), NO_SLOTS, [1], [2], [-1], [0], [2], [0])
    assert not out.any()


# ---------------------------------------------------------------------------------------------------- as programs


@pytest.mark.parametrize("each_id", [False, True])
def test_routing_passes_opcheck(each_id: bool) -> None:
    opcheck(
        OPS.route_ids.default,
        tuple(Batch(torch.tensor([3, 0, 1]), torch.tensor([0, 2, 3]), each_id=each_id)),
    )


def test_moving_rows_passes_opcheck() -> None:
    slots = torch.tensor([0, 2], dtype=torch.int32)
    opcheck(OPS.place_rows_.default, (torch.zeros(9), torch.ones(4), slots, [2], [2], [0], [1], [3], [1]))
    opcheck(OPS.place_rows_.default, (torch.ones(9), torch.ones(4), slots, [2], [2], [0], [1], [3], [1], True))
    opcheck(OPS.pick_rows_.default, (torch.zeros(4), torch.ones(9), slots, [2], [2], [0], [1], [3]))
    opcheck(OPS.pick_rows.default, (torch.ones(9), slots, [2], [2], [0], [1], [3]))
