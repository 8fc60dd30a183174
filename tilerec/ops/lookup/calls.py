"""Records of the lookup ops' calls, made of the ops' arguments here only. Terms as in `definition.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.ops.runtime.library import new_record


class PooledLayout(NamedTuple):
    """Features of a pooled lookup: per feature its table, its key and 1 for a mean; and samples per key.

    `batches` has one entry if all keys have the same number of samples.
    """

    tables: Sequence[int]
    keys: Sequence[int]
    means: Sequence[int]
    batches: Sequence[int]

    @property
    def uniform(self) -> bool:
        return len(self.batches) == 1


class PooledCall(NamedTuple):
    """One call of `pooled_lookup`. names: "feature@table" per feature, separated by ","."""

    weights: Sequence[Tensor]
    sinks: Tensor
    ids: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    layout: PooledLayout
    dtype: torch.dtype  # of the output
    names: str

    @staticmethod
    def unpack(*args: Any) -> PooledCall:
        """Return the call from the op's arguments."""
        return new_record(PooledCall, (*args[:5], new_record(PooledLayout, args[5:9]), *args[9:]))


class SequenceCall(NamedTuple):
    """One call of `sequence_lookup`; its fields are the op's arguments."""

    weights: Sequence[Tensor]
    sinks: Tensor
    ids: Tensor
    starts: Tensor
    tables: Sequence[int]
    dtype: torch.dtype
    names: str


class WeightGradCall(NamedTuple):
    """One call of `sample_weight_grad`; `grad`: of the lookup's output."""

    weights: Sequence[Tensor]
    ids: Tensor
    offsets: Tensor
    grad: Tensor
    layout: PooledLayout

    @staticmethod
    def unpack(
        weights: Sequence[Tensor], ids: Tensor, offsets: Tensor, grad: Tensor, *layout: Sequence[int]
    ) -> WeightGradCall:
        """Return the call from the op's arguments."""
        return WeightGradCall(weights, ids, offsets, grad, PooledLayout(*layout))
