"""TorchRec's awaitables, for results that a program defines."""

from __future__ import annotations

import torch

from tilerec.compat.awaitable import Awaitable, LazyAwaitable, LazyNoWait, NoWait


class Counted(LazyAwaitable[torch.Tensor]):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def _wait_impl(self) -> torch.Tensor:
        self.calls += 1
        return torch.arange(3.0)


def test_callbacks_change_the_result_of_wait() -> None:
    own = NoWait(5)
    own.callbacks.append(lambda value: value + 1)
    assert own.wait() == 6


def test_a_lazy_result_is_computed_once_at_its_first_use() -> None:
    own = Counted()
    assert isinstance(own, Awaitable)
    assert own.calls == 0
    assert own.shape == (3,)
    assert torch.equal(torch.cat([own, own.wait()]), torch.tensor([0.0, 1, 2, 0, 1, 2]))
    assert torch.equal(own + 1, torch.arange(1.0, 4.0))
    assert torch.equal(2 * own, 2 * torch.arange(3.0))
    assert torch.equal(own @ own, torch.tensor(5.0))
    assert (len(own), float(own[2]), [float(x) for x in own]) == (3, 2.0, [0.0, 1.0, 2.0])
    assert own.calls == 1
    assert LazyNoWait({"a": 1})["a"] == 1
    assert "a" in LazyNoWait({"a": 1})
