"""`StagedTrainPipeline`: stages of the user's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tilerec.errors import ConfigError
from tilerec.pipelines import PipelineStage, StagedTrainPipeline


def _stages(log: list[str], count: int) -> list[PipelineStage]:
    def stage(index: int) -> PipelineStage:
        def run(value: int) -> int:
            log.append(f"{index}({value % 100})")
            return value + 100

        return PipelineStage(
            f"stage {index}",
            run,
            fill_callback=lambda: log.append(f"filled {index}"),
            data_exhausted_callback=lambda: log.append(f"ended {index}"),
        )

    return [stage(index) for index in range(count)]


def _drain(pipeline: StagedTrainPipeline, values: Iterator[int]) -> list[int]:
    found = []
    while (value := pipeline.progress(values)) is not None:
        found.append(value)
    return found


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("count", [0, 1, 3, 6])
def test_every_batch_runs_through_every_stage_in_order_and_epochs_repeat(stages: int, count: int) -> None:
    pipeline = StagedTrainPipeline(_stages([], stages))
    for _ in range(2):
        assert _drain(pipeline, iter(range(count))) == [100 * stages + k for k in range(count)]


def test_stages_run_ahead_of_the_batch_that_is_returned_and_callbacks_come_once() -> None:
    log: list[str] = []
    pipeline, values = StagedTrainPipeline(_stages(log, 2)), iter(range(3))
    assert pipeline.progress(values) == 200
    assert log == ["0(0)", "filled 0", "1(0)", "filled 1", "0(1)", "1(1)", "0(2)"]
    assert _drain(pipeline, values) == [201, 202]
    assert log[7:] == ["1(2)", "ended 0", "ended 1"]


def test_a_flush_returns_what_is_in_flight_before_more_is_read() -> None:
    read: list[int] = []
    ends: list[int] = []

    def values() -> Iterator[int]:
        for k in range(6):
            read.append(k)
            yield k

    pipeline = StagedTrainPipeline(_stages([], 3), on_flush_end=lambda: ends.append(len(read)))
    source = values()
    assert pipeline.progress(source) == 300
    before = len(read)
    pipeline.set_flush(True)
    assert [pipeline.progress(source) for _ in range(before - 1)] == [300 + k for k in range(1, before)]
    assert (len(read), ends) == (before, [])
    assert pipeline.progress(source) == 300 + before
    assert ends == [before]


def test_a_stage_that_raises_loses_its_batch_only() -> None:
    def run(value: int) -> int:
        if value == 102:
            raise ArithmeticError("two")
        return value

    stages = [*_stages([], 1), PipelineStage("check", run)]
    pipeline, values = StagedTrainPipeline(stages), iter(range(5))
    found: list[int | None] = [pipeline.progress(values)]
    while found[-1] is not None:
        try:
            found.append(pipeline.progress(values))
        except ArithmeticError:
            found.append(-1)
    assert sorted(one for one in found if one is not None) == [-1, 100, 101, 103, 104]


def test_stages_need_names_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"got stages \[\]; expected at least one stage"):
        StagedTrainPipeline([])
    stage = PipelineStage("copy", lambda value: value)
    with pytest.raises(ConfigError, match=r"\['copy', 'copy'\]"):
        StagedTrainPipeline([stage, stage])
