"""Pipelines with compiled models: the bits of a plain loop, and routes ahead of the forward."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
import torch._dynamo.testing

from tests.pipelines.pipeline_models import (
    assert_same,
    batch_of,
    dense_optimizer,
    model_of,
    pipelined,
    plain_loop,
    weights_of,
)
from tilerec.comms.group import Group
from tilerec.parallel.compiled_model import compile_model
from tilerec.pipelines import TorchCompileConfig, TrainPipelinePT2, TrainPipelineSparseDist
from tilerec.testing.virtual import run_virtual_ranks

SIZES = (4, 6, 1, 5)
ONE_AT_A_TIME = threading.Lock()


def batches(rank: int = 0) -> list[Any]:
    return [batch_of(10 * step + rank, size) for step, size in enumerate(SIZES)]


def test_the_pipeline_compiles_at_its_step_and_trains_as_a_plain_loop_does() -> None:
    torch._dynamo.reset()
    seen: list[str] = []

    def transform(batch: Any) -> Any:
        seen.append("batch")
        return copy.copy(batch)

    def fn(group: Group) -> None:
        plain, model = model_of(group), model_of(group)
        want = plain_loop(plain, dense_optimizer(plain), iter(batches()))
        counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
        pipeline = TrainPipelinePT2(
            model, dense_optimizer(model), "cpu", transform, lambda _: seen.append("compile"),
            TorchCompileConfig(fullgraph=True, backend=counter, compile_on_iter=1),
        )  # fmt: skip
        got = pipelined(pipeline, iter(batches()))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert_same(weights_of(model), weights_of(plain))
        assert counter.frame_count == 1

    run_virtual_ranks(1, fn)
    assert seen == ["batch", "batch", "compile", "batch", "batch"]


def test_without_configs_the_model_stays_eager() -> None:
    model = model_of()
    pipeline = TrainPipelinePT2(model, dense_optimizer(model), "cpu", compile_configs=None)
    plain = model_of()
    want = plain_loop(plain, dense_optimizer(plain), iter(batches()))
    for a, b in zip(pipelined(pipeline, iter(batches())), want, strict=True):
        assert torch.equal(a, b)


def test_a_compiled_model_takes_the_batches_that_a_pipeline_has_routed() -> None:
    """Ids of a batch travel during the step before it."""
    torch._dynamo.reset()

    def fn(group: Group) -> tuple[int, int]:
        with ONE_AT_A_TIME:
            plain, model = model_of(group), model_of(group)
        want = plain_loop(plain, dense_optimizer(plain), iter(batches(group.rank)))
        compiled = compile_model(model, backend="aot_eager")
        pipeline = TrainPipelineSparseDist(compiled, dense_optimizer(model), "cpu")
        got = pipelined(pipeline, iter(batches(group.rank)))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert_same(weights_of(model), weights_of(plain))
        (report,) = pipeline.report()
        return report.ahead, report.in_forward

    assert run_virtual_ranks(1, fn) == [(3, 1)]
