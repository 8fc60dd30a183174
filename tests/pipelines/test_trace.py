"""Traces: a file that Perfetto opens, stages by name and rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.pipelines.pipeline_models import batch_of, dense_optimizer, model_of, pipelined
from tilerec.comms.group import Group
from tilerec.errors import InputError
from tilerec.file_kind import TRACE
from tilerec.pipelines import TrainPipelineSparseDist
from tilerec.testing import run_virtual_ranks


def _write(group: Group, path: Path) -> None:
    model = model_of(group)
    pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), torch.device("cpu"))
    assert pipeline.trace is None
    pipeline.start_trace()
    pipelined(pipeline, (batch_of(k) for k in range(4)))
    pipeline.write_trace(path)


def test_a_trace_holds_the_stages_of_every_rank_by_name(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_virtual_ranks(2, _write, path)
    assert TRACE.has(path)
    trace = json.loads(path.read_text())
    events = trace["traceEvents"]
    names = {(e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {(0, "rank 0"), (1, "rank 1")}
    for rank in (0, 1):
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == rank]
        trained = [event["args"]["batch"] for event in spans if event["name"] == "forward"]
        assert trained == [0, 1, 2, 3]
        stages = {"read", "copy", "finish_route", "route", "forward", "backward", "update"}
        assert {event["name"] for event in spans} == stages
        assert all(event["dur"] >= 0 and event["ts"] > 0 for event in spans)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_a_trace_that_was_not_started_is_not_written(tmp_path: Path) -> None:
    model = model_of()
    pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), torch.device("cpu"))
    pipelined(pipeline, iter([batch_of(0)]))
    with pytest.raises(InputError, match=r"write_trace: got no recorded stages; expected a call of start_trace before"):
        pipeline.write_trace(tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())
