"""Ops may be called as functions where nobody watches, and go by way of the dispatcher where somebody does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops.runtime.dispatch import can_bypass_dispatcher
from tilerec.optim import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.table import EmbeddingBagConfig

PLAIN = torch.zeros(2)


class Named(TorchDispatchMode):
    """Notes the ops that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Own(Tensor):
    pass


def test_tensors_and_parameters_are_unwatched_until_somebody_listens() -> None:
    assert can_bypass_dispatcher((PLAIN, nn.Parameter(PLAIN), PLAIN.requires_grad_(False)))
    assert can_bypass_dispatcher(())
    for mode in (Named(), Functions(), FakeTensorMode()):
        with mode:
            assert not can_bypass_dispatcher((PLAIN,)), mode
    assert can_bypass_dispatcher((PLAIN,))


def test_tensors_of_another_kind_and_tracers_and_transforms_watch() -> None:
    assert not can_bypass_dispatcher((PLAIN, PLAIN.as_subclass(Own)))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(PLAIN)
    assert not can_bypass_dispatcher((fake,))
    found: list[bool] = []

    def note(x: Tensor) -> Tensor:
        found.append(can_bypass_dispatcher((PLAIN,)))
        return x * 2

    make_fx(note)(PLAIN)
    torch.func.grad(lambda x: note(x).sum())(PLAIN)
    assert found == [False, False]


@pytest.mark.parametrize("watched", [False, True])
def test_a_mode_sees_a_steps_ops_and_changes_none_of_its_bits(watched: bool) -> None:
    bags = EmbeddingBagCollection([EmbeddingBagConfig(5, 2, "t", feature_names=["f"])])
    apply_optimizer_in_backward(SGD, bags.parameters(), {"lr": 0.5})
    before = bags.embedding_bags["t"].weight.detach().clone()
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 1, 3]), lengths=torch.tensor([2, 1]))
    if not watched:
        bags(features).values().sum().backward()
    else:
        with Named() as mode:
            bags(features).values().sum().backward()
        for op in ("pooled_lookup", "submit_pooled_", "update_rows_"):
            assert any(op in seen for seen in mode.seen), (op, mode.seen)
    after = bags.embedding_bags["t"].weight.detach()
    expected = torch.tensor([[0.0], [2.0], [0.0], [1.0], [0.0]]).expand(5, 2)
    assert torch.equal(after, before - 0.5 * expected)
