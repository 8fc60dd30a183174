"""`square_root`: rounded as IEEE 754 demands, on every processor.

`torch.sqrt` of a CPU tensor uses MKL, where PyTorch is built with it. On Intel's processors MKL's result may be off by
the last bit, and not for the same value everywhere in a tensor. Then bits would depend on the machine and the tiling.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def square_root(x: Tensor) -> Tensor:
    """Return the square roots of a float32 or float64 tensor; without autograd."""
    if x.device.type != "cpu":
        return torch.sqrt(x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    np.sqrt(x.detach().numpy(), out=out.numpy())
    return out
