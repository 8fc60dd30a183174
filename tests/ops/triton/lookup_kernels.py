"""The lookup ops' Triton kernels as functions of the ops' arguments."""

from __future__ import annotations

from tilerec.ops.lookup.triton.backend import kernels

_KERNELS = kernels()
pooled_lookup = _KERNELS["pooled_lookup"]
sequence_lookup = _KERNELS["sequence_lookup"]
sample_weight_grad = _KERNELS["sample_weight_grad"]
