"""Sharded batches that are sorted ahead, on a stream beside the one that trains: the same bits under every tiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.cuda.sizes import size
from tests.cuda.test_sharded import KEYS, ROWS, loss_of, model, sequences
from tilerec.ops.update.triton import backend as update
from tilerec.ops.update.triton import row_sums
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.parallel.two_d.dmp_collection import DMPCollection
from tilerec.spec.optimizer import SGD, Adam
from tilerec.spec.plan import ParameterSharding
from tilerec.testing.batches import random_batch
from tilerec.testing.ranks import Ranks

STEPS = 2
TABLES = ("rows", "columns", "copies")
Trained = tuple[list[Tensor], list[bool]]


def noted() -> list[bool]:
    """Per update, or sum of rows, from now on, whether an order was there."""
    real = getattr(update.reuse_order, "real", update.reuse_order)
    taken: list[bool] = []

    def reuse_order(*args: Any) -> Any:
        taken.append((order := real(*args)) is not None)
        return order

    reuse_order.real = real  # type: ignore[attr-defined]
    update.reuse_order = row_sums.reuse_order = reuse_order
    return taken


def trained(module: Any, tables: Any, rank: int, ahead: bool) -> Trained:
    """`tables`: the collection in the module."""
    sorts, side = noted(), torch.cuda.Stream()
    coming: list[Any] = [random_batch(KEYS, ROWS, 3 + 2 * rank, seed=10 * at + rank).to("cuda") for at in range(STEPS)]
    torch.cuda.synchronize()

    def prefetched(at: int) -> None:
        if ahead and at < STEPS:
            with torch.cuda.stream(side):
                coming[at] = tables.prefetch(coming[at])

    prefetched(0)
    for at in range(STEPS):
        out = module(coming[at])
        prefetched(at + 1)
        (loss_of(out) if isinstance(out, dict) else out.values().square().sum()).backward()
    return [value.cpu() for value in full_state_dict(module).values()], sorts


def train(kind: str, each_id: bool, ahead: bool) -> Trained:
    module = sequences() if each_id else model()  # by row-wise Adagrad: where columns are cut, sums come first
    tables = list(module.parameters())
    apply_optimizer_in_backward(SGD(lr=0.1), tables[:1], replace=True)
    apply_optimizer_in_backward(Adam(lr=0.1), tables[1:2], replace=True)
    module.cuda()
    plan = {name: ParameterSharding(kind, ranks=[0] if kind == "table_wise" else None) for name in TABLES}
    shard(module, plan=plan)
    return trained(module, module, torch.distributed.get_rank(), ahead)


KINDS = [("row_wise", True), ("table_wise", False), ("column_wise", False), ("data_parallel", False)]


@pytest.mark.parametrize(("kind", "each_id"), KINDS)
def test_batches_are_sorted_ahead_under_every_tiling(kind: str, each_id: bool) -> None:
    """But where replicas tell their ids with the gradients: theirs are sorted then."""
    with Ranks(2, backend="gloo", timeout_s=size(60, 600)) as ranks:
        plain, ahead = (ranks.run(train, kind, each_id, ahead) for ahead in (False, True))
    for rank, ((want, sorts), (got, made)) in enumerate(zip(plain, ahead, strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert not any(sorts)
        assert made == [kind != "data_parallel"] * len(sorts)
        assert made or (kind == "table_wise" and rank == 1)


def train_2d(ahead: bool) -> Trained:
    rank, module = torch.distributed.get_rank(), model()
    apply_optimizer_in_backward(SGD(lr=0.01), list(module.parameters()), replace=True)
    plan = {name: ParameterSharding("row_wise") for name in TABLES}
    dmp = DMPCollection(module, "cuda", plan, 4, 2, sync="average", sync_interval=1)
    return trained(dmp, dmp.module, rank, ahead)


def test_averaged_replicas_are_sorted_ahead_too() -> None:
    with Ranks(4, backend="gloo", timeout_s=size(60, 600)) as ranks:
        for (want, _), (got, made) in zip(ranks.run(train_2d, False), ranks.run(train_2d, True), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            assert made
            assert all(made)
