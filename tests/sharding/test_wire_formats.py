"""Formats of messages follow from the layout: never from the tables that a rank happens to hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilerec.comms.group import Group
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops.gradient.definition import GradientSink, deliver
from tilerec.ops.gradient.record import GradientRecord
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.norm import clip_grad_norm_
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import column_wise, data_parallel, table_wise
from tilerec.spec.optimizer import SGD, RowWiseAdagrad
from tilerec.spec.table import DataType, EmbeddingBagConfig
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.virtual import run_virtual_ranks


def model(optimizer: Any = None) -> nn.ModuleDict:
    """A float64 collection and a float32 one."""
    made = nn.ModuleDict(
        {
            "a": EmbeddingBagCollection([EmbeddingBagConfig(50, 16, "a", DataType.FP64, ["f"])]),
            "b": EmbeddingBagCollection([EmbeddingBagConfig(50, 16, "b", DataType.FP32, ["f"])]),
        }
    )
    with torch.no_grad():
        for parameter in made.parameters():  # ranks share torch's generator
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) % 7)
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, made.parameters())
    return made


def batches(size: int) -> list[Any]:
    """Per step, one for each rank."""
    return [[random_batch(["f"], 50, 6, seed=10 * step + rank) for rank in range(size)] for step in range(2)]


def stepped(module: nn.Module, steps: list[Any], divisor: int = 1) -> None:
    """Two forwards of both collections, one backward."""
    loss = sum(module[name](batch).values().sum() for batch in steps for name in ("a", "b")) / divisor
    loss.backward()


PLANS = {
    "copies of the float32 tile": (lambda: data_parallel(), SGD(lr=1.0)),
    "its columns on all ranks": (lambda: column_wise(), RowWiseAdagrad(lr=1.0)),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_float64_table_on_one_rank_changes_no_other_tables_messages(plan: str) -> None:
    cut, optimizer = PLANS[plan]
    whole = model(optimizer)
    stepped(whole, [concat_batches(own) for own in batches(2)], 2)

    def fn(group: Group) -> dict[str, Tensor]:
        own = model(optimizer)
        shard(own, {"a": {"a": table_wise(rank=0)}, "b": {"b": cut()}}, group)
        stepped(own, [step[group.rank] for step in batches(2)])
        return {name: value.clone() for name, value in full_state_dict(own).items()}

    for state in run_virtual_ranks(2, fn):
        torch.testing.assert_close(state, dict(whole.state_dict()))


class _Sink(GradientSink):
    """Keeps the records that it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[GradientRecord] = []

    def batch_key(self) -> int:
        return 0

    def take(self, sinks: Any, record: GradientRecord) -> None:
        for sink in sinks:
            sink.taken.append(record)


def record(serial: int, sink: GradientSink, dtype: torch.dtype, weighted: bool) -> GradientRecord:
    """One id of a table with one column."""
    weights = torch.ones(1, dtype=dtype) if weighted else None
    return GradientRecord(
        serial, torch.ones(1, dtype=dtype), torch.tensor([3]), torch.tensor([0, 1]), weights, (sink.handle,), (1,),
        (0,), (1,), (0,), (1,), (0,),
    )  # fmt: skip


@pytest.mark.parametrize("other", [(torch.float64, False), (torch.float32, True)], ids=["float64", "weighted"])
def test_merged_records_are_of_tables_with_one_format(other: tuple[torch.dtype, bool]) -> None:
    plain, another = _Sink(), _Sink()
    deliver(
        [record(i, sink, *kind) for i, (sink, kind) in enumerate(
            [(plain, (torch.float32, False)), (another, other)] * 2)]
    )  # fmt: skip
    (own,), (theirs,) = plain.taken, another.taken
    assert own is not theirs
    assert own.grad.dtype == torch.float32
    assert theirs.grad.dtype == other[0]


def test_gradient_norms_of_several_dtypes_add_up() -> None:
    """One rank holds float64 gradients, the other float32 ones."""
    whole = model()
    stepped(whole, [concat_batches(own) for own in batches(2)], 2)
    expected = clip_grad_norm_(list(whole.parameters()), 1.0)

    def fn(group: Group) -> Tensor:
        own = model()
        shard(own, {"a": {"a": table_wise(rank=0)}, "b": {"b": table_wise(rank=1)}}, group)
        stepped(own, [step[group.rank] for step in batches(2)])
        return clip_grad_norm_(list(own.parameters()), 1.0)

    for norm in run_virtual_ranks(2, fn):
        torch.testing.assert_close(norm, expected)
