"""Fixtures of the tests of modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.modules.no_waiting import DEVICE


@pytest.fixture
def no_lists_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.tensor(list, device="meta")` shows in no op."""
    real = torch.tensor

    def tensor(*args: Any, device: torch.device | str | None = None, **kwargs: Any) -> Tensor:
        assert device is None or torch.device(device) != DEVICE, "a list is sent to the device"
        return real(*args, device=device, **kwargs)

    monkeypatch.setattr(torch, "tensor", tensor)
