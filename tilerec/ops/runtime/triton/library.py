"""Availability of the Triton kernels in this process.

Kernels are Python functions that Triton compiles for the GPU at hand at their first launch. PyTorch's GPU builds for
Linux include Triton. Without Triton, or with `TILEREC_TRITON=0`, the reference kernels run on the GPU instead, and one
log line reports it.

With `TRITON_INTERPRET=1`, set before Triton is imported, kernels run in Python on CPU tensors. That is slow, and its
results are equal up to rounding. Tests use it on machines without a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilerec.torch_private import current_device

_HOST = -1

LOG = logging.getLogger("tilerec.triton")


@dataclass(frozen=True)
class TritonStatus:
    """Status of the Triton kernels; `reason` states why they are not used, and is empty if they are."""

    reason: str
    version: str = ""
    interpreted: bool = False

    def __str__(self) -> str:
        if self.reason:
            return f"Triton kernels: not used ({self.reason})"
        return f"Triton kernels: Triton {self.version}{', interpreted' if self.interpreted else ''}"


@functools.lru_cache(maxsize=1)
def status() -> TritonStatus:
    """Return the status of the kernels in this process; the first call imports Triton."""
    found = _find()
    LOG.info("%s", found)
    return found


def serves_gpus() -> bool:
    """Return True if the kernels should serve CUDA (and ROCm) tensors of this process."""
    if torch.version.cuda is None and torch.version.hip is None:
        return False  # a CPU build has no GPU tensors: skip the import of Triton
    return not status().reason


def _find() -> TritonStatus:
    if os.environ.get("TILEREC_TRITON", "1").lower() in ("0", "off", "false", "no"):
        return TritonStatus("TILEREC_TRITON=0")
    if importlib.util.find_spec("triton") is None:
        return TritonStatus("Triton is not installed; it comes with PyTorch's GPU builds for Linux")
    try:
        import triton
    except (ImportError, OSError) as error:
        return TritonStatus(f"Triton cannot be imported: {error}")
    return TritonStatus("", triton.__version__, bool(triton.knobs.runtime.interpret))


def on_own_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a kernel so that its first argument's GPU is current during the call: Triton launches on the current GPU."""

    @functools.wraps(kernel)
    def run(first: Tensor | list[Tensor], *rest: Any, **named: Any) -> Any:
        tensor = first if isinstance(first, Tensor) else first[0] if first else None
        if tensor is None or tensor.get_device() in (_HOST, current_device()) or not tensor.is_cuda:
            return kernel(first, *rest, **named)
        with torch.cuda.device(tensor.device):
            return kernel(first, *rest, **named)

    return run
