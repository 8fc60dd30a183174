"""`fetch`: numbers in the order in which they were asked for, of any type, of several devices at one go each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilerec.ops.runtime.fetch import fetch


def test_numbers_keep_their_order_whatever_their_types() -> None:
    assert fetch([]) == []
    numbers = [torch.tensor(4), torch.tensor(2**40), torch.tensor(7, dtype=torch.int32), torch.tensor(1.0)]
    assert fetch(numbers) == [4, 2**40, 7, 1]


def test_they_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One `tolist` for all, and no number by itself."""
    read, real = [], Tensor.tolist

    def tolist(tensor: Tensor) -> list[int]:
        read.append(tensor.shape)
        return real(tensor)  # type: ignore[no-any-return]

    monkeypatch.setattr(Tensor, "tolist", tolist)
    monkeypatch.setattr(Tensor, "__int__", lambda tensor: pytest.fail("a number by itself"))
    monkeypatch.setattr(Tensor, "item", lambda tensor: pytest.fail("a number by itself"))
    assert fetch(list(torch.arange(5).unbind())) == [0, 1, 2, 3, 4]
    assert read == [(5,)]
