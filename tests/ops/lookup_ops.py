"""The references of the lookup ops as functions of the ops' arguments."""

from __future__ import annotations

from tilerec.ops.lookup import definition as definition
from tilerec.ops.runtime.library import LIBRARY

pooled_lookup_reference = LIBRARY.references["pooled_lookup"]
sequence_lookup_reference = LIBRARY.references["sequence_lookup"]
sample_weight_grad_reference = LIBRARY.references["sample_weight_grad"]
