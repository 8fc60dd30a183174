"""in_backward_optimizer_filter tells the parameters that the backward pass updates from the others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward

from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.in_backward import in_backward_optimizer_filter, updates_in_backward
from tilerec.spec.optimizer import SGD
from tilerec.spec.table import EmbeddingBagConfig


def _names(model: nn.Module, include: bool) -> list[str]:
    return [name for name, _ in in_backward_optimizer_filter(model.named_parameters(), include=include)]


def test_torchs_own_mark_counts() -> None:
    model = nn.Linear(2, 2)
    assert _names(model, False) == ["weight", "bias"]
    assert _names(model, True) == []
    _apply_optimizer_in_backward(torch.optim.SGD, [model.weight], {"lr": 0.1})
    assert _names(model, False) == ["bias"]
    assert _names(model, True) == ["weight"]


def test_a_table_counts_from_when_an_optimizer_is_attached() -> None:
    model = EmbeddingBagCollection([EmbeddingBagConfig(3, 2, name) for name in ("a", "b")])
    assert _names(model, True) == []
    apply_optimizer_in_backward(SGD(), [model.embedding_bags["b"].weight])
    assert _names(model, False) == ["embedding_bags.a.weight"]
    assert _names(copy.deepcopy(model), True) == ["embedding_bags.b.weight"]


@pytest.mark.parametrize("mark", ["_in_backward_optimizers", "_overlapped_optimizer"])
def test_torchs_marks_count_as_long_as_they_hold_something(mark: str) -> None:
    model = nn.Linear(2, 2)
    setattr(model.bias, mark, SGD())
    assert updates_in_backward(model.bias)
    assert _names(model, True) == ["bias"]
    setattr(model.bias, mark, None)
    assert _names(model, True) == []


def test_it_yields_the_parameters_themselves() -> None:
    model = nn.Linear(2, 2)
    assert dict(in_backward_optimizer_filter(model.named_parameters())) == dict(model.named_parameters())
    assert list(in_backward_optimizer_filter([])) == []
