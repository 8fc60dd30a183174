"""Formulas that a price and an instance share, each against numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.cost.model import (
    DEVICE,
    HOST,
    KEY_BYTES,
    NETWORK_STAGES,
    STAGE_OF_NETWORK,
    STAGES,
    Model,
)
from tilerec.planner.cost.workload import Reads, Skew, TableWork, Workload
from tilerec.sharding.distinct_ids import largest_percent
from tilerec.spec import optimizer as specs
from tilerec.spec.plan import Wire
from tilerec.spec.speeds import PER_WIDTH, SINGLE, Speeds
from tilerec.spec.table import DataType
from tilerec.spec.topology import Topology

SGD, ADAGRAD, ROWWISE = specs.SGD(0.1), specs.Adagrad(0.1), specs.RowWiseAdagrad(0.1)
ALL = np.array([0])


def model_of(*tables: TableWork, topology: Topology | None = None, **how: Any) -> Model:
    return Model(Workload(tables), topology or Topology(4, "cpu"), **how)


def one(found: Any) -> float:
    [number] = np.asarray(found, np.float64).reshape(-1).tolist()
    return float(number)


# ---------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize(
    ("optimizer", "data_type", "row"),
    [
        (SGD, DataType.FP32, 8 * 4),
        (ADAGRAD, DataType.FP32, 8 * (4 + 4)),
        (ADAGRAD, DataType.FP16, 8 * (2 + 4)),
        (ROWWISE, DataType.FP32, 8 * 4 + 4),
        (ADAGRAD, DataType.FP64, 8 * (8 + 8)),
        (ROWWISE, DataType.FP64, 8 * 8 + 8),
        (None, DataType.BF16, 8 * (2 + 2)),  # a dense gradient
    ],
)
def test_a_row_takes_its_cells_and_their_state(optimizer: Any, data_type: DataType, row: int) -> None:
    model = model_of(TableWork("t", 100, 16, data_type, optimizer))
    assert one(model.weights(ALL, 10.0, 8.0)) == 10 * row


@pytest.mark.parametrize(
    ("factor", "rows", "bags", "lines"),
    [
        (0.1, 1000, 1.0, 128),  # 100 rows in sets of 32
        (0.1, 960, 1.0, 96),
        (0.0, 1000, 1.0, 4.0),  # the spare ones of four ranks' ids
        (0.1, 1000, 1e9, 1000),  # a step reads every row
    ],
)
def test_a_cache_has_lines_in_sets_and_spare_ones_for_a_step(
    factor: float, rows: int, bags: float, lines: float
) -> None:
    """17 bytes a line beside its row and state; 4 bytes a row of the table."""
    table = TableWork("t", rows, 8, optimizer=ADAGRAD, reads=[Reads(bags)], cached=True, load_factor=factor)
    model = model_of(table, topology=Topology(4))
    found = one(model.lines(ALL, float(rows), 8.0))
    assert found == pytest.approx(lines * (8 * 8 + 17) + 4 * rows, rel=0.002)


def test_half_of_a_tables_rows_have_the_spare_lines_of_half_a_step() -> None:
    table = TableWork("t", 1000, 8, optimizer=SGD, reads=[Reads(1e9)], cached=True, load_factor=0.1)
    model = model_of(table, topology=Topology(4))
    assert one(model.lines(ALL, 500.0, 4.0)) == pytest.approx(500 * (4 * 4 + 17) + 4 * 500)


def test_missed_rows_come_from_the_host_and_as_many_go_back() -> None:
    """Every row that is read is missed without lines: each with its state, twice, at 1e6 bytes per second."""
    table = TableWork("t", 10**6, 8, optimizer=ROWWISE, reads=[Reads(10)], cached=True, load_factor=0.0)
    model = model_of(table, topology=Topology(4, hbm_to_ddr_mem_bw=1e3))
    missed = one(model.all_distinct)
    assert missed == pytest.approx(40, rel=1e-3)
    assert one(model.missed) == missed
    half = one(model.missed_in(ALL, np.array([200_000]), np.array([700_000])))
    assert half == pytest.approx(missed * 0.5)
    assert one(model.fetched(ALL, half, 8.0)) == pytest.approx(missed * 0.5 * 2 * (8 * 4 + 4) / 1e6)


@pytest.mark.parametrize(
    ("wire", "data_type", "forward", "backward"),
    [
        (Wire(), DataType.FP32, 32, 32),
        (Wire("fp16", "bf16"), DataType.FP32, 16, 16),
        (Wire("int8", "fp8"), DataType.FP32, 12, 12),
        (Wire("bf16", "fp32"), DataType.FP64, 16, 64),  # sums of fp64 travel as they are
        (Wire("int8", "bf16"), DataType.FP64, 12, 16),
    ],
)
def test_a_row_of_eight_columns_takes_these_bytes_on_the_wire(
    wire: Wire, data_type: DataType, forward: int, backward: int
) -> None:
    model = model_of(TableWork("t", 100, 16, data_type, SGD, wire=wire))
    assert one(model.wire(ALL, 8, backward=False)) == forward
    assert one(model.wire(ALL, 8, backward=True)) == backward


def test_memory_lies_in_the_tier_of_the_device() -> None:
    assert (DEVICE, HOST, KEY_BYTES) == (0, 1, 16)
    table = TableWork("t", 100, 16)
    assert model_of(table).tier == HOST
    assert model_of(table, topology=Topology(4)).tier == DEVICE
    assert (model_of(table).depth, model_of(table, pipeline_depth=3).depth) == (1, 3)


# ---------------------------------------------------------------------------------------------------- a step


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_collective_takes_longer_for_each_rank_beyond_two(ranks: int) -> None:
    speeds = default_speeds(Topology(ranks, "cpu"))
    model = model_of(TableWork("t", 100, 16), topology=Topology(ranks, "cpu"))
    assert model.call == pytest.approx(speeds.call + speeds.call_peer * {1: 0, 2: 0, 3: 1, 8: 6}[ranks])


def test_stages_between_hosts_are_those_of_cards_that_ranks_share() -> None:
    table = TableWork("t", 100, 16)
    shared = Topology(4, local_world_size=2, nic="host")
    assert model_of(table, topology=shared).stages == STAGES + NETWORK_STAGES
    for topology in (Topology(4, nic="host"), Topology(4, local_world_size=2, nic="device")):
        assert model_of(table, topology=topology).stages == STAGES
    assert list(STAGE_OF_NETWORK.values()) == ["ids", "rows", "gradients", "update"]
    assert all(name == f"{stage} between hosts" for name, stage in STAGE_OF_NETWORK.items())


def cached_bytes(topology: Topology, cache: int) -> Topology:
    return dataclasses.replace(topology, speeds=dataclasses.replace(default_speeds(topology), cache=cache))


def test_what_a_step_touches_stays_near_as_far_as_the_cache_goes() -> None:
    """Two tables of 100 rows that are read whole, 8 x (4 + 4) and 4 x 4 bytes each: 8000 bytes over 4 ranks."""
    tables = [
        TableWork("a", 100, 8, optimizer=ADAGRAD, reads=[Reads(1e6)]),
        TableWork("b", 100, 4, optimizer=SGD, reads=[Reads(1e6)]),
    ]
    for cache, resident in ((500, 0.25), (2000, 1.0), (4000, 1.0), (0, 0.0)):
        topology = cached_bytes(Topology(4), cache)
        model = model_of(*tables, topology=topology)
        assert model.resident == pytest.approx(resident)
        beside = Model(Workload(tables[:1]), topology, beside=Workload(tables[1:]))
        assert beside.resident == pytest.approx(resident)
        # All rows are touched again in every step.
        assert model.lookup_far(np.array([0, 1]), 100.0).tolist() == pytest.approx([100 * (1 - resident)] * 2)
        assert float(model.update_far(100.0)) == pytest.approx(100 * (1 - resident))


def test_rows_that_the_step_before_did_not_touch_are_far_however_large_the_cache() -> None:
    """Of 10^9 rows none is read twice; of a table that is not read there is nothing to keep."""
    topology = cached_bytes(Topology(4), 1 << 40)
    model = model_of(TableWork("t", 10**9, 8, optimizer=SGD, reads=[Reads(10)]), topology=topology)
    assert model.resident == 1.0
    assert one(model.lookup_far(ALL, 40.0)) == pytest.approx(40.0, rel=1e-6)
    assert float(model.update_far(40.0)) == 0.0
    unread = model_of(TableWork("t", 100, 8, optimizer=SGD, reads=[]), topology=topology)
    assert unread.resident == 1.0
    assert unread.again.tolist() == [0.0]


# ---------------------------------------------------------------------------------------------------- copies

RATES = dict.fromkeys(PER_WIDTH, (1.0, 1.0)) | {"update_bag": (17.0, 17.0), "update_id": (13.0, 13.0),
                                                 "pick": (23.0, 23.0)}  # fmt: skip
SPEEDS = Speeds(**RATES, **dict.fromkeys(SINGLE, 0.0), widths=(8, 16), cache=0)  # type: ignore[arg-type]
FOUR = Topology(4, speeds=SPEEDS)


@pytest.mark.parametrize(
    ("work", "form"),
    [
        # 3 features of 10, 10 and (half of them empty) 5 bags; 20 + 10 + 5 ids.
        (TableWork("t", 10**6, 8, optimizer=SGD, reads=[Reads(10, 2), Reads(10, 1), Reads(10, 0.5)]), 0),
        (TableWork("t", 10**6, 8, optimizer=SGD, reads=[Reads(10, 1, True)]), 1),
        (TableWork("t", 3, 8, optimizer=SGD, reads=[Reads(10, 2)]), 2),
        (TableWork("t", 10**6, 8, reads=[Reads(10, 2)]), 3),
    ],
    ids=["bags", "rows", "dense", "no optimizer"],
)
def test_an_update_of_copies_sorts_what_all_ranks_send(work: TableWork, form: int) -> None:
    """Ids and bags of all ranks; or rows of all ranks; or each row that any rank read."""
    model = model_of(work, topology=FOUR)
    found = model.replicas(ALL)
    assert int(found.form[0]) == form
    own, everyone = one(model.seen(1).whole), one(model.all_distinct)
    ids = {0: 4 * 35.0, 1: 4 * own, 2: everyone, 3: everyone}[form]
    assert one(found.ids) == pytest.approx(ids)
    assert one(found.bags) == pytest.approx(4 * 25.0 if form == 0 else ids)
    assert one(found.row_numbers) == 0.0  # they travel with the other counts
    if form == 0:
        assert one(found.numbers) == pytest.approx(4 * (2 * 3 + 25 + 35))
        assert one(found.gradients) == pytest.approx(4 * 8 * 25)
        assert one(found.seconds) == pytest.approx(25 * 23)


@pytest.mark.parametrize(
    ("data_type", "wide", "cell"), [(DataType.FP32, 4, 4), (DataType.BF16, 4, 2), (DataType.FP64, 8, 8)]
)
def test_gradients_of_copies_travel_as_sums_and_dense_ones_as_weights(
    data_type: DataType, wide: int, cell: int
) -> None:
    bags = TableWork("bags", 10**6, 8, data_type, SGD, [Reads(10, 2)])
    dense = dataclasses.replace(bags, name="dense", rows=3)
    bare = dataclasses.replace(dense, name="bare", optimizer=None)
    found = model_of(bags, dense, bare, topology=FOUR).replicas(np.array([0, 1, 2]))
    assert found.form.tolist() == [0, 2, 3]
    assert found.gradients.tolist() == [10 * 8 * wide, 0, 0]
    assert found.reduced.tolist() == [0, 9 * 3 * wide, 8 * 3 * cell]
    assert found.sent.tolist() == [found.numbers[0] + 80 * wide + 32, 32, 0]


@pytest.mark.parametrize(("rows", "word"), [((1 << 31) - 1, 4), (1 << 31, 8)])
def test_numbers_of_a_table_of_two_to_the_31_rows_take_eight_bytes(rows: int, word: int) -> None:
    found = model_of(TableWork("t", rows, 8, optimizer=SGD, reads=[Reads(10, 2)]), topology=FOUR).replicas(ALL)
    assert one(found.numbers) == word * (2 + 10 + 20)
    weighted = TableWork("t", rows, 8, optimizer=SGD, reads=[Reads(10, 2, True)])
    assert one(model_of(weighted, topology=FOUR).replicas(ALL).numbers) == pytest.approx(word * 20, rel=1e-6)


def bytes_of_forms(ranks: int, rows: int, dim: int, bags: float, ids: float) -> list[float]:
    """Bytes from all ranks together: bags and ids, rows, everything, dense gradients (not a choice), shares."""
    pairs = ranks * (ranks - 1)
    touched = min(ids, rows)
    return [
        pairs * (4 * dim * bags + 4 * ids),
        pairs * (4 * dim + 4) * min(ids, rows),
        2 * (ranks - 1) * 4 * (dim + 1) * rows,
        float("inf"),
        (ranks - 1) * (4 * dim + 4) * (touched + rows * (1 - (1 - touched / rows) ** ranks)),
    ]


@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize("rows", [20, 200, 600, 5000])
@pytest.mark.parametrize("length", [1.0, 2.0, 30.0])
def test_copies_agree_in_the_form_that_sends_least(ranks: int, rows: int, length: float) -> None:
    for dim in (1, 8, 64):
        table = TableWork("t", rows, dim, optimizer=SGD, reads=[Reads(50, length)])
        found = model_of(table, topology=Topology(ranks, "cpu")).replicas(ALL)
        sizes = bytes_of_forms(ranks, rows, dim, 50.0, 50 * length)
        # A dense sum is one message: it is taken if shares send as much.
        assert sizes[int(found.form[0])] == min(sizes)
        assert int(found.form[0]) != 4 or sizes[4] < min(sizes[:3])


def test_rows_missed_are_those_of_the_caches_of_ranges() -> None:
    """Ids numbered by frequency: a step reads half of the first rows' lines, and few of the others'."""
    skew = Skew(1000, 1.2, ordered=True)
    table = TableWork("t", 1000, 8, optimizer=SGD, reads=[Reads(100)], skew=skew, cached=True, load_factor=0.6)
    model = model_of(table, topology=Topology(2))
    r0, r1 = np.array([0, 100]), np.array([100, 1000])
    found = model.missed_in(np.array([0, 0]), r0, r1)
    read = model.seen(2).between(np.array([0, 0]), r0, r1)
    assert 0.1 < found[0] / read[0] < 0.6
    assert 0.05 < found[1] / read[1] < 0.9
    none = dataclasses.replace(table, load_factor=0.0)
    assert model_of(none, topology=Topology(2)).missed_in(np.array([0, 0]), r0, r1) == pytest.approx(read)


def test_the_rule_for_repeated_ids_is_the_runtimes() -> None:
    """93 % of the ids are distinct at most where all rows are elsewhere, 86 % where half are; never where none is."""
    works = [
        TableWork("t", 2000, 8, reads=[Reads(1000), Reads(1000, 2.0), Reads(1000, 1.0, True), Reads(100, 0.5)]),
        TableWork("each", 2000, 8, reads=[Reads(500, 2.0, True)], each_id=True),
        TableWork("never", 2000, 8, reads=[Reads(1000)], wire=Wire(distinct=False)),
        TableWork("always", 10**6, 8, reads=[Reads(1000)], wire=Wire(distinct=True)),
    ]
    every = np.arange(7)
    model = Model(Workload(works), Topology(4, "cpu"))
    share = model.seen_by_feature.whole / model.workload.bags
    assert share[0] == pytest.approx(2 * (1 - np.exp(-0.5)), rel=1e-3)
    # Bags without an id count as items, as in the runtime.
    assert model.sent_once(every, 1.0).tolist() == [True, False, False, True, True, False, True]
    assert model.sent_once(every, 0.1).tolist() == [False, False, False, False, False, False, True]
    assert model.sent_once(every, 0.0).tolist() == [False] * 7
    gpu = Model(Workload(works), Topology(4))
    assert gpu.sent_once(every, 1.0).tolist() == [False] * 6 + [True]
    shares = np.array([0.05, 0.3, 0.34])
    assert model.sent_once(np.zeros(3, np.int64), shares).tolist() == [
        100 * share[0] <= largest_percent(remote, None) for remote in shares
    ]
