"""Numbers that kernels leave on a device are used when they have arrived, in order, and nobody waits for them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops.runtime import readback as later
from tilerec.ops.runtime.readback import on_arrival, poll, wait_all
from tilerec.optim import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.storage.table_rows import NonFiniteGradientError

CPU = torch.device("cpu")


class Gpu:
    """A device whose copies arrive when `run` is called."""

    def __init__(self) -> None:
        self.capturing = False
        self.given: list[tuple[int, Callable[[], object]]] = []  # by stream, in order
        self.stream = self.made = 0

    def give(self, task: Callable[[], object]) -> None:
        self.given.append((self.stream, task))

    def run(self, stream: int | None = None) -> None:
        """What all streams were given, or one of them."""
        mine = [task for own, task in self.given if stream in (None, own)]
        self.given = [(own, task) for own, task in self.given if stream not in (None, own)]
        for task in mine:
            task()

    def new_copy(self, size: int) -> Any:
        self.made += 1
        return later._Copy(Host(self, size), Event(self))  # type: ignore[arg-type]


class Host:
    def __init__(self, gpu: Gpu, size: int) -> None:
        self.gpu, self.numbers = gpu, torch.full((size,), -99)

    def copy_(self, device: Tensor, non_blocking: bool) -> None:
        assert non_blocking
        now = device.clone()  # of what is there, in the stream's order
        self.gpu.give(lambda: self.numbers.copy_(now))

    def tolist(self) -> list[int]:
        return self.numbers.tolist()


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.done = gpu, True

    def record(self, stream: object) -> None:
        self.done = False
        self.gpu.give(lambda: setattr(self, "done", True))

    def query(self) -> bool:
        return self.done


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(later, "_NUMBERS", later.AsyncReadback(adds=True))
    monkeypatch.setattr(later, "runs_synchronously", lambda device: False)
    monkeypatch.setattr(later, "_new_copy", gpu.new_copy)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=gpu.stream))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.run())
    return gpu


def keep(seen: list[list[int]]) -> Callable[[list[int]], None]:
    return seen.append


def test_on_the_cpu_numbers_are_used_at_once() -> None:
    seen: list[list[int]] = []
    on_arrival(torch.tensor([1, 2, 3]), keep(seen))
    assert seen == [[1, 2, 3]]


def test_numbers_are_used_in_order_when_they_have_arrived(gpu: Gpu) -> None:
    seen: list[list[int]] = []
    on_arrival(torch.tensor([1]), keep(seen))
    on_arrival(torch.tensor([2, 3]), keep(seen))
    poll(CPU)
    assert seen == []
    gpu.run()
    poll(CPU)
    assert seen == [[1], [2, 3]]


def test_waiting_uses_all(gpu: Gpu) -> None:
    seen: list[list[int]] = []
    on_arrival(torch.tensor([1]), keep(seen))
    wait_all(CPU)
    wait_all(CPU)
    assert seen == [[1]]


def test_steps_use_the_same_memory_again(gpu: Gpu) -> None:
    for step in range(10):
        on_arrival(torch.tensor([step, 0]), keep([]))
        gpu.run()
        poll(CPU)
    assert gpu.made == 1


def test_an_error_leaves_the_others_for_the_next_time(gpu: Gpu) -> None:
    seen: list[list[int]] = []

    def fail(numbers: list[int]) -> None:
        raise RuntimeError(str(numbers))

    on_arrival(torch.tensor([1]), fail)
    on_arrival(torch.tensor([2]), keep(seen))
    gpu.run()
    with pytest.raises(RuntimeError, match=r"\[1\]"):
        poll(CPU)
    poll(CPU)
    assert seen == [[2]]


def test_who_looks_in_the_midst_of_a_look_takes_nothing_from_it(gpu: Gpu) -> None:
    seen: list[list[int]] = []
    on_arrival(torch.tensor([1]), keep(seen))
    gpu.run()
    on_arrival(torch.tensor([2]), keep(seen))  # on its way
    event = later._NUMBERS._devices[CPU].sent[0][0].copy.event
    query, asked = event.query, []

    def finalizer() -> bool:
        if not asked:
            asked.append(1)
            poll(CPU)
        return query()

    event.query = finalizer  # type: ignore[method-assign]
    poll(CPU)
    assert seen == [[1]]
    gpu.run()
    poll(CPU)
    assert seen == [[1], [2]]


def test_a_slow_stream_keeps_no_other_from_its_news(gpu: Gpu) -> None:
    seen: list[list[int]] = []
    for stream, number in ((1, 1), (2, 2), (1, 3), (2, 4)):
        gpu.stream = stream
        on_arrival(torch.tensor([number]), keep(seen))
    gpu.run(2)
    poll(CPU)
    assert seen == [[2], [4]]
    gpu.run()
    poll(CPU)
    assert seen == [[2], [4], [1], [3]]


class Captured:
    """A call that was captured: what it finds is there at every replay, and added as the graph says."""

    def __init__(self, gpu: Gpu, size: int, use: Callable[[list[int]], None]) -> None:
        self.found = torch.zeros(size, dtype=torch.int64)
        before = list(later._NUMBERS._devices[CPU].of_graphs)
        gpu.capturing = True
        on_arrival(self.found, use)
        poll(CPU)
        gpu.capturing = False
        (self.of_graph,) = [own for own in later._NUMBERS._devices[CPU].of_graphs if own not in before]
        self.of_graph.numbers.zero_()  # nothing runs in a capture

    def replay(self, *numbers: int) -> None:
        self.found.copy_(torch.tensor(numbers))
        later._added(self.of_graph.numbers, self.found)


def test_what_replays_leave_is_added_up_and_used_once_however_often_anybody_looks(gpu: Gpu) -> None:
    seen: list[list[int]] = []
    on_arrival(torch.tensor([0, -1]), keep([]))
    graph = Captured(gpu, 2, keep(seen))
    wait_all(CPU)
    assert seen == []  # no replay yet
    for numbers in ((2, 7), (0, -1), (1, 4), (0, -1)):
        graph.replay(*numbers)
    wait_all(CPU)
    assert seen == [[3, 4]]
    wait_all(CPU)
    assert seen == [[3, 4]]  # and not again at every step without a replay
    graph.replay(5, 6)
    gpu.run()
    poll(CPU)  # a copy of before; the next one is of now
    graph.replay(1, 9)
    gpu.run()
    poll(CPU)
    assert seen[1:] == [[5, 6]]
    wait_all(CPU)
    assert seen[1:] == [[5, 6], [1, 9]]


def test_what_a_replay_leaves_is_used_though_its_use_raised_before(gpu: Gpu) -> None:
    seen: list[list[int]] = []

    def fail(numbers: list[int]) -> None:
        seen.append(numbers)
        raise RuntimeError("told")

    on_arrival(torch.tensor([0]), keep([]))
    graph = Captured(gpu, 1, fail)
    for count in (1, 2):
        graph.replay(count)
        with pytest.raises(RuntimeError, match="told"):
            wait_all(CPU)
    wait_all(CPU)
    assert seen == [[1], [2]]


def test_a_capture_of_more_than_can_be_heard_of_warns(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later, "_SPARES", 2)
    on_arrival(torch.tensor([0]), keep([]))
    graphs = [Captured(gpu, 1, keep([])) for _ in range(2)]
    gpu.capturing = True
    with pytest.warns(UserWarning, match="2 ops were captured since the last step outside of a capture"):
        on_arrival(graphs[0].found, keep([]))


def attached(non_finite: str) -> tuple[EmbeddingBagCollection, KeyedJaggedTensor]:
    module = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t", feature_names=["f"])])
    apply_optimizer_in_backward(SGD, module.parameters(), {"lr": 0.1, "non_finite": non_finite})
    return module, KeyedJaggedTensor(["f"], torch.tensor([1, 2, 2]), lengths=torch.tensor([1, 2]))


def test_an_update_does_not_wait_for_what_it_skipped(gpu: Gpu) -> None:
    """The step that learns of it has done its own update when it raises."""
    module, batch = attached("error")
    weight = module.embedding_bags["t"].weight
    (module(batch).values() * torch.nan).sum().backward()
    gpu.run()
    before = weight.detach().clone()
    with pytest.raises(NonFiniteGradientError, match="row 1 is not finite"):
        module(batch).values().sum().backward()
    assert ((before - weight.detach())[1:3] > 0.09).all()
    module(batch).values().sum().backward()


def test_reading_how_many_rows_were_skipped_waits(gpu: Gpu) -> None:
    module, batch = attached("skip")
    for _ in range(2):
        (module(batch).values() * torch.inf).sum().backward()
    assert module.embedding_bags["t"].rows.skipped_rows == 4
