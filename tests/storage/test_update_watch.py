"""The warning about tables that backward passes update more often than the optimizer steps."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, apply_optimizer_in_backward


def _warnings(passes: int, steps: int, *, dense: bool = True) -> list[str]:
    """Train some steps, each with several backward passes; return the texts of warnings."""
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["item"])])
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
    head = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    features = KeyedJaggedTensor(["item"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(steps):
            for _ in range(passes):
                head(ebc(features).values()).sum().backward()
            if dense:
                optimizer.step()
    return [str(one.message) for one in found if "accumulate" in str(one.message)]


def test_several_passes_per_step_give_one_warning() -> None:
    (text,) = _warnings(passes=3, steps=4)
    assert text.startswith("Table 'item': its attached optimizer updates it in every backward pass")
    assert "accumulate=k" in text


@pytest.mark.parametrize(("passes", "dense"), [(1, True), (3, False)], ids=["one pass", "no other optimizer"])
def test_other_programs_see_none(passes: int, dense: bool) -> None:
    assert _warnings(passes, 4, dense=dense) == []
