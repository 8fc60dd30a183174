"""Submitting row gradients: once per pass, in the order of the forwards, dropped with their sinks."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Sequence

import pytest
import torch
from torch import Tensor

from tilerec.errors import CommsError, TilerecError
from tilerec.ops.gradient import definition as gradient
from tilerec.ops.gradient.definition import (
    GradientSink,
    bag_starts,
    features_of,
    new_ticket,
    pooled_blocks,
    sum_rows,
    sum_rows_of_tables,
)
from tilerec.ops.gradient.record import GradientRecord

IDS, OFFSETS = torch.tensor([1, 2, 1]), torch.tensor([0, 1, 3])


class Recorder(GradientSink):
    """Keeps what it takes."""

    def __init__(self, key: Hashable = None) -> None:
        super().__init__()
        self.key = self.handle if key is None else key
        self.taken: list[tuple[int, dict[int, float]]] = []

    def batch_key(self) -> Hashable:
        return self.key

    def take(self, sinks: Sequence[GradientSink], record: GradientRecord) -> None:
        for sink in sinks:
            own = record.only([f for f, handle in enumerate(record.sinks) if handle == sink.handle])
            rows, grads = sum_rows(own)
            sums = dict(zip(rows.tolist(), grads[:, 0].tolist(), strict=True))
            sink.taken.append((len(sinks), sums))  # type: ignore[attr-defined]


def lookup(sinks: list[GradientSink], tables: list[Tensor]) -> Tensor:
    handles = torch.tensor([sink.handle for sink in sinks])
    features = list(range(len(tables)))
    out, _ = torch.ops.tilerec.pooled_lookup(
        tables, handles, IDS, OFFSETS, None, features, [0] * len(tables), [0] * len(tables), [2], torch.float32,
        ",".join(f"f@t{t}" for t in features),
    )  # fmt: skip
    return out


def table() -> Tensor:
    return torch.ones(4, 1, requires_grad=True)


def test_a_sink_takes_the_sums_when_the_pass_ends() -> None:
    sink = Recorder()
    out = lookup([sink], [table()])
    leaf = torch.ones(2, 1, requires_grad=True)
    leaf.register_post_accumulate_grad_hook(lambda _: seen.append(len(sink.taken)))
    seen: list[int] = []
    (out * torch.tensor([[1.0], [10.0]]) + leaf).sum().backward()
    assert sink.taken == [(1, {1: 11.0, 2: 10.0})]
    assert seen == [0]


def test_sinks_of_one_key_take_together() -> None:
    sinks = [Recorder("same"), Recorder("same"), Recorder()]
    lookup(sinks, [table(), table(), table()]).sum().backward()
    assert [len(s.taken) for s in sinks] == [1, 1, 1]
    assert [s.taken[0][0] for s in sinks] == [2, 2, 1]


def test_several_lookups_of_a_table_are_merged() -> None:
    sink, other = Recorder(), Recorder()
    leaf = table()
    first, second = lookup([sink, other], [leaf, table()]), lookup([sink], [leaf])
    (first.sum() + 100 * second.sum()).backward()
    assert sink.taken == [(1, {1: 202.0, 2: 101.0})]
    assert other.taken == [(1, {1: 2.0, 2: 1.0})]


def test_passes_are_separate() -> None:
    sink = Recorder()
    first, second = lookup([sink], [table()]), lookup([sink], [table()])
    first.sum().backward()
    second.sum().backward()
    assert len(sink.taken) == 2


def test_a_backward_inside_a_backward_is_a_pass_of_its_own() -> None:
    """Activation checkpointing and hooks run the engine inside the engine."""
    outer, inner = Recorder(), Recorder()
    scale = torch.ones(1, requires_grad=True)
    first = lookup([outer], [table()])  # its backward runs last, that of `out` first
    out = lookup([outer], [table()]) * 0 + first

    def hook(grad: Tensor) -> None:
        with torch.enable_grad():
            lookup([inner], [table()]).sum().backward()

    first.register_hook(hook)
    (out * scale).sum().backward()
    assert outer.taken == [(1, {1: 2.0, 2: 1.0})]
    assert inner.taken == [(1, {1: 2.0, 2: 1.0})]


def test_a_sink_that_is_gone_takes_nothing() -> None:
    sink = Recorder()
    out = lookup([sink], [table()])
    del sink
    gc.collect()
    out.sum().backward()


def test_submitting_outside_a_pass_delivers_at_once() -> None:
    sink = Recorder()
    handles, ticket = torch.tensor([sink.handle]), new_ticket()
    grad = torch.tensor([[1.0], [10.0]])
    torch.ops.tilerec.submit_pooled_(handles, ticket, grad, IDS, OFFSETS, None, [1], [0], [0], [0], [2])
    assert sink.taken == [(1, {1: 11.0, 2: 10.0})]
    with pytest.raises(RuntimeError, match="ran a second time"):
        torch.ops.tilerec.submit_pooled_(handles, ticket, grad, IDS, OFFSETS, None, [1], [0], [0], [0], [2])


def test_bags_and_blocks_lie_where_the_docstrings_say() -> None:
    assert bag_starts([0, 2], [4]) == ([0, 8], [4, 4])
    assert bag_starts([0, 2], [4, 1, 2]) == ([0, 5], [4, 2])
    assert pooled_blocks([3, 5], [4, 4], uniform=True) == ([0, 3], [8, 8])
    assert pooled_blocks([3, 5], [4, 2], uniform=False) == ([0, 12], [3, 5])


def test_a_pass_that_is_asked_for_something_else_updates_nothing() -> None:
    sink, table = Recorder(), torch.ones(3, 1, requires_grad=True)
    sample_weights = torch.ones(3, requires_grad=True)
    handles = torch.tensor([sink.handle])
    out, _ = torch.ops.tilerec.pooled_lookup(
        [table], handles, IDS, OFFSETS, sample_weights, [0], [0], [0], [2], torch.float32, ""
    )
    (grad,) = torch.autograd.grad(out.sum(), [sample_weights])
    assert grad.tolist() == [1.0, 1.0, 1.0]
    assert not sink.taken


def test_a_leaf_that_autograd_grad_asks_for_gets_its_gradient_and_no_update() -> None:
    sinks, tables = [Recorder(), Recorder()], [torch.ones(3, 1, requires_grad=True) for _ in range(2)]
    (grad,) = torch.autograd.grad(lookup(sinks, tables).sum(), [tables[1]])
    assert grad.tolist() == [[0.0], [2.0], [1.0]]
    assert not sinks[0].taken
    assert not sinks[1].taken


def test_backward_with_inputs_updates_the_tables_among_them_only() -> None:
    sinks, tables = [Recorder(), Recorder()], [torch.ones(3, 1, requires_grad=True) for _ in range(2)]
    lookup(sinks, tables).sum().backward(inputs=[tables[0]])
    assert sinks[0].taken == [(1, {1: 2.0, 2: 1.0})]
    assert not sinks[1].taken
    assert tables[0].grad is None


def test_writing_into_the_batch_before_the_backward_is_an_error() -> None:
    sink, table, ids = Recorder(), torch.ones(3, 1, requires_grad=True), IDS.clone()
    out, _ = torch.ops.tilerec.pooled_lookup(
        [table], torch.tensor([sink.handle]), ids, OFFSETS, None, [0], [0], [0], [2], torch.float32, ""
    )
    ids.fill_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert not sink.taken


class Refuser(Recorder):
    """Takes, then raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def take(self, sinks: Sequence[GradientSink], record: GradientRecord) -> None:
        super().take(sinks, record)
        raise self.error


def test_a_sink_that_refuses_keeps_no_other_from_its_gradients() -> None:
    first, second = Refuser(TilerecError("row 1 is not finite")), Recorder()
    tables = [table(), table()]
    with pytest.raises(TilerecError, match="row 1 is not finite"):
        (lookup([first], tables[:1]) + lookup([second], tables[1:])).sum().backward()
    assert second.taken == [(1, {1: 2.0, 2: 1.0})]


def test_a_lost_peer_is_not_waited_for_again() -> None:
    first, second = Refuser(CommsError("rank 1 is gone")), Recorder()
    tables = [table(), table()]
    with pytest.raises(CommsError, match="rank 1 is gone"):
        (lookup([first], tables[:1]) + lookup([second], tables[1:])).sum().backward()
    assert second.taken == []


def test_sums_of_several_tables_are_each_of_them_alone() -> None:
    """Tables 7 (features 0 and 2), 8 (feature 1) and one whose sums nobody asks for (feature 3)."""
    grad = torch.randn(4, 12)
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), torch.randint(0, 4, (16,)).cumsum(0)))
    ids = torch.randint(0, 5, (int(offsets[-1]),))
    record = GradientRecord(
        0, grad, ids, offsets, None, (7, 8, 7, 9), (3, 4, 3, 2),
        (0, 4, 8, 12), (4, 4, 4, 4), (0, 3, 7, 10), (12,) * 4, (0,) * 4,
    )  # fmt: skip
    features = features_of(record, [8, 5, 7])
    assert features == {8: [1], 7: [0, 2]}
    sums = sum_rows_of_tables(record, list(features.values()))
    for own, (rows_U, grads_UD) in zip(features.values(), sums, strict=True):
        want_rows, want_grads = sum_rows(record.only(own))
        assert torch.equal(rows_U, want_rows)
        assert torch.equal(grads_UD, want_grads)
    assert sum_rows_of_tables(record, []) == []


def test_lookups_of_several_tables_are_merged_together() -> None:
    """Two tables of one key, of different widths, looked up twice; the first is looked up alone once more."""
    sinks = [Recorder("same"), Recorder("same")]
    narrow, wide = table(), torch.ones(4, 3, requires_grad=True)
    twice = [lookup(sinks, [narrow, wide]) for _ in range(2)]
    (twice[0].sum() + 10 * twice[1].sum() + 100 * lookup(sinks[:1], [narrow]).sum()).backward()
    assert sinks[0].taken == [(2, {1: 222.0, 2: 111.0})]
    assert sinks[1].taken == [(2, {1: 22.0, 2: 11.0})]


def test_an_optimizer_over_plain_parameters_writes_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of the tables made first are not disturbed by a step over parameters that are no tables."""

    class Read(Recorder):
        def about_to_write(self) -> None:
            raise AssertionError("the table is not stepped")

    table = Read()
    monkeypatch.setattr(table, "readers", {1: ()})
    monkeypatch.setattr(gradient, "_SINKS", dict.fromkeys(range(8), table))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    gradient._before_step(optimizer)
    optimizer.param_groups[0]["params"][0]._tilerec_sink = 5
    with pytest.raises(AssertionError, match="not stepped"):
        gradient._before_step(optimizer)
