"""Predicted bytes are those that the runtime sends, name by name; seconds and memory follow the formulas."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tilerec.comms.group import Group
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.rowwise_adagrad import RowWiseAdagrad
from tilerec.parallel.shard import shard
from tilerec.parallel.traffic import traffic
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.price import PARTS, Price, price
from tilerec.planner.cost.workload import Reads, Skew, TableWork, Workload
from tilerec.sharding.replicas import MOST_COPIES
from tilerec.sharding.strategies import complete
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec import optimizer as specs
from tilerec.spec.plan import ParameterSharding, Wire
from tilerec.spec.speeds import Speeds
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

BATCH = 400


def ids_of(work: TableWork, count: int, generator: torch.Generator) -> torch.Tensor:
    """Independent ids: even over all rows, or by Zipf's law, whose frequent ids are anywhere or numbered first."""
    if work.skew is None:
        return torch.randint(work.rows, (count,), generator=generator)
    weights = torch.arange(1, work.skew.distinct + 1, dtype=torch.float64) ** -work.skew.exponent
    ids = torch.multinomial(weights, count, replacement=True, generator=generator)
    if work.skew.ordered:
        return ids
    return torch.randperm(work.rows, generator=torch.Generator().manual_seed(len(work.name)))[ids]


def step_bytes(
    works: list[TableWork], tilings: list[Tiling], topology: Topology, rule: Any = torch.optim.SGD
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Bytes that each rank sent in one step of bags of one size, by name: in all, and between hosts.

    Tables are those of sequences if all have `each_id`.
    """
    each_id = all(work.each_id for work in works)

    def run(group: Group) -> tuple[dict[str, int], dict[str, int]]:
        torch.manual_seed(0)
        shapes = [(w.rows, w.dim, w.name, [f"{w.name}.{i}" for i in range(len(w.reads))]) for w in works]
        model: Any
        if each_id:
            model = EmbeddingCollection([EmbeddingConfig(r, d, n, feature_names=f) for r, d, n, f in shapes])
        else:
            model = EmbeddingBagCollection([EmbeddingBagConfig(r, d, n, feature_names=f) for r, d, n, f in shapes])
        if rule is not None:
            apply_optimizer_in_backward(rule, model.parameters(), {"lr": 0.1})
        plan = {
            w.name: ParameterSharding(
                "explicit", "fused_uvm_caching" if w.cached else None, tiling=t, ids_per_bag=w.ids_per_bag, wire=w.wire
            )
            for w, t in zip(works, tilings, strict=True)
        }
        shard(model, plan=plan, mesh=group, topology=topology)
        generator = torch.Generator().manual_seed(group.rank)
        values, lengths, keys = [], [], []
        for work in works:
            for i, reads in enumerate(work.reads):
                keys.append(f"{work.name}.{i}")
                bags = torch.full((int(reads.bags),), int(reads.ids_per_bag), dtype=torch.int32)
                lengths.append(bags)
                values.append(ids_of(work, int(bags.sum()), generator))
        batch = KeyedJaggedTensor(keys, torch.cat(values), lengths=torch.cat(lengths))
        counted = traffic(model)
        counted.reset()
        found = model(batch)
        (torch.cat([own.values() for own in found.values()]) if each_id else found.values()).sum().backward()
        return {line.name: line.total for line in counted}, counted.between(topology.host_ranks)

    results = run_virtual_ranks(topology.world_size, run)
    names = dict.fromkeys(name for result, _ in results for name in result)
    totals = {name: [result.get(name, 0) for result, _ in results] for name in names}
    return totals, {name: [far.get(name, 0) for _, far in results] for name in names}


def tilings_of(works: list[TableWork], kinds: list[Any], topology: Topology) -> list[Tiling]:
    made = []
    for work, kind in zip(works, kinds, strict=True):
        sharding = kind if isinstance(kind, Tiling) else ParameterSharding(kind[0], ranks=kind[1])
        tiling = complete(sharding, work.name, work.rows, work.dim, topology).tiling
        assert tiling is not None
        made.append(tiling)
    return made


def check(
    works: list[TableWork], kinds: list[Any], topology: Topology, rule: Any = torch.optim.SGD, rough: float = 0.05
) -> None:
    """Predicted bytes are counted bytes, rank by rank, but for the draws of ids."""
    tilings = tilings_of(works, kinds, topology)
    predicted = price(tilings, Model(Workload(works), topology))
    sent, far = step_bytes(works, tilings, topology, rule)
    assert {n for n, v in sent.items() if any(v)} == {n for n, v in predicted.sent.items() if np.any(v > 0)}
    # Of ids that are drawn, all but headers is what is to be expected.
    assert predicted.sent["header"].tolist() == sent["header"]
    assert predicted.between_hosts["header"].tolist() == far["header"]
    for name, counted in sent.items():
        assert predicted.sent[name] == pytest.approx(counted, rel=rough, abs=64), name
        assert predicted.between_hosts[name] == pytest.approx(far[name], rel=rough, abs=64), name


def sent_once(works: list[TableWork], distinct: bool | None) -> list[TableWork]:
    return [dataclasses.replace(work, wire=dataclasses.replace(work.wire, distinct=distinct)) for work in works]


SGD = specs.SGD(0.1)
WORKS = [
    TableWork("whole", 500, 16, optimizer=SGD, reads=[Reads(BATCH, 1)]),
    TableWork("columns", 300, 16, optimizer=SGD, reads=[Reads(BATCH, 3), Reads(BATCH, 1)]),
    TableWork("rows", 400, 8, optimizer=SGD, reads=[Reads(BATCH, 6)]),
    TableWork("single", 400, 8, optimizer=SGD, reads=[Reads(BATCH, 1)]),
]
KINDS = [("table_wise", [1]), ("column_wise", [0, 2]), ("row_wise", None), ("row_wise", [3, 0, 1])]


DISTINCT = pytest.mark.parametrize("distinct", [None, True, False], ids=["counted", "once", "each"])


@DISTINCT
def test_bytes_of_one_host_are_those_the_runtime_sends(distinct: bool | None) -> None:
    check(sent_once(WORKS, distinct), KINDS, Topology(4, "cpu"))


@DISTINCT
def test_bytes_of_two_hosts_are_those_the_runtime_sends(distinct: bool | None) -> None:
    works = [*WORKS, TableWork("host", 400, 8, optimizer=SGD, reads=[Reads(BATCH, 5), Reads(BATCH, 1)]),
             TableWork("grid", 400, 16, optimizer=SGD, reads=[Reads(BATCH, 2)])]  # fmt: skip
    kinds = [*KINDS, ("table_row_wise", [2, 3]), ("grid_shard", [0, 1, 2, 3])]
    check(sent_once(works, distinct), kinds, Topology(4, "cpu", local_world_size=2))


MANY = 4000
"""Ids of a feature on a rank: so many draws that sums of them differ from their means by a few percent."""


def ranges(name: str, rows: int, dim: int, *parts: tuple[int, Any]) -> Tiling:
    """Ranges of rows, each with its last row and its owners."""
    edges = [0, *(end for end, _ in parts)]
    return Tiling.of(name, rows, dim, [(low, end, 0, dim, who) for low, (end, who) in zip(edges, parts, strict=False)])


@DISTINCT
def test_bytes_of_ids_numbered_by_frequency_are_those_of_each_ranges_reads(distinct: bool | None) -> None:
    """Short ranges of frequent ids and long ones of others; heads on every rank, and on some."""
    skew = Skew(5000, 1.05, ordered=True)
    works = [
        TableWork(name, 5000, 8, optimizer=SGD, reads=reads, skew=skew)
        for name, reads in (
            ("cut", [Reads(MANY, 1)]), ("head", [Reads(MANY, 1)]), ("bags", [Reads(MANY, 3)]),
            ("pair", [Reads(MANY, 1), Reads(MANY, 1)]), ("whole", [Reads(MANY, 1)]),
        )
    ]  # fmt: skip
    every = range(4)
    kinds = [
        ranges("cut", 5000, 8, (20, 0), (200, 1), (1500, 2), (5000, 3)),
        ranges("head", 5000, 8, (50, every), (800, 2), (5000, 0)),
        ranges("bags", 5000, 8, (10, every), (400, 1), (5000, 3)),
        ranges("pair", 5000, 8, (30, (1, 2)), (5000, 0)),
        ("table_wise", [2]),
    ]
    check(sent_once(works, distinct), kinds, Topology(4, "cpu"))


@pytest.mark.parametrize("share", [0.002, 0.02, 0.2])
def test_a_head_has_the_gradients_of_its_reads(share: float) -> None:
    """In each of the forms of replicas: a head of a few rows has most ids."""
    work = TableWork("head", 5000, 8, optimizer=SGD, reads=[Reads(4 * MANY)], skew=Skew(5000, 1.05, ordered=True))
    end = int(share * 5000)
    for ranks in (3, MOST_COPIES + 1):
        others = [(end + (5000 - end) * (r + 1) // ranks, r) for r in range(ranks)]
        tiling = ranges("head", 5000, 8, (end, range(ranks)), *others)
        for distinct in (False, True):
            check(sent_once([work], distinct), [tiling], Topology(ranks, "cpu"), rough=0.08)


@DISTINCT
def test_bytes_of_sequences_are_those_the_runtime_sends(distinct: bool | None) -> None:
    """Even ids, and ids by Zipf's law, whose frequent ones lie in any range."""
    works = [
        TableWork("even", 3000, 8, optimizer=SGD, reads=[Reads(MANY // 4, 3)], each_id=True),
        TableWork("whole", 5000, 8, optimizer=SGD, reads=[Reads(MANY // 4, 4)], each_id=True, skew=Skew(5000, 1.05)),
    ]
    check(sent_once(works, distinct), [("row_wise", None), ("table_wise", [1])], Topology(3, "cpu"))


def test_frequent_ids_that_lie_anywhere_travel_once_from_every_range() -> None:
    """Each id is read by every rank, so ranges of rows differ little; each id for itself, they would differ by half."""
    work = TableWork("rows", 5000, 8, optimizer=SGD, reads=[Reads(MANY)], skew=Skew(5000, 1.05))
    check([work], [("row_wise", None)], Topology(4, "cpu"))


def test_each_home_decides_by_what_others_look_up_for_it() -> None:
    """93 % of the ids of a batch are distinct, at most, if all rows are elsewhere, and 86 % if half of them are."""
    for rows, once in ((2000, [True] * 4), (5000, [False, False, True, True]), (80_000, [False] * 4)):
        work = TableWork("t", rows, 8, optimizer=SGD, reads=[Reads(MANY // 4)])
        tiling = ranges("t", rows, 8, (rows // 2, 0), (rows, 1))
        model = Model(Workload([work]), Topology(4, "cpu"))
        distinct = float(model.seen_by_feature.whole[0])
        rows_of_home = price([tiling], model).sent["gradients"] / 32
        away = np.array([0.5, 0.5, 1.0, 1.0])
        close(rows_of_home, away * np.where(once, distinct, MANY // 4))
        check([work], [tiling], Topology(4, "cpu"), rough=0.1)


def test_a_gpu_sends_repeated_ids_once_only_if_the_plan_says_so() -> None:
    work = TableWork("t", 100, 8, optimizer=SGD, reads=[Reads(BATCH)])
    found = {
        distinct: price([whole(100, 8)], Model(Workload(sent_once([work], distinct)), Topology(2))).sent["rows"][0] / 32
        for distinct in (None, True, False)
    }
    assert found[None] == found[False] == BATCH
    assert found[True] == pytest.approx(100 * (1 - 0.99**BATCH))


def test_bytes_of_replicas_in_shares_are_those_the_runtime_sends() -> None:
    """Of nine replicas together: the rows that each adds up are a draw."""
    work = TableWork("copy", 20_000, 8, optimizer=SGD, reads=[Reads(BATCH, 1)])
    topology = Topology(MOST_COPIES + 1, "cpu")
    tilings = tilings_of([work], [("data_parallel", None)], topology)
    predicted = price(tilings, Model(Workload([work]), topology)).sent
    sent, _ = step_bytes([work], tilings, topology, torch.optim.SGD)
    assert {n for n, v in sent.items() if any(v)} == {n for n, v in predicted.items() if np.any(v > 0)}
    for name, counted in sent.items():
        assert sum(predicted[name]) == pytest.approx(sum(counted), rel=0.02), name


@pytest.mark.parametrize(("rows", "length"), [(20_000, 1), (3_000, 6), (5, 3)], ids=["bags", "rows", "dense"])
def test_bytes_of_replicas_are_those_of_each_form(rows: int, length: int) -> None:
    works = [TableWork("copy", rows, 8, optimizer=SGD, reads=[Reads(BATCH, length)]), WORKS[0]]
    check(works, [("data_parallel", None), KINDS[0]], Topology(3, "cpu"), rough=0.08)
    check(works[:1], [("data_parallel", None)], Topology(2, "cpu"))


def test_tables_without_optimizer_send_dense_gradients() -> None:
    works = [dataclasses.replace(work, optimizer=None) for work in WORKS]
    works.append(TableWork("copy", 100, 8, reads=[Reads(BATCH, 1)]))
    check(works, [*KINDS, ("data_parallel", None)], Topology(4, "cpu"), rule=None)


def test_column_blocks_tell_each_other_their_sums() -> None:
    works = [dataclasses.replace(work, optimizer=specs.RowWiseAdagrad(0.1)) for work in WORKS]
    check(works, KINDS, Topology(4, "cpu"), rule=RowWiseAdagrad)


def test_number_formats_of_the_wire_are_counted() -> None:
    wire = Wire("bf16", "int8")
    check([dataclasses.replace(work, wire=wire) for work in WORKS], KINDS, Topology(4, "cpu"))


# ---------------------------------------------------------------------------------------------------- seconds

RATES = {
    "lookup_far": 7.0, "lookup_near": 3.0, "lookup_bag": 5.0, "update_far": 11.0, "update_near": 2.0,
    "update_id": 13.0, "update_bag": 17.0, "place": 19.0, "pick": 23.0,
}  # fmt: skip
SPEEDS = Speeds(
    **{name: (rate, rate) for name, rate in RATES.items()},  # type: ignore[arg-type]
    widths=(16, 256), route=29.0, copy=0.25, link_in=31.0, link_out=37.0, network_in=41.0, network_out=43.0,
    call=47.0, call_peer=53.0, step=59.0, part=61.0, replica=67.0, row_sum=71.0, cache=800,
)  # fmt: skip
FOUR = Topology(4, "cpu", local_world_size=2, speeds=SPEEDS)
"""Two hosts of two ranks. Every rate is another, and none depends on the width."""
BAGS = 100.0


def priced(work: TableWork, tiling: Tiling, topology: Topology = FOUR) -> tuple[Any, Model]:
    """The price of a table whose ids all travel."""
    (work,) = sent_once([work], False)
    model = Model(Workload([work]), topology)
    return price([tiling], model), model


def whole(rows: int, dim: int, owner: Any = 0) -> Tiling:
    return Tiling.of("t", rows, dim, [(0, rows, 0, dim, owner)])


def close(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(got, wanted, rtol=1e-9)


def test_a_table_on_one_rank_takes_the_seconds_that_the_page_says() -> None:
    """400 x 8 on rank 0, 100 bags of one id per rank: N = P = 100, and W = 4 homes."""
    found, model = priced(TableWork("t", 400, 8, optimizer=SGD, reads=[Reads(BAGS)]), whole(400, 8))
    u, n, w = float(model.all_distinct[0]), BAGS, 4.0
    assert model.resident == pytest.approx(800 / (u * 8 * 4 / 4))
    far, again = u * (1 - model.resident), (2 * u - float(model.workload.distinct(8)[0])) / u
    far_read = u * (1 - model.resident * again)
    received = w * 4 * n
    at_owner = np.array([1.0, 0.0, 0.0, 0.0])
    close(found.parts["route"], [n * 29 + 2 * 4 * n * 0.25] * 4)
    close(
        found.parts["lookup"],
        at_owner * (far_read * 7 + (w * n - far_read) * 3 + w * n * 5 + received * 0.25),
    )
    close(found.parts["combine"], [n * 19] * 4)
    close(found.parts["gather"], [n * 23] * 4)
    close(found.parts["update"], at_owner * (w * n * 13 + w * n * 17 + far * 11 + (u - far) * 2))
    close(found.parts["overhead"], 59 + 61 + at_owner * w * 61)
    close(found.calls, 4 * (47 + 2 * 53))
    at_home = 2 * 4 * n * 8 + 4 * n * 8 + 2 * 4 * n
    close(found.memory[:, 1], at_home + at_owner * (400 * 8 * 4 + 2 * received + w * (4 * n * 8 + 16 * n)))


def test_links_carry_what_stays_in_a_host_and_network_cards_the_mean_of_what_leaves() -> None:
    """Ids come to rank 0: from rank 1 over a link, from ranks 2 and 3 over the network; rows take the way back."""
    found, _ = priced(TableWork("t", 400, 8, optimizer=SGD, reads=[Reads(BAGS)]), whole(400, 8))
    ids, rows = 4 * BAGS, 4 * 8 * BAGS
    close(found.parts["ids"], [ids * 31, ids * 37, 0, 0])
    close(found.parts["rows"], [rows * 37, rows * 31, 0, 0])
    close(found.parts["gradients"], [rows * 31, rows * 37, 0, 0])
    close(found.network["rows between hosts"], [2 * rows * 43 / 2] * 2 + [2 * rows * 41 / 2] * 2)
    close(found.network["gradients between hosts"], [2 * rows * 41 / 2] * 2 + [2 * rows * 43 / 2] * 2)
    header = 4.0 * (1 + 2)
    sizes = found.network["ids between hosts"] - np.array([2 * ids * 41 / 2] * 2 + [2 * ids * 43 / 2] * 2)
    assert np.all(sizes >= header * (41 + 43) / 2), "headers travel beside the ids"
    assert found.between_hosts["rows"].tolist() == [2 * rows, 0, 0, 0]


def test_a_table_without_optimizer_copies_its_piece_three_times() -> None:
    """Beside the update of plain SGD; without a cache, so that all rows come from memory."""
    topology = Topology(4, "cpu", local_world_size=2, speeds=dataclasses.replace(SPEEDS, cache=0))
    attached, alone = (
        priced(TableWork("t", 400, 8, optimizer=rule, reads=[Reads(BAGS)]), whole(400, 8), topology)[0]
        for rule in (SGD, None)
    )
    close(alone.parts["update"] - attached.parts["update"], [3 * 400 * 8 * 4 * 0.25, 0, 0, 0])


def test_lookups_of_several_tables_add_up_whatever_their_column_blocks() -> None:
    """One table has two blocks of columns on rank 0, so that a lookup there reads two widths; the other has one."""
    topology = Topology(4, "cpu", local_world_size=2, speeds=dataclasses.replace(SPEEDS, cache=0))
    tiles = [(0, 400, 0, 4, 0), (0, 400, 4, 8, 1), (0, 400, 8, 16, 0)]
    works = sent_once([TableWork(name, 400, 16, optimizer=SGD, reads=[Reads(BAGS)]) for name in "ab"], False)
    tilings = [Tiling.of("a", 400, 16, tiles), Tiling.of("b", 400, 16, [(0, 400, 0, 16, 2)])]
    both = price(tilings, Model(Workload(works), topology))
    alone = [priced(work, tiling, topology)[0] for work, tiling in zip(works, tilings, strict=True)]
    close(both.parts["lookup"], sum(found.parts["lookup"] for found in alone))
    close(both.parts["update"], sum(found.parts["update"] for found in alone))


def test_tables_beside_the_workloads_take_their_share_of_the_cache() -> None:
    work = Workload([TableWork("t", 400, 8, optimizer=SGD, reads=[Reads(BAGS)])])
    other = Workload([TableWork("o", 400, 8, optimizer=SGD, reads=[Reads(BAGS)])])
    assert Model(work, FOUR, beside=other).resident == pytest.approx(Model(work, FOUR).resident / 2)


def test_copies_on_all_ranks_agree_over_links_and_the_network_by_their_neighbours() -> None:
    """Of three other replicas one is on the host: a third of what is sent goes over the link."""
    found, model = priced(TableWork("t", 400, 8, optimizer=SGD, reads=[Reads(BAGS)]), whole(400, 8, (0, 1, 2, 3)))
    form = model.replicas(np.array([0]))
    reduced = float(form.reduced[0])
    sent = 3 * float(form.sent[0]) + 2 * reduced * 3 / 4
    close(found.parts["replicas"], [sent / 3 * (31 + 37) + float(form.seconds[0])] * 4)
    close(found.network["update between hosts"], [sent * 2 / 3 * (41 + 43)] * 4)


def test_column_blocks_pay_for_their_sums_and_six_copies_of_their_cells() -> None:
    """Two blocks of 4 and 12 columns; row-wise Adagrad: two numbers of 4 bytes per distinct row to the other block."""
    rule = specs.RowWiseAdagrad(0.1)
    tiling = Tiling.of("t", 400, 16, [(0, 400, 0, 4, 0), (0, 400, 4, 16, 1)])
    found, model = priced(TableWork("t", 400, 16, optimizer=rule, reads=[Reads(BAGS)]), tiling)
    u = float(model.all_distinct[0])
    sums = u * 4 * 2
    own = [sums * (31 + 37) + 71 + 6 * u * width * 4 * 0.25 for width in (4, 12)]
    close(found.parts["row sums"], [*own, 0, 0])
    assert found.sent["row sums"].tolist() == pytest.approx([sums, sums, 0, 0])


def test_a_rank_with_two_column_blocks_sends_sums_of_both_and_receives_those_of_the_other_rank() -> None:
    """Of three blocks, rank 0 holds the first and the last, as the runtime counts them."""
    rule = specs.RowWiseAdagrad(0.1)
    tiling = Tiling.of("t", 400, 16, [(0, 400, 0, 4, 0), (0, 400, 4, 12, 1), (0, 400, 12, 16, 0)])
    work = TableWork("t", 400, 16, optimizer=rule, reads=[Reads(BATCH)])
    found, model = priced(work, tiling)
    u = float(model.all_distinct[0])
    sums = u * 4 * 2
    copies = 6 * u * 8 * 4 * 0.25
    close(
        found.parts["row sums"],
        [2 * 71 + copies + sums * (2 * 37 + 31), 71 + copies + sums * (37 + 2 * 31), 0, 0],
    )
    sent, _ = step_bytes([work], [tiling], FOUR, RowWiseAdagrad)
    assert found.sent["row sums"] == pytest.approx(sent["row sums"], rel=0.05)


@pytest.mark.parametrize(
    ("work", "form", "numbers", "gradients"),
    [
        (TableWork("t", 20_000, 8, optimizer=SGD, reads=[Reads(BAGS, 6.0)]), 0, 4 * (2 + 700), 4 * 8 * 100),
        (TableWork("t", 20_000, 8, optimizer=SGD, reads=[Reads(BAGS, 6.0, True)]), 1, None, None),
        (TableWork("t", 5, 8, optimizer=SGD, reads=[Reads(BAGS, 3.0)]), 2, 0, 0),
        (TableWork("t", 5, 8, reads=[Reads(BAGS, 3.0)]), 3, 0, 0),
    ],
    ids=["bags", "rows", "dense", "dense of no optimizer"],
)
def test_each_form_of_replicas_takes_the_seconds_of_its_own_steps(
    work: TableWork, form: int, numbers: float | None, gradients: float | None
) -> None:
    """Picking bags; or summing rows and reading them; or an all-reduce of everything; and reading what is told."""
    model = Model(Workload([work]), FOUR)
    found = model.replicas(np.array([0]))
    own = float(model.seen(1).whole[0])
    numbers = 4 * own if numbers is None else numbers
    gradients = 4 * 8 * own if gradients is None else gradients
    bags, ids = BAGS, BAGS * work.reads[0].ids_per_bag
    summed = bags * 17 + ids * 13 + 2 * own * 8 * 4 * 0.25
    reduced = {2: 4 * 9 * work.rows, 3: 4 * 8 * work.rows}.get(form, 0)
    seconds = {0: bags * 23, 1: summed, 2: summed + 6 * reduced * 0.25, 3: 6 * reduced * 0.25}[form]
    assert int(found.form[0]) == form
    close(found.numbers, [numbers])
    close(found.gradients, [gradients])
    close(found.reduced, [reduced])
    close(found.sent, [numbers + gradients + (32 if form < 3 else 0)])
    close(found.seconds, [seconds + numbers * 4 * 0.25 + 67])


def test_copies_on_some_ranks_update_a_larger_part_of_the_batches() -> None:
    """A quarter of the rows on ranks 0 and 1, the rest on 2 and 3: each pair tells the other half of what it read.

    Each copy reads for two homes: the ids and the bags of these that are in its rows.
    """
    halves = Tiling.of("t", 4000, 8, [(0, 1000, 0, 8, (0, 1)), (1000, 4000, 0, 8, (2, 3))])
    topology = dataclasses.replace(FOUR, speeds=dataclasses.replace(SPEEDS, cache=0))
    share = np.array([0.25, 0.25, 0.75, 0.75])
    present = BAGS * (1 - (1 - share) ** 6)
    for reads, by_bags in ((Reads(BAGS, 6.0), True), (Reads(BAGS, 6.0, True), False)):
        work = TableWork("t", 4000, 8, optimizer=SGD, reads=[reads])
        found, model = priced(work, halves, topology)
        u, own = (share * float(model.seen(count).whole[0]) for count in (4, 2))
        ids = share * 6 * BAGS * 2
        numbers = 4 * (2 * 2 + 2 * present + ids) if by_bags else 4 * own
        gradients = 32 * (2 * present if by_bags else own)
        close(found.sent["replica ids"], numbers)
        close(found.sent["replica gradients"], gradients)
        sorted_ids, bags = (2 * ids, 4 * present) if by_bags else (2 * own, 2 * own)
        close(found.parts["update"], sorted_ids * 13 + bags * 17 + u * 11)
        summed = 2 * present * 17 + ids * 13 + 2 * own * 32 * 0.25
        local = 2 * present * 23 if by_bags else summed
        sent = numbers + gradients + 32
        close(found.parts["replicas"], sent * (31 + 37) + local + 2 * numbers * 0.25 + 67)
        assert not found.network["update between hosts"].any()
        assert not found.between_hosts["replica gradients"].any()


def test_copies_on_some_ranks_add_up_rows_in_shares() -> None:
    """A table of 8 rows on ranks 0, 1 and 2 of four, two of them on one host: no all-reduce among three of four.

    Two thirds of what each touches go to the replicas that add it up, then a third of the sums to two others.
    """
    work = TableWork("t", 8, 8, optimizer=SGD, reads=[Reads(BAGS, 6.0)])
    tiling = whole(8, 8, (0, 1, 2))
    topology = dataclasses.replace(FOUR, speeds=dataclasses.replace(SPEEDS, cache=0))
    found, model = priced(work, tiling, topology)
    copies = model.replicas(np.array([0]), np.array([3]))
    assert int(copies.form[0]) == 4
    own, every = 8.0, float(model.all_distinct[0])
    gradients, ids = (own + every) * 32 * 2 / 3, (2 * own + every) * 4 * 2 / 3 + 2 * 8
    close(found.sent["replica gradients"], [gradients] * 3 + [0])
    close(found.between_hosts["replica gradients"], [gradients / 2] * 2 + [gradients, 0])
    close(found.sent["replica ids"], [ids] * 3 + [0])
    close(found.sent["replica shares"], [64] * 3 + [0])
    close(found.sent["replica rows"], [16] * 3 + [0])
    sent = gradients + ids + 64 + 64 + 16
    close(
        found.parts["replicas"],
        np.array([sent / 2, sent / 2, 0, 0]) * (31 + 37) + np.array([1, 1, 1, 0]) * float(copies.seconds[0]),
    )
    # Of host 0, ranks 0 and 1 send half abroad each; of host 1, rank 2 sends all: the mean of two ranks.
    close(found.network["update between hosts"], [sent / 2 * (41 + 43)] * 4)
    close(found.parts["update"], [every * (13 + 17 + 11)] * 3 + [0])


def test_parts_count_in_the_stages_that_the_page_names() -> None:
    """The slowest rank of each stage, and collectives once; a shared card's time is a stage of its own."""
    stages = {
        "ids": ["route", "header", "ids", "overhead"],
        "lookup": ["lookup"],
        "rows": ["rows in host", "rows"],
        "gradients": ["combine", "gather", "gradients", "gradients in host"],
        "update": ["replicas", "row sums", "update"],
    }
    assert sorted(part for parts in stages.values() for part in parts) == sorted(PARTS)
    parts = {name: np.array([2.0**k, 3.0**k]) for k, name in enumerate(PARTS)}
    cards = {f"{name} between hosts": np.array([5.0, 4.0]) * (1 + k)
             for k, name in enumerate(["ids", "rows", "gradients", "update"])}  # fmt: skip
    memory = np.zeros((2, 2), np.int64)
    for shared in (True, False):
        names = (*stages, *cards) if shared else tuple(stages)
        found = Price(parts, cards, 7.0, memory, {}, {}, names, 0)
        wanted = {name: sum(parts[part] for part in own) for name, own in stages.items()}
        for name, seconds in cards.items():
            if shared:
                wanted[name] = seconds
            else:
                wanted[name.split()[0]] = wanted[name.split()[0]] + seconds
        assert found.stages.keys() == wanted.keys()
        for name, seconds in found.stages.items():
            close(seconds, wanted[name])
        assert found.seconds == pytest.approx(sum(float(np.max(each)) for each in wanted.values()) + 7.0)


def test_any_tiling_has_a_price() -> None:
    tiles = [(0, 100, 0, 8, (0, 1)), (100, 400, 0, 4, 2), (100, 400, 4, 8, (1, 3))]
    work = TableWork("free", 400, 8, optimizer=SGD, reads=[Reads(BATCH, 2)])
    topology = Topology(4, "cpu")
    tiling = Tiling.of("free", 400, 8, tiles)
    predicted = price([tiling], Model(Workload([work]), topology))
    sent, _ = step_bytes([work], [tiling], topology)
    for name in ("header", "ids", "rows", "gradients"):
        assert predicted.sent[name] == pytest.approx(sent[name], rel=0.05, abs=64), name
    assert predicted.memory[:, 0].tolist() == [0] * 4  # CPU ranks have host memory only
    assert np.all(predicted.memory[:, 1] > 0)
