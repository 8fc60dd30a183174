"""The references of the lookup ops as functions of the ops' arguments."""

from __future__ import annotations

from tilerec.ops.lookup.definition import REFERENCE

pooled_lookup_reference = REFERENCE["pooled_lookup"]
sequence_lookup_reference = REFERENCE["sequence_lookup"]
sample_weight_grad_reference = REFERENCE["sample_weight_grad"]
