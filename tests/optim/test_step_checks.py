"""Torch optimizers over tables that the backward pass updates: what their steps leave as it is, they say."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.in_backward import in_backward_optimizer_filter
from tilerec.optim.wrapper import KeyedOptimizerWrapper
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.table import EmbeddingBagConfig

BATCH = KeyedJaggedTensor.from_lengths_sync(["t"], torch.tensor([1, 2]), torch.tensor([1, 1]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection([EmbeddingBagConfig(4, 3, "t")])
        self.over = nn.Linear(3, 1)

    def forward(self) -> torch.Tensor:
        return self.over(self.tables(BATCH).values()).sum()


def trained() -> Model:
    model = Model()
    apply_optimizer_in_backward(SGD(lr=0.1), model.tables.parameters())
    model().backward()
    return model


def test_an_optimizer_over_attached_tables_alone_is_refused() -> None:
    model = trained()
    optimizer = torch.optim.Adam(model.tables.parameters())
    with pytest.raises(ConfigError, match=r"Adam: got only tables 't', which have attached optimizers"):
        optimizer.step()


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_over_attached_tables_too_warns_once(wrapped: bool) -> None:
    model = trained()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    if wrapped:
        optimizer = KeyedOptimizerWrapper(dict(model.named_parameters()), torch.optim.Adam)
    before = model.over.weight.detach().clone()
    with pytest.warns(UserWarning, match="Adam: got tables 't' among its parameters"):
        optimizer.step()
    assert not torch.equal(model.over.weight, before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_an_optimizer_that_was_stepped_before_the_tables_were_attached_warns() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model().backward()
    optimizer.step()
    optimizer.zero_grad()
    apply_optimizer_in_backward(SGD(lr=0.1), model.tables.parameters())
    with pytest.warns(UserWarning, match="SGD: got tables 't'"):
        optimizer.step()


def test_optimizers_of_what_is_left_and_of_unattached_tables_step_in_silence() -> None:
    model, plain = trained(), Model()
    plain().backward()
    left = dict(in_backward_optimizer_filter(model.named_parameters()))
    torch.optim.Adam(left.values()).step()
    torch.optim.Adam(plain.parameters()).step()
    model.tables.fused_optimizer.step()
