"""Records of the calls of lookups in quantized rows, made of the ops' arguments. Terms as in `definition.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.ops.lookup.calls import PooledLayout
from tilerec.ops.runtime.library import new_record


class QuantizedPooledCall(NamedTuple):
    """One call of `quantized_pooled_lookup`. names: "feature@table" per feature, separated by ","."""

    weights: Sequence[Tensor]
    dims: Sequence[int]  # per table
    bits: Sequence[int]  # per table; 0: a table of floats
    ids: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    layout: PooledLayout
    dtype: torch.dtype  # of the output
    names: str

    @staticmethod
    def unpack(*args: Any) -> QuantizedPooledCall:
        """Return the call from the op's arguments."""
        return new_record(QuantizedPooledCall, (*args[:6], new_record(PooledLayout, args[6:10]), *args[10:]))


class QuantizedSequenceCall(NamedTuple):
    """One call of `quantized_sequence_lookup`; its fields are the op's arguments."""

    weights: Sequence[Tensor]
    dims: Sequence[int]
    bits: Sequence[int]
    ids: Tensor
    starts: Tensor
    tables: Sequence[int]
    dtype: torch.dtype
    names: str
