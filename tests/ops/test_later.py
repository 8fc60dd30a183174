"""Numbers that kernels leave on a device are used when they have arrived, in order, and nobody waits for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops import later
from tilerec.ops.later import use_all, use_arrived, when_arrived
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
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.recorded = self.done = self.made = 0

    def run(self) -> None:
        for host, device in self.copies:
            host.fill_(0).copy_(device)
        self.copies.clear()
        self.done = self.recorded

    def new_copy(self, size: int) -> Any:
        self.made += 1
        return later._Copy(Host(self, size), Event(self))  # type: ignore[arg-type]


class Host:
    def __init__(self, gpu: Gpu, size: int) -> None:
        self.gpu, self.numbers = gpu, torch.full((size,), -99)

    def copy_(self, device: Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.gpu.copies.append((self.numbers, device.clone()))  # of what is there, in the stream's order

    def tolist(self) -> list[int]:
        return self.numbers.tolist()


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.number = gpu, 0

    def record(self, stream: object) -> None:
        self.gpu.recorded += 1
        self.number = self.gpu.recorded

    def query(self) -> bool:
        return self.number <= self.gpu.done


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(later, "_NUMBERS", later.Arrivals(once=True))
    monkeypatch.setattr(later, "at_once", lambda device: False)
    monkeypatch.setattr(later, "_new_copy", gpu.new_copy)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.run())
    return gpu


def keep(seen: list[list[int]]) -> Callable[[list[int]], None]:
    return seen.append


def test_on_the_cpu_numbers_are_used_at_once() -> None:
    seen: list[list[int]] = []
    when_arrived(torch.tensor([1, 2, 3]), keep(seen))
    assert seen == [[1, 2, 3]]


def test_numbers_are_used_in_order_when_they_have_arrived(gpu: Gpu) -> None:
    seen: list[list[int]] = []
    when_arrived(torch.tensor([1]), keep(seen))
    when_arrived(torch.tensor([2, 3]), keep(seen))
    use_arrived(CPU)
    assert seen == []
    gpu.run()
    use_arrived(CPU)
    assert seen == [[1], [2, 3]]


def test_waiting_uses_all(gpu: Gpu) -> None:
    seen: list[list[int]] = []
    when_arrived(torch.tensor([1]), keep(seen))
    use_all(CPU)
    use_all(CPU)
    assert seen == [[1]]


def test_steps_use_the_same_memory_again(gpu: Gpu) -> None:
    for step in range(10):
        when_arrived(torch.tensor([step, 0]), keep([]))
        gpu.run()
        use_arrived(CPU)
    assert gpu.made == 1


def test_an_error_leaves_the_others_for_the_next_time(gpu: Gpu) -> None:
    seen: list[list[int]] = []

    def fail(numbers: list[int]) -> None:
        raise RuntimeError(str(numbers))

    when_arrived(torch.tensor([1]), fail)
    when_arrived(torch.tensor([2]), keep(seen))
    gpu.run()
    with pytest.raises(RuntimeError, match=r"\[1\]"):
        use_arrived(CPU)
    use_arrived(CPU)
    assert seen == [[2]]


def test_who_looks_in_the_midst_of_a_look_takes_nothing_from_it(gpu: Gpu) -> None:
    seen: list[list[int]] = []
    when_arrived(torch.tensor([1]), keep(seen))
    gpu.run()
    when_arrived(torch.tensor([2]), keep(seen))  # on its way
    event = later._NUMBERS._devices[CPU].sent[0].copy.event
    query, asked = event.query, []

    def finalizer() -> bool:
        if not asked:
            asked.append(1)
            use_arrived(CPU)
        return query()

    event.query = finalizer  # type: ignore[method-assign]
    use_arrived(CPU)
    assert seen == [[1]]
    gpu.run()
    use_arrived(CPU)
    assert seen == [[1], [2]]


def test_what_a_graph_leaves_is_looked_at_after_replays(gpu: Gpu) -> None:
    seen: list[list[int]] = []
    numbers = torch.tensor([0])
    gpu.capturing = True
    when_arrived(numbers, keep(seen))
    use_arrived(CPU)
    gpu.capturing = False
    numbers.fill_(7)  # a replay
    use_arrived(CPU)
    gpu.run()
    use_arrived(CPU)
    assert seen == [[7]]
    numbers.fill_(8)
    use_all(CPU)
    assert seen[-1] == [8]
    use_all(CPU)
    assert seen.count([7]) == seen.count([8]) == 1  # and not again at every step without a replay


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
