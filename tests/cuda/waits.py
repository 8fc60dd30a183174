"""How often a call has the host wait for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def waits(call: Callable[[], T]) -> tuple[T, int]:
    """What a call returns, and how often it waited. Waits of threads other than this and autograd's do not count."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return result, sum("synchronizing CUDA operation" in str(warning.message) for warning in told)
