"""The exchange ops in Triton against their references: the same results, and the same words for what is wrong."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.ops.triton.gates import Gate, aside, compiled, nightly
from tests.ops.triton.interpreter import quick
from tilerec.errors import InputError
from tilerec.ops.exchange import definition as reference
from tilerec.ops.runtime.upload import cached_per_stream, upload

pytest.importorskip("triton")

from tilerec.ops.exchange.triton import backend as exchange
from tilerec.ops.exchange.triton import rows as exchange_rows
from tilerec.ops.runtime.triton import library

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels are compiled here: tests/cuda")

NO_SLOTS = torch.empty(0, dtype=torch.int32)


@pytest.fixture(autouse=True)
def _quick_interpreter() -> Iterator[None]:
    with quick():
        yield


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


def drawn(seed: int) -> Batch:
    """Some keys, read by several routes or by none; uniform or variable batches; parts that do not travel."""
    draw = random.Random(seed)
    key_count = draw.randint(1, 4)
    variable = draw.random() < 0.4
    sizes = [draw.randint(0, 5) for _ in range(max(key_count, 2))] if variable else [draw.randint(0, 5)]
    key_count = len(sizes) if variable else key_count
    bags = sum(sizes) if variable else sizes[0] * key_count
    lengths = [draw.choice([0, 1, 2, 5, 30]) for _ in range(bags)]
    rows = draw.choice([1, 3, 257])
    keys = [draw.randrange(key_count) for _ in range(draw.randint(1, 5))]
    cuts: list[int] = []
    ranges: list[int] = []
    for _ in keys:
        inner = sorted(draw.randint(0, rows) for _ in range(draw.choice([0, 0, 1, 5])))
        cuts += [0, *inner, rows]
        ranges.append(len(inner) + 1)
    travels = [draw.random() < 0.85 for _ in range(sum(ranges))]
    places = list(range(sum(travels)))
    draw.shuffle(places)
    return Batch(
        torch.tensor([draw.randrange(rows) for _ in range(sum(lengths))]).to(draw.choice([torch.int32, torch.int64])),
        torch.tensor([0, *lengths]).cumsum(0).to(draw.choice([torch.int32, torch.int64])),
        keys,
        sizes,
        cuts,
        ranges,
        [places.pop() if moves else -1 for moves in travels],
        draw.random() < 0.3,
        draw.choice([torch.int32, torch.int64]),
        ",".join(f"f{r}@t" for r in range(len(keys))),
    )  # fmt: skip


def cut(results: Sequence[Tensor]) -> list[Tensor]:
    """Without what is nothing."""
    told, lengths, local, slots, positions = results
    present, moved = (int(told[first::2].sum()) for first in (1, 2))
    return [told, lengths[:present], local[:moved], slots[:present], positions[:moved]]


def routed_alike(batch: Batch) -> Sequence[Tensor]:
    uncut, expected = exchange.route_ids(*batch), reference._route_ids_reference(*batch)
    most = max(map(list(batch.keys).count, batch.keys), default=0)
    assert [t.numel() for t in uncut[1:]] == [batch.ids.numel() * most] * 4, "what the host knows"
    results = cut(uncut)
    for one, other in zip(results, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other)
    return results


@pytest.mark.parametrize("seed", range(40))
def test_routing_equals_the_reference(seed: int) -> None:
    routed_alike(drawn(seed))


def test_positions_that_nothing_reads_are_not_written() -> None:
    batch = drawn(3)
    found, wanted = exchange.route_ids(*batch, with_positions=False), exchange.route_ids(*batch)
    assert found[4].shape == (0,)
    assert all(torch.equal(a, b) for a, b in zip(cut(found)[:4], cut(wanted)[:4], strict=True))


def test_routing_gives_the_worked_example() -> None:
    told, lengths, local, slots, positions = routed_alike(Batch(torch.tensor([3, 0, 1]), torch.tensor([0, 2, 3])))
    assert told.tolist() == [0, 1, 1, 2, 2]
    assert lengths.tolist() == [1, 1, 1]
    assert local.tolist() == [1, 0, 1]
    assert slots.tolist() == [0, 0, 1]
    assert positions.tolist() == [0, 1, 2]


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
def test_routing_of_nothing_gives_nothing(batch: Batch) -> None:
    routed_alike(batch)


def test_bags_and_parts_reach_over_tiles() -> None:
    """A bag of 700 ids, one id 1,000 times, 300 parts (keys of two bytes), in a batch of one short bag before them."""
    generator = torch.Generator().manual_seed(4)
    lengths = [5, 700, 3, 0, 1000, 1, 2, 0]
    ids = torch.randint(0, 900, (sum(lengths),), generator=generator)
    ids[708:1708] = 11
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    wire = torch.randperm(301, generator=generator).tolist()
    routed_alike(Batch(ids, offsets, [1, 0], [4], [*range(0, 900, 3), 900, 0, 900], [300, 1], wire, names="a@t,b@t"))


def refused(batch: Batch) -> None:
    """At once, or by whoever reads what was told."""
    fault = int(exchange.route_ids(*batch)[0][0])
    assert fault, "nobody told"
    reference.raise_fault(fault, batch.ids, batch.offsets, batch.cuts, batch.ranges, batch.names)


def refused_alike(batch: Batch) -> str:
    """What both say."""
    with pytest.raises(InputError) as expected:
        reference._route_ids_reference(*batch)
    with pytest.raises(InputError) as told:
        refused(batch)
    assert str(told.value) == str(expected.value)
    return str(told.value)


@pytest.mark.parametrize("ranges", [1, 2])
@pytest.mark.parametrize("bad", [-1, 4, 2**31 + 1, -(2**63)])
def test_routing_names_the_first_id_outside_its_table(ranges: int, bad: int) -> None:
    batch = Batch(
        torch.tensor([0, 1, bad, bad]), torch.tensor([0, 1, 1, 2, 4]), [0, 1], [2],
        [0, 4] * 2 if ranges == 1 else [0, 2, 4] * 2, [ranges] * 2, range(2 * ranges),
        names="views@items,clicks@items",
    )  # fmt: skip
    assert f"id {bad} of feature 'clicks' (position 2 " in refused_alike(batch)


@pytest.mark.parametrize("each_id", [False, True])
@pytest.mark.parametrize(
    "offsets", [[0, 3, 2], [0, 2**62, 3], [0, -5, 3], [-1, 0, 2], [0, 1, 5], [4, 4, 4], [3, 3, 0], [0, 3, -(2**62)]]
)  # fmt: skip
def test_routing_refuses_offsets_that_fall_or_leave_the_ids(offsets: list[int], each_id: bool) -> None:
    assert "must not fall" in refused_alike(Batch(torch.tensor([0, 1, 2]), torch.tensor(offsets), each_id=each_id))


@pytest.mark.parametrize("each_id", [False, True])
@pytest.mark.parametrize("offsets", [[0, 1, 2], [1, 2, 3], [0, 0, 0]])
def test_routing_refuses_ids_in_no_bag(offsets: list[int], each_id: bool) -> None:
    batch = Batch(torch.tensor([0, 1, 2]), torch.tensor(offsets), each_id=each_id)
    first = f"the first offset is {offsets[0]}"
    assert (first if offsets[0] else f"lengths sum to {offsets[-1]}, but there are 3") in refused_alike(batch)


def test_the_first_fault_is_told_whichever_program_finds_it() -> None:
    """Bad ids of a late route stand early in the batch; offsets come before ids."""
    ids = torch.full((900,), 9)
    offsets = torch.tensor([0, 300, 600, 900])
    batch = Batch(ids, offsets, [2, 1, 1], [1], [0, 10, 0, 9, 0, 4], [1, 1, 1], [0, 1, 2], names="a@t,b@t,c@t")
    assert "id 9 of feature 'b' (position 300 " in refused_alike(batch)
    falling = torch.tensor([0, 300, 299, 900])
    assert "offsets[2] is 299" in refused_alike(batch._replace(offsets=falling))


@pytest.mark.parametrize(("keys", "sizes"), [([0], [3]), ([1], [2]), ([1], [1, 2]), ([0], [-1]), ([2**40], [2])])
def test_routing_refuses_batch_sizes_that_the_offsets_do_not_hold(keys: list[int], sizes: list[int]) -> None:
    refused_alike(Batch(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3]), keys, sizes))


@pytest.mark.parametrize("wrong", [{"wire": [0, 0]}, {"wire": [0]}, {"cuts": [1, 2, 4]}, {"cuts": [0, 3, 2]}], ids=str)
def test_routing_refuses_a_layout_that_contradicts_itself(wrong: dict[str, list[int]]) -> None:
    batch = Batch(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3]))._replace(**wrong)
    with pytest.raises(AssertionError, match="route_ids"):
        exchange.route_ids(*batch)


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


def blocks(seed: int, columns: int, bags: int, aligned: int = 1) -> tuple[Moves, int, int]:
    """Segments of `bags` x `columns`: column blocks, written once or added up; elements of both sides."""
    draw = random.Random(seed)
    moves, slots = Moves(NO_SLOTS, [], [], [], [], [], []), []
    cuts = sorted({0, columns, *(draw.randrange(0, columns + 1, aligned) for _ in range(3))})
    for begin, end in itertools.pairwise(cuts):
        repeats = draw.choice([1, 1, 3])
        for _ in range(repeats):
            own = sorted(draw.sample(range(bags), draw.randint(0, bags)))
            dense = draw.random() < 0.3
            moves.counts.append(draw.randint(0, bags) if dense else len(own))
            moves.widths.append(end - begin)
            moves.slot_starts.append(-1 if dense else len(slots))
            moves.places.append(begin)
            moves.strides.append(columns)
            moves.adds.append(int(repeats > 1 or draw.random() < 0.3))
            slots += [] if dense else own
    size = sum(count * width for count, width in zip(moves.counts, moves.widths, strict=True))
    return moves._replace(slots=torch.tensor(slots, dtype=torch.int32)), bags * columns, size


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("columns", "bags"), [(1, 5), (3, 40), (257, 3), (64, 90), (700, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_placing_and_picking_equal_the_reference(seed: int, columns: int, bags: int, fresh: bool) -> None:
    moves, size, row_size = blocks(seed, columns, bags)
    rows, start = torch.randn(row_size), torch.randn(size)
    wanted, got = start.clone(), start.clone()
    reference._place_rows_reference_(wanted, rows, *moves, fresh)
    exchange.place_rows_(got, rows, *moves, fresh)
    assert torch.equal(got, wanted)
    assert torch.equal(exchange.pick_rows(got, *moves[:-1]), reference._pick_rows_reference(got, *moves[:-1]))


@pytest.mark.parametrize(("starts", "sent"), [([-1, -1], 1), ([-1, 0], 3)])
def test_rows_of_all_bags_are_described_once_and_rows_with_slots_at_every_call(
    monkeypatch: pytest.MonkeyPatch, starts: list[int], sent: int
) -> None:
    uploads: list[object] = []
    monkeypatch.setattr(exchange_rows, "_kept_plan", cached_per_stream(4)(exchange_rows._plan))
    monkeypatch.setattr(
        exchange_rows, "upload", lambda numbers, device: (uploads.append(numbers), upload(numbers, device))[1]
    )
    moves = Moves(torch.tensor([2, 0], dtype=torch.int32), [3, 2], [2, 1], starts, [0, 2], [3, 3], [0, 1])
    for seed in range(3):
        rows = torch.randn(8, generator=torch.Generator().manual_seed(seed))
        wanted, got = torch.ones(9), torch.ones(9)
        reference._place_rows_reference_(wanted, rows, *moves)
        exchange.place_rows_(got, rows, *moves)
        assert torch.equal(got, wanted)
    assert len(uploads) == sent


@pytest.mark.parametrize("away", [0, 1, 2])
def test_the_same_lists_of_rows_that_begin_elsewhere_are_not_read_as_the_first_were(away: int) -> None:
    moves = Moves(NO_SLOTS, [5, 5], [4, 4], [-1, -1], [0, 4], [8, 8], [0, 0])
    exchange.place_rows_(torch.zeros(40), torch.randn(40), *moves)
    rows, wanted, got = torch.randn(44)[away : away + 40], torch.zeros(40), torch.zeros(43)[away : away + 40]
    reference._place_rows_reference_(wanted, rows, *moves)
    exchange.place_rows_(got, rows, *moves)
    assert torch.equal(got, wanted)


def test_picking_is_the_transpose_of_placing() -> None:
    """What autograd gives for rows that are added into place."""
    moves, size, row_size = blocks(5, 12, 9)
    moves = moves._replace(adds=[1] * len(moves.adds))
    rows = torch.randn(row_size, dtype=torch.float64, requires_grad=True)
    out = torch.zeros(size, dtype=torch.float64).index_add(0, elements_of(moves), rows)
    grad = torch.randn(size, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(out, rows, grad)
    assert torch.equal(exchange.pick_rows(grad, *moves[:-1]), wanted)


def elements_of(moves: Moves) -> Tensor:
    slots = moves.slots.tolist()
    return torch.tensor(
        [
            place + (i if start < 0 else slots[start + i]) * stride + c
            for count, width, start, place, stride, _ in zip(*moves[1:], strict=True)
            for i in range(count)
            for c in range(width)
        ]
    )


def test_columns_that_overlap_in_part_are_taken_in_order() -> None:
    moves = Moves(NO_SLOTS, [4, 4, 4], [3, 3, 2], [-1] * 3, [0, 2, 1], [6] * 3, [1, 1, 0])
    rows, wanted = torch.randn(32), torch.ones(24)
    got = wanted.clone()
    reference._place_rows_reference_(wanted, rows, *moves)
    exchange.place_rows_(got, rows, *moves)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("widths", "places", "strides", "waves"),
    [
        ([4, 4, 4], [0, 4, 8], [12] * 3, [0, 0, 0]),
        ([4, 4, 4, 4], [0, 4, 0, 0], [12] * 4, [0, 0, 1, 2]),
        ([4, 4], [0, 40], [4, 4], [0, 0]),
        ([4, 2, 4], [0, 40, 0], [4, 2, 4], [0, 0, 1]),
        ([4, 4], [0, 2], [12, 12], [0, 1]),
        ([4, 4, 4], [0, 10, 4], [12] * 3, [0, 1, 2]),
        ([4, 4], [0, 6], [3, 9], [0, 1]),
        ([8, 12, 8, 8, 4], [0, 16, 44, 44, 60], [8, 12, 8, 8, 8], [0, 0, 0, 1, 0]),
        ([4, 4, 4], [0, 8, 10], [8, 8, 8], [0, 1, 2]),
    ],
    ids=["side by side", "owners of one block", "one feature after another", "of several widths",
         "overlapping columns", "over the end of a row", "overlapping rows",
         "blocks that begin anywhere", "overlapping columns of a later block"],
)  # fmt: skip
def test_segments_that_meet_wait_for_each_other(
    widths: list[int], places: list[int], strides: list[int], waves: list[int]
) -> None:
    assert exchange_rows._wave_of(widths, places, strides) == waves


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.bool, torch.complex64,
     torch.float8_e4m3fn],
    ids=str,
)  # fmt: skip
def test_rows_of_every_type_are_moved_and_added(dtype: torch.dtype) -> None:
    if dtype in (torch.bool, torch.complex64, torch.float8_e4m3fn):
        adds = [0, 0]
    else:
        adds = [0, 1]
    out, rows = torch.arange(12).to(dtype), torch.tensor([20, 21, 22, 23, 7, 8]).to(dtype)
    slots, wanted = torch.tensor([2, 0], dtype=torch.int32), torch.arange(12).to(dtype)
    moves = (slots, [2, 1], [2, 2], [0, -1], [1, 1], [4, 4])
    exchange.place_rows_(out, rows, *moves, adds)
    reference._place_rows_reference_(wanted, rows, *moves, adds)
    assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(
        exchange.pick_rows(out, *moves).view(torch.uint8),
        reference._pick_rows_reference(wanted, *moves).view(torch.uint8),
    )


def test_picking_into_a_part_of_memory_leaves_the_rest_alone() -> None:
    memory, source = torch.full((9,), 77.0), torch.arange(12.0)
    exchange.pick_rows_(memory[2:6], source, NO_SLOTS, [2], [2], [-1], [1], [4])
    assert memory.tolist() == [77, 77, 1, 2, 5, 6, 77, 77, 77]


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


@pytest.mark.parametrize("case", list(BAD_MOVES))
def test_a_segment_outside_its_tensors_is_told_and_not_followed(case: str) -> None:
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
    memory = torch.zeros(30)
    with pytest.raises(AssertionError, match="segment 1 has"):
        exchange.place_rows_(memory[10:19], torch.ones(8), *both)
    assert not memory[:10].any()
    assert not memory[19:].any()


def test_tensors_of_other_types_are_refused() -> None:
    with pytest.raises((RuntimeError, IndexError)):
        exchange.place_rows_(
            torch.zeros(4), torch.ones(2, dtype=torch.float64), NO_SLOTS, [1], [2], [-1], [0], [2], [0]
        )
    out = torch.zeros(4, 4).t()
    with pytest.raises(RuntimeError):
        exchange.place_rows_(out, torch.ones(2), NO_SLOTS, [1], [2], [-1], [0], [2], [0])
    assert not out.any()


# ---------------------------------------------------------------------------------------------------- as compiled


def move_gate(name: str, number: str, width: int, pick: bool = False, adds: bool = False) -> Gate:
    size = {"*i32": 4, "*fp32": 4, "*bf16": 2}[number]
    columns, vec = min(width, 512 // size), 16 // size
    constants = {"PICK": pick, "ADDS": adds, "HALF": size == 2, "ROWS": 4096 // size // columns, "COLUMNS": columns,
                 "VEC": vec}  # fmt: skip
    pointers = {"flat": number, "rows": number, "slots": "*i32", "table": "*i64", "report": "*i64"}
    sizes = dict.fromkeys(["segments", "first_tile", "elements"], "i32")
    return Gate(name, "tilerec.ops.exchange.triton.rows:move_rows", pointers | sizes, constants)


def route_gates() -> list[Gate]:
    deal = dict.fromkeys(["summary", "ids", "offsets", "entries", "layers", "cuts", "wire"], "*i64")
    order = dict.fromkeys(["positions_V", "ids", "order_V", "lower"], "*i64")
    order |= dict.fromkeys(["local_V", "numbers_V", "begun_T", "bags_V"], "*i32")
    number = dict.fromkeys(["lengths_P", "slots_P", "numbers_V", "begun_T"], "*i32")
    places, sizes, tile = {"places_V": "*u8"}, {"items": "i32", "parts": "i32"}, {"TILE": 256}
    module = "tilerec.ops.exchange.triton.route"
    return [
        Gate("deal", f"{module}:deal_items", deal | places | {"bags_V": "*i32"} | dict.fromkeys(
            ["count", "bags", "width", "parts"], "i32"), tile | {"EACH_ID": False, "STEPS": 3}),
        Gate("order", f"{module}:order_items", order | places | {"count": "i32"} | sizes,
             tile | {"WITH_POSITIONS": False}),
        Gate("number", f"{module}:number_bags", number | places | {"summary": "*i64"} | sizes, tile),
    ]  # fmt: skip


@nightly
@pytest.mark.timeout(120)
def test_rows_move_16_bytes_a_lane_and_nothing_spills() -> None:
    moves = [
        move_gate("pick", "*i32", 64, pick=True),
        move_gate("place", "*i32", 128),
        move_gate("add", "*fp32", 128, adds=True),
        move_gate("add halves", "*bf16", 64, adds=True),
    ]
    found = compiled([*moves, *route_gates()])
    for name, gate in found.items():
        assert gate.spilled <= aside(), name
        assert gate.registers <= 192, name
    for gate in moves:
        result = found[gate.name]
        assert result.count("ld.global.v4.b32") == (16 if gate.constants["ADDS"] else 8), gate.name
        assert result.count("st.global.v4.b32") == 8, gate.name
        assert result.count("st.global.b32", "st.global.v2.b32", "st.global.b16") == 0, gate.name
        assert result.shared <= 512, gate.name
