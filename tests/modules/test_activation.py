from __future__ import annotations

import pytest
import torch

from tilerec.errors import ConfigError, InputError
from tilerec.modules.activation import SwishLayerNorm


@pytest.mark.parametrize("dims", [1, 3, 257, [5], [2, 4]], ids=str)
@pytest.mark.parametrize("batch", [0, 1, 6])
def test_it_is_the_input_times_a_normalised_gate(dims: int | list[int], batch: int) -> None:
    shape = [dims] if isinstance(dims, int) else dims
    module = SwishLayerNorm(dims, dtype=torch.float64)
    with torch.no_grad():
        module.norm[0].weight.uniform_(0.5, 2.0)
        module.norm[0].bias.uniform_(-1.0, 1.0)
    x = torch.randn(batch, *shape, dtype=torch.float64)
    over = tuple(range(1, 1 + len(shape)))
    mean = x.mean(over, keepdim=True)
    deviation = ((x - mean).square().mean(over, keepdim=True) + 1e-5).sqrt()
    gate = 1 / (1 + torch.exp(-((x - mean) / deviation * module.norm[0].weight + module.norm[0].bias)))
    torch.testing.assert_close(module(x), x * gate)


def test_the_state_is_one_scale_and_one_shift() -> None:
    state = SwishLayerNorm([2, 4]).state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "norm.0.weight": (2, 4),
        "norm.0.bias": (2, 4),
    }


def test_a_gradient_check_passes() -> None:
    module = SwishLayerNorm(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(module, (torch.randn(3, 4, dtype=torch.float64, requires_grad=True),))


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="each of input_dims: got 0"):
        SwishLayerNorm(0)
    with pytest.raises(InputError, match=r"shape \[2, 5\]; expected trailing dimensions \[4\]"):
        SwishLayerNorm(4)(torch.zeros(2, 5))
    with pytest.raises(InputError, match=r"shape \[4\]; expected trailing dimensions \[2, 4\]"):
        SwishLayerNorm([2, 4])(torch.zeros(4))
