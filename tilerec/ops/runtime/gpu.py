"""`is_gpu`: the one question about a device's type outside of kernels."""

from __future__ import annotations

import torch


def is_gpu(device: torch.device) -> bool:
    """Return True for a device of `torch.cuda` (CUDA or ROCm): it has streams and events, and work is asynchronous."""
    return device.type == "cuda"
