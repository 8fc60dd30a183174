"""`Parts`: the fields of a keyed jagged tensor, and values derived from shapes and host numbers alone.

Glossary
    segments    the bags of all keys as one sequence: their lengths, their offsets, or both
    strides     bags by key and rank, for a batch whose size varies by key; None for a single batch size
    key offsets start of each key's ids in the values, host numbers [F + 1]; None until they are fetched

`KeyedJaggedTensor` is the public class. The code behind it (`argument_checks.py`, `concatenation.py`, `selection.py`,
`slices.py`, `pytree_registration.py`) takes and returns `Parts`, so it does not depend on the class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.ops.runtime.fetch import host_readable
from tilerec.ops.runtime.upload import upload
from tilerec.sparse.inverse_indices import InverseIndices
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keys import Keys
from tilerec.sparse.segments import Segments
from tilerec.sparse.strides import Strides


class Parts(NamedTuple):
    """Consistent fields of a keyed jagged tensor, without checks.

    `known_stride` is the batch size if the lengths do not contain it: for a tensor without keys, and for a variable
    batch whose largest key a `split` or a `permute` removed. A batch with a single batch size ignores it.
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
        """Return the batch size.

        For a variable batch: the number of samples of its inverse indices, else the largest key's bags, also if `split`
        or `permute` removed that key.
        """
        if len(self.keys) == 0:
            return self.known_stride
        if self.strides is None:
            return self.segments.count_per_key(len(self.keys))
        if self.inverse_indices is not None:
            return self.inverse_indices[1].shape[-1]
        return max(self.known_stride, *self.strides.per_key())

    def stride_per_key(self) -> list[int]:
        """Return the number of bags of each key [F]."""
        if self.strides is not None:
            return self.strides.per_key()
        keys = len(self.keys)
        return [self.segments.count_per_key(keys)] * keys

    def bag_offsets(self) -> list[int]:
        """Return the start of each key's bags in the lengths [F + 1]."""
        if self.strides is not None:
            return self.strides.bag_offsets()
        stride = self.stride()
        return [stride * position for position in range(len(self.keys) + 1)]

    def key_offsets_F1(self) -> Tensor:
        """Return the start of each key's ids as a device tensor [F + 1]: the offset of every B-th bag."""
        offsets_S1 = self.segments.offsets()
        if self.strides is not None and len(self.keys):
            return offsets_S1.index_select(0, upload(self.strides.bag_offsets(), offsets_S1.device))
        keys = len(self.keys)
        stride = self.segments.count_per_key(keys)
        if torch.compiler.is_compiling():
            # A slice would guard on the number of offsets.
            return offsets_S1.index_select(0, torch.arange(keys + 1, device=offsets_S1.device) * stride)
        if stride == 0:
            return torch.zeros(keys + 1, dtype=offsets_S1.dtype, device=offsets_S1.device)
        return offsets_S1[::stride]

    def fetch_key_offsets(self) -> list[int]:
        """Return the start of each key's ids; waits for the device unless the parts are on the host.

        For a single key on a device they are 0 and N, without a wait.
        """
        if self.values.is_meta or (len(self.keys) < 2 and not host_readable(self.values)):
            return self.even_key_offsets()
        return self.key_offsets_F1().tolist()

    def even_key_offsets(self) -> list[int]:
        """Return placeholder key offsets for the meta device, where lengths have no values.

        Every key gets an equal number of ids; the first key also gets the remainder. 5 ids of 2 keys -> [0, 3, 5]
        """
        items, keys = self.values.shape[0], len(self.keys)
        if not keys:
            return [0]
        each = items // keys
        return [0, *(items - each * left for left in range(keys - 1, -1, -1))]

    def as_jagged(self) -> JaggedTensor:
        """Return the bags of all keys as one jagged tensor."""
        return JaggedTensor.from_segments(self.values, self.weights, self.segments)

    def map(self, move: Callable[[Tensor], Tensor], move_weights: Callable[[Tensor], Tensor] | None = None) -> Parts:
        """Apply `move` to every given tensor, and `move_weights`, if any, to the weights."""
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
        """Return all tensors of these parts."""
        held = [self.values, *self.segments.tensors()]
        if self.weights is not None:
            held.append(self.weights)
        if self.inverse_indices is not None:
            held.append(self.inverse_indices[1])
        return held
