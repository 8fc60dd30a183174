"""The lookup ops' Triton kernels as functions of the ops' arguments."""

from __future__ import annotations

from tilerec.ops.lookup.triton.backend import KERNELS
from tilerec.ops.runtime.library import LIBRARY

_KERNELS = LIBRARY.taking_arguments(KERNELS)
pooled_lookup = _KERNELS["pooled_lookup"]
sequence_lookup = _KERNELS["sequence_lookup"]
sample_weight_grad = _KERNELS["sample_weight_grad"]
