"""Times of stages: each span counts, in pipelines with and without a trace, and in loops of the user."""

from __future__ import annotations

import time

import pytest
import torch

from tests.pipelines.pipeline_models import batch_of, dense_optimizer, model_of, pipelined
from tilerec.pipelines import PipelineStage, PrefetchTrainPipelineSparseDist, StagedTrainPipeline, StageTimes


class _Clock:
    """A clock that moves by one second at every reading."""

    def __init__(self) -> None:
        self.ns = 0

    def perf_counter_ns(self) -> int:
        self.ns += 10**9
        return self.ns


@pytest.fixture
def _ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter_ns", _Clock().perf_counter_ns)


@pytest.mark.usefixtures("_ticks")
def test_spans_add_up_until_they_are_taken() -> None:
    times = StageTimes()
    assert times.take() == {}
    for _ in range(3):
        with times.span("a"):
            pass
    with times.span("b"), times.span("a"):  # readings: b, a, a, b
        pass
    assert times.take() == {"a": 4.0, "b": 3.0}
    assert times.take() == {}


@pytest.mark.usefixtures("_ticks")
def test_a_stage_that_raises_counts_too() -> None:
    times = StageTimes()
    with pytest.raises(ValueError, match="bad"), times.span("a"):
        raise ValueError("bad")
    assert times.take() == {"a": 1.0}


@pytest.mark.parametrize("traced", [False, True])
def test_a_pipeline_times_every_stage_once_per_batch(traced: bool) -> None:
    model = model_of()
    pipeline = PrefetchTrainPipelineSparseDist(model, dense_optimizer(model), torch.device("cpu"))
    if traced:
        pipeline.start_trace()
    pipelined(pipeline, (batch_of(k) for k in range(4)))
    times = pipeline.times.take()
    assert set(times) == {"read", *(stage.name for stage in pipeline.stages)}
    assert all(seconds > 0 for seconds in times.values())
    assert pipeline.times.take() == {}
    if pipeline.trace is not None:
        spans = [event for event in pipeline.trace.events() if event["ph"] == "X"]
        for stage, seconds in times.items():
            traced_seconds = sum(event["dur"] for event in spans if event["name"] == stage) / 1e6
            assert traced_seconds >= seconds, "the trace's span is around the timed one"


@pytest.mark.usefixtures("_ticks")
def test_stages_of_the_user_are_timed_by_name() -> None:
    pipeline = StagedTrainPipeline([PipelineStage("double", lambda x: 2 * x), PipelineStage("add", lambda x: x + 1)])
    batches = iter([1, 2, 3])
    results = []
    while (result := pipeline.progress(batches)) is not None:
        results.append(result)
    assert results == [3, 5, 7]
    assert pipeline.times.take() == {"read": 4.0, "double": 3.0, "add": 3.0}  # the end is read, too
