"""2D parallelism on a GPU: gloo with several ranks that share the device, against one process on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cuda.sizes import size
from tests.cuda.test_sharded import STEPS, batch, model, whole_after_training
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.two_d.dmp_collection import DMPCollection
from tilerec.planner.helpers import column_wise, row_wise
from tilerec.sharding.changed_rows import WEIGHTS, ChangedRows, changed_rows_of
from tilerec.spec.optimizer import SGD
from tilerec.testing.batches import concat_batches
from tilerec.testing.ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

NAMES = ("rows", "columns", "copies")


def train(sync: Any) -> list[Tensor]:
    rank = torch.distributed.get_rank()
    module = model()
    if sync == "average":
        apply_optimizer_in_backward(SGD(lr=0.01), list(module.parameters()), replace=True)
    plan = {"rows": row_wise(), "columns": column_wise(ranks=[0, 1]), "copies": row_wise()}
    interval = 1 if sync == "average" else None
    dmp = DMPCollection(module, "cuda", plan, 4, 2, sync=sync, sync_interval=interval)
    for step in range(STEPS):
        (dmp(batch(rank, step).to("cuda")).values().square().sum() * 4).backward()
    dmp.sync()
    state = full_state_dict(dmp)
    assert all(value.is_cuda for value in state.values())
    return [state[f"embedding_bags.{name}.weight"].cpu() for name in NAMES]


def test_exact_replicas_on_a_gpu_equal_one_process_on_the_cpu() -> None:
    want = whole_after_training(4)
    with Ranks(4, backend="gloo", timeout_s=size(60, 600)) as ranks:
        for got in ranks.run(train, "exact"):
            for own, table in zip(got, want, strict=True):
                torch.testing.assert_close(own, table, rtol=0, atol=1e-5)


def test_averaged_sgd_on_a_gpu_equals_one_process_on_the_cpu() -> None:
    module = model()
    apply_optimizer_in_backward(SGD(lr=0.01), list(module.parameters()), replace=True)
    for step in range(STEPS):
        out = module(concat_batches([batch(rank, step) for rank in range(4)])).values()
        out.square().sum().backward()
    want = [getattr(module.embedding_bags, name).weight.detach() for name in NAMES]
    with Ranks(4, backend="gloo", timeout_s=size(60, 600)) as ranks:
        for got in ranks.run(train, "average"):
            for own, table in zip(got, want, strict=True):
                torch.testing.assert_close(own, table, rtol=0, atol=1e-5)


def test_touched_rows_that_were_counted_are_listed_without_waiting() -> None:
    own = ChangedRows(1000, torch.device("cuda"))
    own.mark(torch.tensor([7, 990, 7, 8], device="cuda"))
    count = int(own.count_rows(WEIGHTS))
    torch.cuda.set_sync_debug_mode("error")
    rows = own.rows(WEIGHTS, count)
    torch.cuda.set_sync_debug_mode("default")
    assert rows.tolist() == own.rows().tolist() == [7, 8, 990]
    listed, beside = changed_rows_of([own, own], WEIGHTS, [torch.tensor(5, device="cuda"), torch.tensor(6)])
    assert [rows.tolist() for rows in listed] == [[7, 8, 990]] * 2
    assert beside == [5, 6]
