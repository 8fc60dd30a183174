"""Reports of kernels: raised when they have arrived, in order, and used again when nothing was wrong.

There is no GPU here: events, streams and captures are stood in for, and a "kernel" writes into its report.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.ops.runtime import readback as later
from tilerec.ops.runtime.triton import reports
from tilerec.ops.runtime.triton.reports import new_report, post, raise_all, raise_due

CPU = torch.device("cpu")


class Gpu:
    """What reports ask of CUDA. Copies have arrived when `run` is called."""

    def __init__(self) -> None:
        self.capturing = False
        self.stream = 0
        self.done = 0
        self.recorded = 0
        self.made: list[int] = []
        self.cuda_stream = 0

    def run(self) -> None:
        self.done = self.recorded

    def event(self) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device) -> Gpu:
        self.cuda_stream = self.stream
        return self

    def is_capturing(self) -> bool:
        return self.capturing

    def synchronize(self, device: torch.device) -> None:
        self.run()


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.number = gpu, 0

    def record(self, stream: Any) -> None:
        self.gpu.recorded += 1
        self.number = self.gpu.recorded

    def query(self) -> bool:
        return self.number <= self.gpu.done


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu, made = Gpu(), reports._made

    def count(number: int, device: torch.device) -> list[Tensor]:
        gpu.made.append(number)
        return made(number, device)

    monkeypatch.setattr(reports, "_DEVICES", defaultdict(reports._Device))
    monkeypatch.setattr(reports, "_REPORTS", later.AsyncReadback(adds=False))
    monkeypatch.setattr(reports, "_made", count)
    monkeypatch.setattr(reports, "current_stream", lambda: gpu.stream)
    for module in (later, reports):
        monkeypatch.setattr(module, "runs_synchronously", lambda device: False)
    monkeypatch.setattr(later, "_new_copy", lambda size: later._Copy(later.zeros(1, size, CPU)[0], gpu.event()))
    monkeypatch.setattr(torch.cuda, "current_stream", gpu.current_stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", gpu.is_capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    return gpu


def fail(a: int, b: int, c: int) -> None:
    raise ValueError(f"{a} {b} {c}")


def kernel(*numbers: int) -> Tensor:
    """A report, taken with these numbers if there are any."""
    report = new_report(CPU)
    assert report.tolist() == [0, 0, 0, 0]
    if numbers:
        report.copy_(torch.tensor([1, *numbers]))
    post(report, fail)
    return report


def test_interpreted_kernels_raise_at_once() -> None:
    kernel()
    with pytest.raises(ValueError, match="7 8 9"):
        kernel(7, 8, 9)
    raise_due(CPU)
    raise_all(CPU)


def test_an_error_is_raised_when_it_has_arrived_and_once(gpu: Gpu) -> None:
    kernel(1, 2, 3)
    raise_due(CPU)  # still on its way
    gpu.run()
    with pytest.raises(ValueError, match="1 2 3"):
        raise_due(CPU)
    raise_due(CPU)
    raise_all(CPU)


def test_waiting_raises_what_is_under_way_in_order(gpu: Gpu) -> None:
    kernel(1, 1, 1)
    kernel()
    kernel(2, 2, 2)
    for message in ("1 1 1", "2 2 2"):
        with pytest.raises(ValueError, match=message):
            raise_all(CPU)
    raise_all(CPU)


def test_steps_without_errors_use_the_same_reports(gpu: Gpu) -> None:
    for _ in range(1000):
        raise_due(CPU)
        kernel()
        gpu.run()
    assert gpu.made == [reports._BLOCK]
    raise_due(CPU)
    assert len(reports._REPORTS._devices[CPU].copies[4]) == 1


def test_reports_under_way_are_not_used_again(gpu: Gpu) -> None:
    seen = [kernel().data_ptr() for _ in range(3 * reports._BLOCK)]
    assert len(set(seen)) == len(seen)


def test_a_taken_report_is_not_used_again(gpu: Gpu) -> None:
    """Its kernel's stream may still be writing zeros into it."""
    taken = kernel(1, 2, 3).data_ptr()
    with pytest.raises(ValueError, match="1 2 3"):
        raise_all(CPU)
    for _ in range(200):
        assert kernel().data_ptr() != taken
        raise_all(CPU)


def test_reports_stay_on_their_stream(gpu: Gpu) -> None:
    first = kernel().data_ptr()
    gpu.run()
    raise_due(CPU)
    gpu.stream = 1
    others = {kernel().data_ptr() for _ in range(2 * reports._BLOCK)}
    assert first not in others
    gpu.stream = 0
    assert kernel().data_ptr() == first


def test_reports_made_in_inference_mode_are_used_again_outside(gpu: Gpu) -> None:
    with torch.inference_mode():
        kernel()
        raise_all(CPU)
    kernel(1, 2, 3)
    with pytest.raises(ValueError, match="1 2 3"):
        raise_all(CPU)
    with torch.inference_mode():
        own = torch.tensor([1, 4, 5, 6])
        post(own, fail)
    with pytest.raises(ValueError, match="4 5 6"):
        raise_all(CPU)
    raise_all(CPU)


def test_a_report_that_an_op_made_itself_is_left_alone(gpu: Gpu) -> None:
    own = torch.zeros(4, dtype=torch.int64)
    post(own, fail)
    raise_all(CPU)
    assert all(kernel().data_ptr() != own.data_ptr() for _ in range(70))


def test_replays_of_a_graph_are_looked_at(gpu: Gpu) -> None:
    gpu.capturing = True
    report = kernel()
    raise_due(CPU)
    gpu.capturing = False
    for replay in range(3):
        raise_all(CPU)
        report.copy_(torch.tensor([1, replay, 0, 0]))
        with pytest.raises(ValueError, match=f"{replay} 0 0"):
            raise_all(CPU)
        assert report.tolist() == [0, 0, 0, 0]
    assert all(kernel().data_ptr() != report.data_ptr() for _ in range(70))


def test_a_graphs_report_is_on_its_way_once(gpu: Gpu) -> None:
    gpu.capturing = True
    kernel()
    gpu.capturing = False
    for _ in range(50):
        raise_due(CPU)
    assert len(reports._REPORTS._devices[CPU].sent) == 1


def test_a_look_costs_as_much_however_many_ops_were_captured(gpu: Gpu) -> None:
    """Some are asked at a look, in turn; whoever waits asks all."""
    gpu.capturing = True
    of_graphs = [kernel() for _ in range(3 * later.OPS_PER_POLL)]
    gpu.capturing = False
    of_graphs[-1].copy_(torch.tensor([1, 7, 0, 0]))
    for look in range(3):
        before = gpu.recorded
        raise_due(CPU)
        assert gpu.recorded - before == later.OPS_PER_POLL, look
        gpu.run()
    with pytest.raises(ValueError, match="7 0 0"):
        raise_due(CPU)
    of_graphs[5].copy_(torch.tensor([1, 8, 0, 0]))
    with pytest.raises(ValueError, match="8 0 0"):
        raise_all(CPU)


def test_a_graph_takes_a_report_that_is_free_on_another_stream(gpu: Gpu) -> None:
    """One made under capture is filled with zeros at every replay, and forgets what the one before it found."""
    kernel()
    gpu.run()
    raise_due(CPU)
    gpu.stream, gpu.capturing = 1, True
    of_graph = {kernel().data_ptr() for _ in range(reports._BLOCK)}
    assert gpu.made == [reports._BLOCK]
    assert len(of_graph) == reports._BLOCK
    kernel()
    assert gpu.made == [reports._BLOCK, 1]
    gpu.stream, gpu.capturing = 0, False
    assert kernel().data_ptr() not in of_graph
