"""`Parts`: what a keyed jagged tensor is made of, and what follows from shapes and host numbers alone.

Glossary
    segments    the bags of all keys as one run: their lengths, their offsets, or both
    strides     bags by key and rank, for a batch whose size varies by key; None for one batch size
    key offsets where each key's ids begin in the values, host numbers [F + 1], once they are fetched; else None

`KeyedJaggedTensor` is the face; the work on it (`checks.py`, `join.py`, `select.py`, `slices.py`,
`leaves.py`) takes parts and makes parts, so that none of it needs the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.ops.upload import upload
from tilerec.sparse.inverse import InverseIndices
from tilerec.sparse.keys import Keys
from tilerec.sparse.segments import Segments
from tilerec.sparse.strides import Strides


class Parts(NamedTuple):
    """Parts that fit: nothing is checked here.

    `empty_stride` is the batch size of a tensor without keys, which has no lengths to read it from; others ignore it.
    """

    keys: Keys
    values: Tensor
    weights: Tensor | None
    segments: Segments
    empty_stride: int = 0
    strides: Strides | None = None
    inverse_indices: InverseIndices | None = None
    key_offsets: list[int] | None = None

    def stride(self) -> int:
        """Batch size. Of a variable batch: the full batch's if inverse indices tell, else the largest key's."""
        if len(self.keys) == 0:
            return self.empty_stride
        if self.strides is None:
            return self.segments.count() // len(self.keys)
        if self.inverse_indices is not None:
            return self.inverse_indices[1].shape[-1]
        return max(self.strides.per_key())

    def stride_per_key(self) -> list[int]:
        """Bags of each key [F]."""
        if self.strides is not None:
            return self.strides.per_key()
        bags, keys = self.segments.count(), len(self.keys)
        return [bags // keys] * keys if keys else []

    def bag_offsets(self) -> list[int]:
        """Where each key's bags begin in the lengths [F + 1]."""
        if self.strides is not None:
            return self.strides.bag_offsets()
        stride = self.stride()
        return [stride * position for position in range(len(self.keys) + 1)]

    def key_offsets_F1(self) -> Tensor:
        """Where each key's ids begin, on the device: every B-th bag's offset."""
        offsets_S1 = self.segments.offsets()
        if self.strides is not None:
            return offsets_S1.index_select(0, upload(self.strides.bag_offsets(), offsets_S1.device))
        keys = len(self.keys)
        stride = self.segments.count() // keys if keys else 0
        if torch.compiler.is_compiling():
            # A slice would guard on the number of offsets.
            return offsets_S1.index_select(0, torch.arange(keys + 1, device=offsets_S1.device) * stride)
        if stride == 0:
            return torch.zeros(keys + 1, dtype=offsets_S1.dtype, device=offsets_S1.device)
        return offsets_S1[::stride]

    def map(self, move: Callable[[Tensor], Tensor], weights: Tensor | None) -> Parts:
        """Every tensor that was given moved or copied, but for the weights, which are ready."""
        inverse_indices = self.inverse_indices
        if inverse_indices is not None:
            inverse_indices = (inverse_indices[0], move(inverse_indices[1]))
        return Parts(
            self.keys,
            move(self.values),
            weights,
            self.segments.map(move),
            self.empty_stride,
            self.strides,
            inverse_indices,
            self.key_offsets,
        )

    def tensors(self) -> list[Tensor]:
        """Every tensor held."""
        held = [self.values, *self.segments.tensors()]
        if self.weights is not None:
            held.append(self.weights)
        if self.inverse_indices is not None:
            held.append(self.inverse_indices[1])
        return held
