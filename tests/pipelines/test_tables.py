"""Cached tables and managed collision in pipelines: the bits of the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.pipelines.pipeline_models import Clicks, batch_of, dense_optimizer, pipelined, plain_loop
from tests.sharding.managed_models import build, local_batch, sizes_of
from tilerec.comms.group import Group
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.pipelines import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist, TrainPipelineSparseDistLite
from tilerec.planner import row_wise
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.cache import CacheParams
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding
from tilerec.testing import run_virtual_ranks

CPU = torch.device("cpu")
BOTH = [TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist]


def _cached(group: Group) -> Any:
    model = Clicks()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    apply_optimizer_in_backward(RowWiseAdagrad, list(model.tables.parameters()), {"lr": 0.1})
    of = ParameterSharding("row_wise", "fused_uvm_caching", cache_params=CacheParams(load_factor=0.9))
    shard(model, plan={"tables": {"t": of, "u": of}}, mesh=group)
    return model


def _compare_cached(group: Group, make: Any) -> None:
    batches = [batch_of(100 * group.rank + k, 2) for k in range(8)]
    model = _cached(group)
    plain_loop(model, dense_optimizer(model), iter(batches))
    wanted = full_state_dict(model)
    model = _cached(group)
    pipelined(make(model, dense_optimizer(model), CPU), iter(batches))
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("make", BOTH)
def test_cached_tables(make: Any) -> None:
    run_virtual_ranks(2, _compare_cached, make)


class Managed(nn.Module):
    """Tables with managed ids; the batch is the features."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.tables = build(policy)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        out, remapped = self.tables(features)
        return (out.values() ** 2).sum() / 64, remapped.values()


def _compare_managed(group: Group, policy: str, make: Any) -> None:
    batches = [local_batch(step % 4, group, sizes_of(2)) for step in range(8)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def model_of() -> Managed:
        model = Managed(policy)
        shard(model, plan=row_wise(), mesh=group)
        return model

    model = model_of()
    expected = plain_loop(model, optimizer, iter(batches))
    wanted = full_state_dict(model)
    model = model_of()
    pipeline = make(model, optimizer, CPU)
    found = pipelined(pipeline, iter(batches))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for name, value in full_state_dict(model).items():
        assert torch.equal(value, wanted[name]), name
    reports = {report.collection: report for report in pipeline.report()}
    assert reports["tables"].paths == ("the batch itself",)
    assert reports["tables"].ahead == 7


@pytest.mark.parametrize("make", [*BOTH, TrainPipelineSparseDistLite])
@pytest.mark.parametrize("policy", ["lru and lfu, shared rows", "rejected and admitted late"])
def test_managed_ids(policy: str, make: Any) -> None:
    run_virtual_ranks(2, _compare_managed, policy, make)
