"""Sums of rows by shares: every bag reaches the replicas that add up its rows, and exact sums keep their bits.

Legend: P bags, N ids, D columns.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilerec.comms.group import Group
from tilerec.ops.gradient.definition import sum_rows
from tilerec.ops.gradient.record import GradientRecord
from tilerec.sharding import replicas
from tilerec.sharding.replica_messages import ReplicaTable
from tilerec.sharding.replica_shares import Bags, split_bags
from tilerec.sharding.replicas import GradientForm, exchange_replica_gradients
from tilerec.testing.virtual import run_virtual_ranks

BAGS = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6)


@given(st.lists(BAGS, min_size=1, max_size=3), st.integers(1, 4))
def test_a_share_has_the_rows_of_its_replica_in_their_order(features: list[list[list[int]]], count: int) -> None:
    grads = [torch.arange((f + 1.0) * len(bags)).view(-1, f + 1) for f, bags in enumerate(features)]
    whole = [
        Bags(
            3 + f,
            torch.tensor([len(bag) for bag in bags], dtype=torch.int64),
            torch.tensor([row for bag in bags for row in bag], dtype=torch.int64),
            grads_PD,
        )
        for f, (bags, grads_PD) in enumerate(zip(features, grads, strict=True))
    ]
    for f, (bags, shares) in enumerate(zip(features, split_bags(whole, count), strict=True)):
        assert len(shares) == count
        for adder, share in enumerate(shares):
            own = [(p, [row for row in bag if row % count == adder]) for p, bag in enumerate(bags)]
            own = [(p, rows) for p, rows in own if rows]
            assert share.order == 3 + f
            assert share.lengths_P.tolist() == [len(rows) for _, rows in own]
            assert share.ids_N.tolist() == [row for _, rows in own for row in rows]
            assert torch.equal(share.grads_PD, grads[f][[p for p, _ in own]])


def record_of(rank: int, *, rows: int, dim: int, empty: bool = False) -> GradientRecord:
    """Two features of one table, with bags of 0 to 3 ids, gradients behind an offset and with a stride."""
    dice = torch.Generator().manual_seed(rank)
    lengths = torch.zeros(16, dtype=torch.int64) if empty else torch.randint(0, 4, (16,), generator=dice)
    offsets = torch.zeros(17, dtype=torch.int64)
    offsets[1:] = lengths.cumsum(0)
    ids = torch.randint(0, rows, (int(lengths.sum()),), generator=dice)
    grad = torch.randn(8, 2 * dim + 1, generator=dice)
    return GradientRecord(
        0, grad, ids, offsets, None, (7, 7), (dim, dim), (0, 8), (8, 8), (1, dim + 1), (2 * dim + 1,) * 2, (0, 0)
    )  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 9])
@pytest.mark.parametrize("dim", [1, 3, 64])
def test_exact_shares_have_the_bits_of_sums_over_all_bags(size: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 11

    def fn(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        record = record_of(group.rank, rows=rows, dim=dim, empty=group.rank == 1)
        tables = [ReplicaTable(7, rows, dim, [0, 1])]
        rows_U, grads_UD = sum_rows(exchange_replica_gradients(group, range(size), record, tables, exact=True)())
        order = rows_U.argsort()
        return rows_U[order], grads_UD[order]

    found = {}
    for form in (GradientForm.BAGS, GradientForm.SHARES):
        monkeypatch.setattr(replicas, "choose_form", lambda *_, form=form, **__: form)
        found[form] = run_virtual_ranks(size, fn)
    want_U, want_UD = found[GradientForm.BAGS][0]
    for rows_U, grads_UD in found[GradientForm.SHARES]:
        assert torch.equal(rows_U, want_U)
        assert torch.equal(grads_UD, want_UD)


def test_replicas_do_not_send_a_copy_of_their_gradients_to_each_other() -> None:
    """Sixteen replicas whose batches read the same 20 rows: each sends its rows once, and its share of the sums."""
    size, dim = 16, 8

    def fn(group: Group) -> int:
        ids = torch.arange(20)
        record = GradientRecord(
            0, torch.ones(20, dim), ids, None, None, (7,), (dim,), (0,), (20,), (0,), (dim,), (0,)
        )  # fmt: skip
        group.traffic.reset()
        agreed = exchange_replica_gradients(
            group, range(size), record, [ReplicaTable(7, 10**6, dim, [0])], exact=False
        )()
        assert torch.equal(sum_rows(agreed)[1], torch.full((20, dim), float(size)))
        return sum(sum(sent.bytes) for sent in group.traffic.table() if sent.name == "replica gradients")

    sent = run_virtual_ranks(size, fn)
    copies = 20 * dim * 4 * (size - 1)
    assert sum(sent) <= 2 * 20 * dim * 4 * size
    assert max(sent) < copies / 4
