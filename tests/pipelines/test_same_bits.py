"""A pipeline trains to the same bits as the plain loop."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

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
from tilerec.comms.process import ProcessGroupComms
from tilerec.pipelines import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)
from tilerec.testing import run_ranks, run_virtual_ranks

TRAINING = [
    TrainPipelineBase, TrainPipelineSparseDistLite, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist
]  # fmt: skip
KINDS = ["table_wise", "column_wise", "row_wise", "table_column_wise", "data_parallel", "grid_shard"]


def _compare(group: Group | None, kind: str, pipelines: list[Any], steps: int) -> None:
    rank = 0 if group is None else group.rank
    batches = [batch_of(1000 * rank + step, 1 + step % 5) for step in range(steps)]
    model = model_of(group, kind)
    expected = plain_loop(model, dense_optimizer(model), iter(batches))
    wanted = weights_of(model)
    for make in pipelines:
        model = model_of(group, kind)
        pipeline = make(model, dense_optimizer(model), torch.device("cpu"))
        found = pipelined(pipeline, iter(batches))
        assert len(found) == steps
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (make, kind)
        assert_same(weights_of(model), wanted)
        if group is not None and make is not TrainPipelineBase:
            (report,) = pipeline.report()
            assert (report.paths, report.ahead, report.in_forward) == ((".features",), steps - 1, 1)
    model.eval()
    with torch.no_grad():
        expected = [model(batch)[1] for batch in batches]
    found = pipelined(EvalPipelineSparseDist(model, None, torch.device("cpu")), iter(batches))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_one_process_without_sharding() -> None:
    _compare(None, "", TRAINING, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_virtual_ranks(ranks: int, kind: str) -> None:
    run_virtual_ranks(ranks, _compare, kind, TRAINING, 8)


def test_four_virtual_ranks() -> None:
    run_virtual_ranks(4, _compare, "row_wise", [TrainPipelineSparseDist], 6)


def _processes(kinds: list[str], steps: int) -> None:
    for kind in kinds:
        _compare(ProcessGroupComms(), kind, TRAINING, steps)


def test_processes() -> None:
    run_ranks(2, _processes, ["row_wise", "column_wise"], 10)


@pytest.mark.nightly
@pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes: nightly")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.timeout(1800)
def test_two_hundred_steps_of_every_pipeline_and_tiling(ranks: int) -> None:
    run_ranks(ranks, _processes, KINDS, 200, timeout_s=1500)
