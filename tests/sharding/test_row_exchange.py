"""Combining: rows come home in few bytes, sums of a host cross once, and gradients take the same way back.

Bytes are written out here and compared with what the group counted. What stays on a rank is not counted.

Legend: W ranks, B samples, D columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.harness import OPTIMIZERS, TILINGS, WORLDS, Case, TableCase, check, run_virtual
from tests.sharding.routed_batches import batch_of, rows, sharded
from tilerec.comms.group import Group
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.plan import Wire
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.batches import concat_batches, random_batch, split_batch
from tilerec.testing.virtual import run_virtual_ranks

DIM = 4


def step(group: Group, tiling: Tiling, features: KeyedJaggedTensor, hosts: Any = None, **kwargs: Any) -> Any:
    """One training step; the bytes of every call."""
    module = sharded(group, tiling, hosts=hosts, **kwargs)
    apply_optimizer_in_backward(SGD(lr=0.1), module.parameters())
    group.traffic.reset()
    out = module(features)
    out = out["a"].values() if kwargs.get("sequence") else out.values()
    out.sum().backward()
    if hosts is not None:
        return group.traffic.between(hosts)
    return {sent.name: sent.total for sent in group.traffic}


@pytest.mark.parametrize("name", ["table_wise", "row_wise", "column_wise", "grid", "data_parallel"])
def test_a_step_makes_four_calls_and_six_where_hosts_add_up(name: str) -> None:
    for world, calls in (("4", 4), ("2+2", 6)):
        hosts = WORLDS[world]
        tiling = TILINGS[name](20, 12, hosts, 1)

        def fn(group: Group, tiling: Tiling = tiling, hosts: Any = hosts) -> dict[str, int]:
            module = sharded(group, tiling, hosts=hosts)
            apply_optimizer_in_backward(SGD(lr=0.1), module.parameters())
            group.traffic.reset()
            module(random_batch(["a"], 20, 4, seed=group.rank)).values().sum().backward()
            return {sent.name: sent.calls for sent in group.traffic if not sent.name.startswith("replica")}

        for made in run_virtual_ranks(4, fn):
            assert set(made.values()) == {1}
            hierarchical = calls == 6 and name in ("row_wise", "grid")
            # Where every rank holds all, the sizes tell of refused batches; nothing else travels.
            assert len(made) == (1 if name == "data_parallel" else 6 if hierarchical else 4), made


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_rows_of_single_ids_do_not_grow_with_the_ranks(size: int) -> None:
    """64 samples of one id over W ranks, row-wise: each id that lies elsewhere costs 4 D bytes there and back."""
    whole = torch.randint(0, 64, (64,), generator=torch.Generator().manual_seed(3))
    features = KeyedJaggedTensor(["a"], whole, lengths=torch.ones(64, dtype=torch.int64))
    local = split_batch(features, [64 // size] * size)

    def fn(group: Group) -> Any:
        return step(group, rows(64, size, DIM), local[group.rank], wires={"t": Wire(distinct=False)})

    made = run_virtual_ranks(size, fn)
    away = sum(int((batch.values() // (64 // size) != home).sum()) for home, batch in enumerate(local))
    assert sum(sent["rows"] for sent in made) == 4 * DIM * away <= 4 * DIM * 64
    assert sum(sent["gradients"] for sent in made) == 4 * DIM * away
    assert sum(sent["ids"] for sent in made) == 4 * away


def test_rows_of_longer_bags_count_the_owners_that_have_something() -> None:
    """Bags {0, 1}, {0, 10}, {}, {10, 11} at home 0, rows [10, 20) on rank 1: two rows of D come from there."""

    def fn(group: Group) -> Any:
        bags: list[list[int]] = [[0, 1], [0, 10], [], [10, 11]] if group.rank == 0 else [[]]
        return step(group, rows(20, 2, DIM), batch_of(bags))

    one, other = run_virtual_ranks(2, fn)
    assert (one["rows"], other["rows"]) == (0, 2 * 4 * DIM)
    assert (one["gradients"], other["gradients"]) == (2 * 4 * DIM, 0)


HOSTS = [[0, 1], [2, 3]]


def test_only_sums_cross_the_hosts() -> None:
    """2 hosts x 2 ranks, table-row-wise on host 0; every bag has an id on either rank. A home of host 1 gets one row
    per bag, 4 D bytes, where without sums inside the host it would get two."""
    tiling = Tiling.of("t", 20, DIM, [(0, 10, 0, DIM, 0), (10, 20, 0, DIM, 1)])
    bags = [[k, 10 + k] for k in range(5)]

    def fn(group: Group, fan_in: float) -> Any:
        return step(group, tiling, batch_of(bags), HOSTS, fan_in={"t": fan_in})

    summed = run_virtual_ranks(4, fn, 2.0)
    assert sum(sent["rows"] for sent in summed) == 2 * 5 * 4 * DIM
    assert sum(sent["gradients"] for sent in summed) == 2 * 5 * 4 * DIM
    assert sum(sent["rows in host"] + sent["gradients in host"] for sent in summed) == 0
    flat = run_virtual_ranks(4, fn, 1.0)
    assert sum(sent["rows"] for sent in flat) == 2 * 5 * 2 * 4 * DIM
    assert "rows in host" not in flat[0]


def test_several_column_blocks_of_the_same_ranks_are_merged_side_by_side() -> None:
    """Columns [0, 2) and [5, 12) lie on ranks 0 and 1, those between on ranks 2 and 3: a merge of two widths."""
    tiles = [
        (r0, r0 + 10, c0, c1, first + k)
        for c0, c1, first in ((0, 2, 0), (2, 5, 2), (5, 12, 0))
        for k, r0 in enumerate((0, 10))
    ]
    table = TableCase("t0", 20, 12, ("a", "b"))
    case = Case(
        (table,), {"t0": Tiling.of("t0", 20, 12, tiles)}, ((0, 1), (2, 3)), OPTIMIZERS["adagrad"], (3, 2, 4, 2),
        mean_length=4.0, fan_in={"t0": 4.0},
    )  # fmt: skip
    check(case, run_virtual(case))


def test_sums_cross_for_bags_that_are_present_only() -> None:
    """Bags {}, {3}, {12}, {3, 12}: the union has three of them; part of rank 0 two, part of rank 1 two."""
    tiling = Tiling.of("t", 20, DIM, [(0, 10, 0, DIM, 0), (10, 20, 0, DIM, 1)])

    def fn(group: Group) -> Any:
        return step(group, tiling, batch_of([[], [3], [12], [3, 12]] if group.rank == 3 else [[]]), HOSTS)

    made = run_virtual_ranks(4, fn)
    assert [sent["rows"] for sent in made] == [0, 3 * 4 * DIM, 0, 0]  # rank 1 has rank 3's place in its host
    assert [sent["gradients"] for sent in made] == [0, 0, 0, 3 * 4 * DIM]


@pytest.mark.parametrize("sequence", [False, True], ids=["pooled", "sequence"])
@pytest.mark.parametrize("name", TILINGS)
def test_bags_without_ids_are_zeros(name: str, sequence: bool) -> None:
    """Memory is poisoned in tests: what nobody writes would show."""
    tiling = TILINGS[name](20, 12, WORLDS["2+2"], 1)

    def fn(group: Group) -> Any:
        module = sharded(group, tiling, hosts=WORLDS["2+2"], sequence=sequence)
        out = module(batch_of([[], [], []]))
        return (out["a"].values() if sequence else out.values()).detach()

    for out in run_virtual_ranks(4, fn):
        assert torch.equal(out, torch.zeros(0 if sequence else 3, 12))


def test_a_sequence_gets_its_rows_in_the_order_of_its_ids() -> None:
    table = torch.arange(20 * 12).view(20, 12) % 97.0
    batches = [random_batch(["a"], 20, 6, seed=rank) for rank in range(4)]
    for name, make in TILINGS.items():
        tiling = make(20, 12, WORLDS["2+2"], 1)

        def fn(group: Group, tiling: Tiling = tiling) -> Any:
            module = sharded(group, tiling, hosts=WORLDS["2+2"], sequence=True)
            return module(batches[group.rank])["a"].values().detach()

        for rank, out in enumerate(run_virtual_ranks(4, fn)):
            assert torch.equal(out, table[batches[rank].values()]), name


def test_repeated_ids_of_a_bag_count_as_often_as_they_stand() -> None:
    table = torch.arange(80).view(20, 4) % 97.0

    def fn(group: Group) -> Any:
        return sharded(group, rows(20, 2))(batch_of([[3, 3, 3], [12, 12], [3, 12, 3]])).values().detach()

    for out in run_virtual_ranks(2, fn):
        assert torch.equal(out, torch.stack([3 * table[3], 2 * table[12], 2 * table[3] + table[12]]))


def test_every_sample_weight_gets_its_gradient_where_it_stands() -> None:
    """d(out . 1)/dw = sum of the id's row, on the rank that has the id, whoever holds the row."""
    table = torch.arange(80).view(20, 4) % 97.0
    batches = [random_batch(["a"], 20, 5, weighted=True, seed=rank) for rank in range(4)]
    assert concat_batches(batches).values().numel() > 20

    def fn(group: Group) -> Any:
        features = batches[group.rank]
        features.weights().requires_grad_(group.rank != 2)
        sharded(group, rows(20, 4), weighted=True, hosts=HOSTS)(features).values().sum().backward()
        return features.weights().grad, group.traffic["weight gradients"].calls

    for rank, (grad, calls) in enumerate(run_virtual_ranks(4, fn)):
        assert calls == 1  # of every rank, also of the one whose weights want none
        if rank == 2:
            assert grad is None
        else:
            assert torch.equal(grad, table[batches[rank].values()].sum(dim=1))


# -------------------------------------------------------------------------------------------------------- on a GPU


def blocks_that_meet(slots: Tensor, lists: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Segments that meet in an element, though they are not of one block (`place_rows_`)."""
    counts, widths, slot_starts, places, strides, _ = lists
    touched: list[set[int]] = []
    for count, width, start, place, stride in zip(counts, widths, slot_starts, places, strides, strict=True):
        own = range(count) if start < 0 else slots[start : start + count].tolist()
        touched.append({place + slot * stride + c for slot in own for c in range(width)})
    return [
        (a, b)
        for a, b in itertools.combinations(range(len(counts)), 2)
        if touched[a] & touched[b] and not (strides[a] == strides[b] and abs(places[a] - places[b]) < strides[a])
    ]


@pytest.mark.parametrize("kind", ["pooled", "variable", "sequence"])
def test_rows_that_meet_are_of_one_block(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU may move at once does not meet: outputs of one row per bag, flat ones, and sums inside a host."""
    dims, hosts = (12, 24, 12), WORLDS["2+2"]
    seen, bad = [], []
    real = torch.ops.tilerec.place_rows_

    def place_rows_(out: Tensor, rows: Tensor, slots: Tensor, *lists: Any) -> None:
        seen.append(len(lists[0]))
        bad.extend(blocks_that_meet(slots, lists[:6]))
        real(out, rows, slots, *lists)

    monkeypatch.setattr(torch.ops.tilerec, "place_rows_", place_rows_)
    config: Any = EmbeddingConfig if kind == "sequence" else EmbeddingBagConfig
    tables = [config(20, dim, f"t{t}", feature_names=["a", "b"][: 1 + t % 2]) for t, dim in enumerate(dims)]

    def fn(group: Group, name: str) -> None:
        module: Any = EmbeddingCollection(tables) if kind == "sequence" else EmbeddingBagCollection(tables)
        tilings = {table.name: TILINGS[name](20, dim, hosts, 1) for table, dim in zip(tables, dims, strict=True)}
        topology = Topology(group.size, "cpu", hosts=hosts)
        wires = {table.name: Wire(distinct=False) for table in tables}
        shard_collection(module, tilings, group, group.split("route"), topology, wires=wires)
        module(random_batch(["a", "b"], 20, 5, seed=group.rank, variable=kind == "variable"))

    for name in TILINGS:
        run_virtual_ranks(4, fn, name)
        assert not bad, name
    assert max(seen) > 6
