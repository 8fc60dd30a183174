"""Replicas of a tile: the cheapest form wins, every form gives the same rows, few messages carry all tables.

Legend: W ranks, D columns.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops.gradient.definition import sum_rows
from tilerec.ops.gradient.record import GradientRecord
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sharding import replicas
from tilerec.sharding.replica_messages import ReplicaTable
from tilerec.sharding.replicas import GradientForm, choose_form, exchange_replica_gradients
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.virtual import run_virtual_ranks

ROWS, DIM = 30, 5
KEYS = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("rows", "counts", "group_size", "form"),
    [
        (
            1_000_000,
            [(2048, 2048)] * 2,
            2,
            GradientForm.ROWS,
        ),  # single ids: repeated rows are added before they travel
        (1_000_000, [(2048, 20480)] * 2, 2, GradientForm.BAGS),  # long bags: one gradient for ten ids
        (
            1_000,
            [(65536, 655360)] * 8,
            8,
            GradientForm.DENSE,
        ),  # every rank touches every row of a small table
        (
            1_000,
            [(65536, 655360)] * 8,
            16,
            GradientForm.SHARES,
        ),  # the same among some ranks only: no all-reduce there
        (10**9, [(2048, 20480)] * 9, 9, GradientForm.SHARES),  # more than 8 replicas: no copies for each of them
        (1_000_000, [(0, 0)] * 4, 4, GradientForm.ROWS),  # nothing at all: nothing to send
    ],
)
def test_the_form_with_the_fewest_bytes_is_chosen(
    rows: int, counts: list[tuple[int, int]], group_size: int, form: GradientForm
) -> None:
    assert choose_form(rows, 64, counts, group_size, bags_can_travel=True, exact=False) is form


def test_exact_sums_need_the_bags_and_sample_weights_need_the_rows() -> None:
    long_bags, single = [(2048, 20480)] * 2, [(2048, 2048)] * 2
    assert choose_form(10**6, 64, single, 2, bags_can_travel=True, exact=True) is GradientForm.BAGS
    assert choose_form(10**6, 64, long_bags, 2, bags_can_travel=False, exact=False) is GradientForm.ROWS


def test_exact_sums_among_many_replicas_travel_in_shares() -> None:
    many, few = [(2048, 2048)] * 9, [(2048, 2048)] * 4
    assert choose_form(10**9, 64, many, 9, bags_can_travel=True, exact=True) is GradientForm.SHARES
    assert choose_form(10**9, 64, few, 4, bags_can_travel=True, exact=True) is GradientForm.BAGS
    assert choose_form(1000, 64, few, 4, bags_can_travel=True, exact=True) is GradientForm.SHARES  # few distinct rows


def configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["a", "b"]),
        EmbeddingBagConfig(ROWS + 1, 3, "u", feature_names=["c"]),
    ]


def batches(size: int) -> list[KeyedJaggedTensor]:
    return [random_batch(KEYS, ROWS, 4 * rank, seed=rank) for rank in range(size)]


def attached() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    module = EmbeddingBagCollection(configs())
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), module.parameters())
    return module


def train(group: Group, whole: EmbeddingBagCollection) -> tuple[list[Tensor], dict[str, int]]:
    module = copy.deepcopy(whole)
    everyone = tuple(range(group.size))
    tilings = {
        c.name: Tiling.of(
            c.name, c.num_embeddings, c.embedding_dim, [(0, c.num_embeddings, 0, c.embedding_dim, everyone)]
        )
        for c in configs()
    }
    shard_collection(module, tilings, group, group.split("route"), Topology(group.size, "cpu"))
    group.traffic.reset()
    out = module(batches(group.size)[group.rank]).values()
    (out.square().sum() * group.size).backward()
    return [p.detach().clone() for p in module.parameters()], {sent.name: sent.calls for sent in group.traffic.table()}


@pytest.mark.parametrize("form", list(GradientForm))
@pytest.mark.parametrize("size", [2, 3])
def test_every_form_updates_the_rows_of_the_unsharded_module(
    form: GradientForm, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "choose_form", lambda *args, **kwargs: form)
    whole = attached()
    before = [p.detach().clone() for p in whole.parameters()]
    results = run_virtual_ranks(size, train, whole)
    whole(concat_batches(batches(size))).values().square().sum().backward()
    for rows, _ in results:
        for own, want, old, first in zip(rows, whole.parameters(), before, results[0][0], strict=True):
            torch.testing.assert_close(own, want.detach(), rtol=0, atol=1e-6)
            untouched = (want.detach() == old).all(1)
            assert untouched.any()
            assert torch.equal(own[untouched], old[untouched])
            assert torch.equal(own, first), "replicas differ"


@pytest.mark.parametrize(
    ("form", "calls"),
    [
        (GradientForm.BAGS, {"replica counts": 1, "replica ids": 1, "replica gradients": 1}),
        (GradientForm.ROWS, {"replica counts": 1, "replica ids": 1, "replica gradients": 1}),
        (GradientForm.DENSE, {"replica counts": 1, "replica gradients, dense": 1}),
        (
            GradientForm.SHARES,
            {
                "replica counts": 1,
                "replica shares": 1,
                "replica rows": 1,
                "replica ids": 2,
                "replica gradients": 2,
            },
        ),
    ],
)
def test_all_tables_share_one_message_of_each_kind(
    form: GradientForm, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "choose_form", lambda *args, **kwargs: form)
    for _, made in run_virtual_ranks(2, train, attached()):
        assert {name: count for name, count in made.items() if name.startswith("replica")} == calls


@pytest.mark.parametrize("form", [GradientForm.BAGS, GradientForm.ROWS, GradientForm.SHARES])
@pytest.mark.parametrize("rows", [2**31 - 1, 2**31 + 1])
def test_rows_beyond_32_bits_keep_their_numbers(rows: int, form: GradientForm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row numbers travel as int32 where they fit, and as int64 where one table has more rows."""
    monkeypatch.setattr(replicas, "choose_form", lambda *args, **kwargs: form)

    def fn(group: Group) -> list[int]:
        ids = torch.tensor([rows - 1, group.rank])
        record = GradientRecord(
            0, torch.ones(2, 3), ids, None, None, (7,), (3,), (0,), (2,), (0,), (3,), (0,)
        )  # fmt: skip
        agreed = exchange_replica_gradients(group, (0, 1), record, [ReplicaTable(7, rows, 3, [0])], exact=False)()
        return sorted(set(agreed.ids.tolist()))

    assert run_virtual_ranks(2, fn) == [[0, 1, rows - 1]] * 2


def bags_of_ids(ids: list[list[int]], value: float, *, distinct: bool = False) -> GradientRecord:
    """One feature of table 7, one bag per list of ids, all gradients of one value."""
    offsets = torch.tensor([0, *[len(own) for own in ids]]).cumsum(0)
    flat, grad = torch.tensor(sum(ids, [])), torch.full((len(ids) * DIM,), value)  # noqa: RUF017 - few ids
    known = (True,) if distinct else ()
    return GradientRecord(
        0, grad, flat, offsets, None, (7,), (DIM,), (0,), (len(ids),), (0,), (DIM,), (0,), distinct=known
    )  # fmt: skip


def agreed_rows(group: Group, record: GradientRecord) -> tuple[GradientRecord, list[int], list[float]]:
    """The record of all replicas, its rows and the first number of each row's sum."""
    table = ReplicaTable(7, ROWS, DIM, [0])
    agreed = exchange_replica_gradients(group, (0, 1), record, [table], exact=False)()
    rows_U, grads_UD = sum_rows(agreed)
    return agreed, rows_U.tolist(), grads_UD[:, 0].tolist()


def test_rows_that_one_replica_has_not_added_up_travel_as_bags() -> None:
    """Bags of several ids are cheaper for rank 0, rows for both together: its counts have no number of rows."""
    repeated = [[row % 5] for row in range(60)]

    def fn(group: Group) -> tuple[int, list[int], list[float]]:
        record = bags_of_ids(repeated, 1.0) if group.rank else bags_of_ids([[3, 9, 3]], 100.0)
        agreed, rows, sums = agreed_rows(group, record)
        assert "replica rows" not in {sent.name for sent in group.traffic.table()}
        return sum(agreed.bags), rows, sums

    assert choose_form(ROWS, DIM, [(1, 3), (60, 60)], 3, bags_can_travel=True, exact=False) is GradientForm.ROWS
    found = run_virtual_ranks(2, fn)
    assert found == [(61, [0, 1, 2, 3, 4, 9], [12.0, 12.0, 12.0, 212.0, 12.0, 100.0])] * 2


def test_rows_that_are_known_to_be_distinct_are_not_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[int] = []
    real = replicas.sum_rows_of_tables

    def counted(record: GradientRecord, features: list[list[int]], rows: list[int]) -> Any:
        added.extend(rows)
        return real(record, features, rows)

    monkeypatch.setattr(replicas, "sum_rows_of_tables", counted)

    def fn(group: Group) -> tuple[list[int], list[float]]:
        record = bags_of_ids([[9], [2 + group.rank]], 1.0 + group.rank, distinct=True)
        agreed, rows, sums = agreed_rows(group, record)
        assert agreed.offsets is None
        return rows, sums

    assert run_virtual_ranks(2, fn) == [([2, 3, 9], [1.0, 2.0, 3.0])] * 2
    assert not added
