"""Square roots are rounded as IEEE 754 demands, wherever a value is in a tensor."""

from __future__ import annotations

import math

import torch

from tilerec.ops.runtime.square_root import square_root


def test_every_root_is_the_nearest_number() -> None:
    x = torch.rand(4099, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 1000
    assert square_root(x).tolist() == [math.sqrt(value) for value in x.tolist()]


def test_the_place_in_a_tensor_does_not_matter() -> None:
    x = torch.rand(64, 7, generator=torch.Generator().manual_seed(2))
    parts = [square_root(part) for part in x.reshape(-1).split(5)]
    assert torch.equal(square_root(x).reshape(-1), torch.cat(parts))
    assert torch.equal(square_root(x.T), square_root(x).T)
    assert square_root(torch.tensor(2.0)).item() == torch.tensor(math.sqrt(2.0)).item()
