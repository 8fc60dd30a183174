"""What travels: what some ranks send others receive, and headers and ids are those of the page, byte for byte."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tilerec.planner.cost.model import Model
from tilerec.planner.cost.price import price
from tilerec.planner.cost.travel import Travel
from tilerec.planner.cost.workload import Reads, TableWork, Workload
from tilerec.sharding.distinct_ids import DistinctIds
from tilerec.sharding.layout import ExchangeLayout, SlotRead, TableLayout
from tilerec.sharding.strategies import complete
from tilerec.spec import optimizer as specs
from tilerec.spec.plan import ParameterSharding, Wire
from tilerec.spec.table import DataType
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

SGD = specs.SGD(0.1)
BAGS = 100.0


def table(name: str, length: float = 1.0, **about: Any) -> TableWork:
    """A table whose ids travel with all repetitions."""
    wire = dataclasses.replace(about.pop("wire", Wire()), distinct=False)
    return TableWork(name, 400, 16, optimizer=SGD, reads=[Reads(BAGS, length)], wire=wire, **about)


def tiling_of(kind: str, ranks: list[int] | None, topology: Topology) -> Tiling:
    found = complete(ParameterSharding(kind, ranks=ranks), "t", 400, 16, topology).tiling
    assert found is not None
    return found


def travel(works: list[TableWork], tilings: list[Tiling], topology: Topology) -> Travel:
    return Travel(tilings, Model(Workload(works), topology))


TWO = Topology(4, "cpu", local_world_size=2)
UNLIKE = Topology(5, "cpu", hosts=[[0, 3], [1, 2, 4]])
FREE = Tiling.of(
    "t", 400, 16,
    [(0, 100, 0, 16, (0, 1)), (100, 300, 0, 8, 2), (100, 300, 8, 16, (1, 3)), (300, 400, 0, 16, (0, 1, 2, 3))],
)  # fmt: skip


@pytest.mark.parametrize("topology", [Topology(4, "cpu"), TWO, UNLIKE], ids=str)
def test_what_is_sent_is_received_and_what_leaves_a_host_comes_to_another(topology: Topology) -> None:
    kinds: list[Any] = [
        ("table_wise", [1]),
        ("column_wise", [0, 2]),
        ("row_wise", None),
        ("row_wise", [3, 0, 1]),
    ]
    if topology.host_count > 1:
        kinds += [("table_row_wise", [2, 3] if topology is TWO else [1, 2, 4])]
    if topology is TWO:
        kinds += [("grid_shard", None)]
    works = [table(f"t{i}", 1 + 3 * (i % 2)) for i in range(len(kinds) + 2)]
    tilings = [tiling_of(*kind, topology) for kind in kinds] + [FREE, tiling_of("row_wise", None, topology)]
    works[-1] = dataclasses.replace(works[-1], sums_in_hosts=True, wire=Wire("bf16", "int8"))
    found = travel(works, tilings, topology)
    assert {"header", "ids", "rows", "gradients"} <= set(found.sent)
    assert ("rows in host" in found.sent) == (topology.host_count > 1)
    for name, sent in found.sent.items():
        received = found.received[name]
        assert sent.sum() == pytest.approx(received.sum()), name
        assert np.all(sent >= 0), name
        far = found.line(found.far, name)
        assert far.sum() == pytest.approx(found.line(found.far_received, name).sum()), name
        assert np.all(far <= sent + 1e-6), name
        assert (far.sum() > 0) == (topology.host_count > 1 and "in host" not in name), name
    if topology.host_count > 1:  # gradients take the way back
        back, there = found.sent["gradients in host"], found.received["rows in host"]
        assert back.tolist() == pytest.approx(there.tolist())


def test_a_header_has_four_bytes_and_eight_for_each_part_of_its_receiver() -> None:
    """Rank 1 holds a table, ranks 0 and 2 a block of columns each."""
    works = [table("a"), table("b")]
    tilings = [tiling_of("table_wise", [1], TWO), tiling_of("column_wise", [0, 2], TWO)]
    found = travel(works, tilings, TWO)
    to = np.array([4 + 8, 4 + 8, 4 + 8, 4.0])  # bytes to each rank from each other
    assert found.sent["header"].tolist() == [to.sum() - to[rank] for rank in range(4)]
    assert found.received["header"].tolist() == [3 * each for each in to]
    away = [to[2] + to[3]] * 2 + [to[0] + to[1]] * 2
    assert found.far["header"].tolist() == away
    assert found.far_received["header"].tolist() == [2 * each for each in to]


def test_a_sum_inside_a_host_adds_a_word_and_one_for_each_member_to_headers_from_other_hosts() -> None:
    """Half of the rows on each rank of host 0: rank 0 sums for rank 2, rank 1 for rank 3."""
    found = travel([table("t", 4.0)], [tiling_of("table_row_wise", [0, 1], TWO)], TWO)
    part, sums = 4 + 8, 4 * (1 + 2)
    # A home sends its own host 4 bytes for each rank, its proxy the words of the sum.
    assert found.sent["header"].tolist() == [part + 8, part + 8, 2 * part + 4 + sums, 2 * part + 4 + sums]
    assert found.far["header"].tolist() == [8, 8, 2 * part + sums, 2 * part + sums]
    assert found.received["header"].tolist() == [3 * part + sums, 3 * part + sums, 12, 12]
    assert found.far_received["header"].tolist() == [2 * part + sums, 2 * part + sums, 8, 8]


def test_rows_are_added_up_on_the_proxy_of_a_home_before_they_leave() -> None:
    """Four ids per bag: 15/16 of the bags have one in a half of the rows; each bag is in the sum."""
    found = travel([table("t", 4.0)], [tiling_of("table_row_wise", [0, 1], TWO)], TWO)
    row, member = 64.0, BAGS * (1 - 1 / 16)
    inner, union = member * row, BAGS * row
    positions = 2 * 4 * member  # of both members, since each has fewer bags than the sum
    ids = (4 * BAGS / 2) * 4 + 4 * member
    # In their own host: each other's part. To another: one sum each.
    assert found.sent["rows"].tolist() == pytest.approx([inner + union, inner + union, 0, 0])
    assert found.received["rows"].tolist() == pytest.approx([inner, inner, union, union])
    assert found.far["rows"].tolist() == pytest.approx([union, union, 0, 0])
    assert found.sent["rows in host"].tolist() == pytest.approx([inner, inner, 0, 0])
    assert found.received["gradients in host"].tolist() == pytest.approx([inner, inner, 0, 0])
    assert found.sent["ids"].tolist() == pytest.approx([ids, ids, 2 * ids + positions, 2 * ids + positions])
    assert found.received["ids"].tolist() == pytest.approx([3 * ids + positions, 3 * ids + positions, 0, 0])
    [proxied] = found.proxied
    assert proxied.homes.tolist() == [False, False, True, True]
    assert proxied.turns.tolist() == [1, 1, 0, 0]
    assert [*proxied.width, *proxied.members, *proxied.written] == pytest.approx([16, 2 * member, BAGS])
    assert found.calls == 6


def test_members_that_have_all_of_a_sums_bags_get_no_positions() -> None:
    """Of 30 ids, 2^-30 of the bags have none in a half."""
    found = travel([table("t", 30.0)], [tiling_of("table_row_wise", [0, 1], TWO)], TWO)
    ids = 15 * BAGS * 4 + 4 * BAGS
    assert found.received["ids"].tolist() == pytest.approx([3 * ids, 3 * ids, 0, 0])


@pytest.mark.parametrize(
    ("length", "weighted", "data_type", "each"),
    [
        (1.0, False, DataType.FP32, 4.0),
        (1.0, True, DataType.FP32, 8.0),
        (1.0, True, DataType.FP64, 12.0),  # weights are of the sums' type
        (2.0, False, DataType.FP32, 2 * 4 + 4.0),  # lengths
        (1.004, False, DataType.FP32, 1.004 * 4),  # less than half an id more than bags
        (1.006, False, DataType.FP32, 1.006 * 4 + 4),
        (0.25, False, DataType.FP32, 1.0),
    ],
)
def test_an_id_takes_four_bytes_its_weight_a_cell_and_bags_of_several_a_length(
    length: float, weighted: bool, data_type: DataType, each: float
) -> None:
    work = TableWork("t", 400, 16, data_type, SGD, [Reads(BAGS, length, weighted)], wire=Wire(distinct=False))
    found = travel([work], [tiling_of("table_wise", [1], TWO)], TWO)
    assert found.sent["ids"].tolist() == pytest.approx([BAGS * each, 0, BAGS * each, BAGS * each])


def test_half_an_id_more_than_bags_needs_no_lengths() -> None:
    work = TableWork("t", 400, 16, optimizer=SGD, reads=[Reads(128, 1 + 1 / 256)])  # 128.5 ids
    found = travel([work], [tiling_of("table_wise", [1], TWO)], TWO)
    assert found.sent["ids"][0] == 4 * 128.5
    assert Workload([work]).present(1.0)[2].tolist() == [0.0]


@pytest.mark.parametrize(("rows", "bytes_of_id"), [((1 << 31) - 1, 4), (1 << 31, 8), (1 << 33, 8)])
def test_ids_of_a_range_of_two_to_the_31_rows_take_eight_bytes(rows: int, bytes_of_id: int) -> None:
    work = TableWork("t", rows, 16, optimizer=SGD, reads=[Reads(BAGS)])
    for low in (0, 50):
        tiles = [(0, rows, 0, 16, 1)] if low == 0 else [(0, low, 0, 16, 0), (low, rows + low, 0, 16, 1)]
        tiling = Tiling.of("t", rows + low, 16, tiles)
        found = travel([dataclasses.replace(work, rows=rows + low)], [tiling], TWO)
        assert found.received["ids"][1] == pytest.approx(3 * BAGS * bytes_of_id, rel=1e-6)


def test_a_tile_with_two_owners_is_read_where_it_is_near() -> None:
    """Hosts 0, 3 and 1, 2, 4. Rows on 0 and 1: 3 reads from 0, and 2 and 4 from 1: nothing leaves a host."""
    tiling = Tiling.of("t", 400, 16, [(0, 400, 0, 16, (0, 1))])
    found = travel([table("t")], [tiling], UNLIKE)
    row, ids = 64 * BAGS, 4 * BAGS
    assert found.received["ids"].tolist() == [ids, 2 * ids, 0, 0, 0]
    assert found.sent["ids"].tolist() == [0, 0, ids, ids, ids]
    assert found.sent["rows"].tolist() == [row, 2 * row, 0, 0, 0]
    assert not found.far["rows"].any()
    assert not found.far_received["ids"].any()
    apart = Tiling.of("t", 400, 16, [(0, 400, 0, 16, (1, 2))])  # homes 0 and 3 read from 1 and 2, 4 from 1
    found = travel([table("t")], [apart], UNLIKE)
    assert found.far["ids"].tolist() == [ids, 0, 0, ids, 0]
    assert found.far_received["ids"].sum() == 2 * ids
    assert found.received["ids"].sum() == 3 * ids
    assert found.far["rows"].sum() == 2 * row


def test_copies_on_all_ranks_are_read_at_home() -> None:
    found = travel([table("t")], [tiling_of("data_parallel", None, TWO)], TWO)
    assert found.sent["header"].tolist() == [12.0] * 4
    assert found.far["header"].tolist() == [8.0] * 4
    assert found.calls == 1
    assert set(found.sent) == {"header"}


def test_a_workload_without_tables_sends_headers() -> None:
    found = travel([], [], TWO)
    assert found.sent["header"].tolist() == [12.0] * 4
    assert price([], Model(Workload([]), TWO)).seconds > 0


@pytest.mark.parametrize(
    ("data_type", "wire", "forward", "backward"),
    [
        (DataType.FP32, Wire(), 64, 64),
        (DataType.FP64, Wire(), 128, 128),
        (DataType.FP64, Wire("bf16", "fp32"), 32, 128),
        (DataType.FP32, Wire("int8", "fp16"), 20, 32),
    ],
)
def test_a_row_of_sixteen_columns_takes_the_bytes_of_its_number_format(
    data_type: DataType, wire: Wire, forward: int, backward: int
) -> None:
    work = TableWork("t", 400, 16, data_type, SGD, [Reads(BAGS)], wire=dataclasses.replace(wire, distinct=False))
    found = travel([work], [tiling_of("table_wise", [1], TWO)], TWO)
    assert found.sent["rows"].tolist() == [0, 3 * BAGS * forward, 0, 0]
    assert found.received["gradients"].tolist() == [0, 3 * BAGS * backward, 0, 0]


def runtime_rule(works: list[TableWork], tilings: list[Tiling], topology: Topology, rank: int) -> list[int]:
    """The largest percentages of distinct ids of one rank, as the runtime computes them from its layout."""
    tables = [TableLayout(w.name, t, w.fan_in, w.wire) for w, t in zip(works, tilings, strict=True)]
    slots = [SlotRead(t, f"{t}.{f}") for t, work in enumerate(works) for f in range(len(work.reads))]
    return DistinctIds(ExchangeLayout(tables, slots, topology, rank), each_id=False)._percents


@pytest.mark.parametrize("topology", [Topology(4, "cpu"), TWO, UNLIKE], ids=str)
@pytest.mark.parametrize("distinct", [None, True, False])
def test_homes_send_ids_once_by_the_runtimes_rule(topology: Topology, distinct: bool | None) -> None:
    """By each home's own share of remote cells, under any tiling, for batches with few and with many repetitions."""
    halves = Tiling.of("t", 400, 16, [(0, 200, 0, 16, 1), (200, 400, 0, 8, 0), (200, 400, 8, 16, (2, 3))])
    tilings = [FREE, halves, *(tiling_of(*kind, topology) for kind in [("table_wise", [1]), ("row_wise", None),
               ("column_wise", [0, 2]), ("data_parallel", None)])]  # fmt: skip
    every = range(topology.world_size)
    for bags in (20.0, 60.0, 110.0, 130.0, 400.0):
        works = [
            TableWork(
                f"t{i}", 400, 16, optimizer=SGD, reads=[Reads(bags), Reads(2 * bags)], wire=Wire(distinct=distinct)
            )
            for i in range(len(tilings))
        ]
        found = travel(works, tilings, topology)
        seen = found.model.seen_by_feature.whole
        percents = [runtime_rule(works, tilings, topology, rank) for rank in every]
        unusual = set(zip(found.unusual.part.tolist(), found.unusual.home.tolist(), strict=True))
        for p, part in enumerate(found.layout.parts):
            for rank in every:
                percent = percents[rank][part.slot]
                wanted = percent > 0 and 100 * seen[part.slot] <= found.work.bags[part.slot] * percent
                assert (bool(found.once[p]) != ((p, rank) in unusual)) == wanted, (part, rank)
