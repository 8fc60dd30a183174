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

from tilerec.ops.runtime.upload import upload
from tilerec.sparse.inverse import InverseIndices
from tilerec.sparse.keys import Keys
from tilerec.sparse.segments import Segments
from tilerec.sparse.strides import Strides


class Parts(NamedTuple):
    """Parts that fit: nothing is checked here.

    `known_stride` is the batch size that the lengths do not show: of a tensor without keys, and of a variable batch
    whose largest key was left out by a `split` or a `permute`. A batch of one size ignores it.
    """

    keys: Keys
    values: Tensor
    weights: Tensor | None
    segments: Segments
    known_stride: int = 0
    strides: Strides | None = None
    inverse_indices: InverseIndices | None = None
    key_offsets: list[int] | None = None

    def stride(self) -> int:
        """Batch size. Of a variable batch: the samples of its inverse indices, else the largest key's bags, also if
        `split` or `permute` left that key out.
        """
        if len(self.keys) == 0:
            return self.known_stride
        if self.strides is None:
            return self.segments.count() // len(self.keys)
        if self.inverse_indices is not None:
            return self.inverse_indices[1].shape[-1]
        return max(self.known_stride, *self.strides.per_key())

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
        if self.strides is not None and len(self.keys):
            return offsets_S1.index_select(0, upload(self.strides.bag_offsets(), offsets_S1.device))
        keys = len(self.keys)
        stride = self.segments.count() // keys if keys else 0
        if torch.compiler.is_compiling():
            # A slice would guard on the number of offsets.
            return offsets_S1.index_select(0, torch.arange(keys + 1, device=offsets_S1.device) * stride)
        if stride == 0:
            return torch.zeros(keys + 1, dtype=offsets_S1.dtype, device=offsets_S1.device)
        return offsets_S1[::stride]

    def even_key_offsets(self) -> list[int]:
        """Placeholders on the meta device, where lengths have no values: every key gets an equal number of ids.

        The first key also gets the remainder. 5 ids of 2 keys -> [0, 3, 5]
        """
        items, keys = self.values.shape[0], len(self.keys)
        if not keys:
            return [0]
        each = items // keys
        return [0, *(items - each * left for left in range(keys - 1, -1, -1))]

    def map(
        self, move: Callable[[Tensor], Tensor], move_weights: Callable[[Tensor], Tensor] | None = None
    ) -> Parts:
        """Every tensor that was given, moved or copied; weights by `move_weights`, if given."""
        weights, inverse_indices = self.weights, self.inverse_indices
        if weights is not None:
            weights = (move_weights or move)(weights)
        if inverse_indices is not None:
            inverse_indices = (inverse_indices[0], move(inverse_indices[1]))
        return Parts(
            self.keys,
            move(self.values),
            weights,
            self.segments.map(move),
            self.known_stride,
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
