"""`KeyedJaggedTensor`: the sparse features of a batch, several jagged tensors in one tensor of values.

Glossary
    key         a feature's name; F of them
    stride      bags per key = batch size B; in a *variable batch* each key has its own, see `sparse/strides.py`
    inverse     for a variable batch: the bag of each key that each sample of the full batch uses
    bag         the ids of one sample for one key
    lengths     ids per bag, flat and key-major: bag b of key f is number f * B + b
    key offsets start of each key's ids in the values, on the host [F + 1]

    values    = ids of key 0 | ids of key 1 | …         each key's ids = bag 0 | bag 1 | …
    offsets_S1[f * B + b] = start of bag b of key f,  S = F * B (or the sum of the strides)

All tensors except the key offsets are on the batch's device. `sync()`, and every slice by key (`kjt["f"]`, `to_dict`,
`split`), fetches the key offsets: one wait for the device, once per batch.

In a compiled program the key offsets of a synced batch are inputs of the graph. One graph serves all batches, except
that torch compiles another one for a feature with no id or exactly one. An unsynced batch always uses one graph, which
reads the key offsets itself; this needs `torch._dynamo.config.capture_scalar_outputs = True`.

A program that is exported with dynamic sizes accepts every batch size, 0 and 1 included. With flat lengths [F * B] it
has one more op for each division by F, whose result torch knows nothing about (`Segments.count_per_key`). Lengths given
as a table [F, B] stay a table. Their dimension 1 is the batch size, so a program of such a batch has no such op. Only a
program that computes lengths from offsets needs a sample.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, final

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.sparse.argument_checks import check_derived, check_key_offsets, checked_parts
from tilerec.sparse.concatenation import join, join_features
from tilerec.sparse.inverse_indices import InverseIndices
from tilerec.sparse.jagged_tensor import JaggedTensor, jt_is_equal
from tilerec.sparse.keys import Keys
from tilerec.sparse.kjt_copy import copy_parts_
from tilerec.sparse.kjt_fields import Parts
from tilerec.sparse.kjt_text import features_text, is_readable, shapes_text
from tilerec.sparse.memory import allocate_like, clear_storage, record_stream, size_in_bytes
from tilerec.sparse.pytree_registration import (
    Context,
    dump_context,
    flatten,
    flatten_as_text,
    load_context,
    unflatten,
)
from tilerec.sparse.segments import Segments
from tilerec.sparse.selection import permute, permute_needs_key_offsets, split
from tilerec.sparse.slices import key_lengths, slice_all, slice_one
from tilerec.torch_private import pytree


@final
class KeyedJaggedTensor:
    """Ids of several features over one batch.

    Args:
        keys: feature names, each once.
        values: [N] ids (or [N, ...] floating-point items), all bags of the first key, then of the second, and so on.
        weights: one number per id, [N] (for vectors also one per element, [N, ...]); none by default.
        lengths: ids per bag, [F * B] or [F, B]; int32 or int64.
        offsets: start of each bag, and end of the last, [F * B + 1], from 0 to N. Pass `lengths` or `offsets`.
        stride: batch size; needed only without keys, as it is derived from the lengths. For a variable batch it is
            derived from the inverse indices; without them it is the maximum of the largest key's bags and this
            argument. A stride without effect warns.
        stride_per_key_per_rank: [F][R] bags of each key from each rank, for a batch whose size varies by key.
        stride_per_key, lengths_offset_per_key, index_per_key: derived from the above; if given, they are checked.
        length_per_key, offset_per_key: number and start of each key's ids, if known; `sync()` then need not wait.
        jt_dict: the result of `to_dict`, if known.
        inverse_indices: (keys, int [F, B]): the bag that each sample of the full batch uses, for deduplicated batches.

    Raises `InputError` for repeated keys, values that are neither [N] nor floating point, weights that are not one
    number each, lengths that are not integers or not a whole number of bags per key, a stride that contradicts them,
    and objects that are not tensors.

    The constructor checks types and shapes, without waiting for a device. Fetching the key offsets checks that lengths
    sum to N and offsets start at 0. `validate_keyed_jagged_tensor` checks all other contents.

    Two features, two samples; "a": [1, 2], []; "b": [3], [4, 5]::

        KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3, 4, 5]), lengths=torch.tensor([2, 0, 1, 2]))
    """

    __slots__ = ("_jt_dict", "_parts")

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | Sequence[Sequence[int]] | None = None,
        stride_per_key: Sequence[int] | None = None,
        length_per_key: Sequence[int] | None = None,
        lengths_offset_per_key: Sequence[int] | None = None,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> None:
        parts = checked_parts(keys, values, weights, lengths, offsets, stride, stride_per_key_per_rank, inverse_indices)
        if offset_per_key is None and length_per_key is not None:
            offset_per_key = list(accumulate(length_per_key, initial=0))
        if offset_per_key is not None:
            check_key_offsets(parts, list(offset_per_key))
            parts = parts._replace(key_offsets=list(offset_per_key))
        check_derived(parts, stride_per_key, lengths_offset_per_key, index_per_key)
        if jt_dict is not None and tuple(jt_dict) != parts.keys.names:
            raise InputError(
                "KeyedJaggedTensor: got a jt_dict with other keys; expected those of `keys`. Leave jt_dict out."
            )
        self._parts = parts
        self._jt_dict: dict[str, JaggedTensor] | None = None if jt_dict is None else dict(jt_dict)

    # -- making ------------------------------------------------------------------------------------------------

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """Build from offsets, and fetch the key offsets."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            None,
            offsets,
            stride,
            stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """Build from lengths, and fetch the key offsets."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths,
            None,
            stride,
            stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor], force_variable_stride: bool = False) -> KeyedJaggedTensor:
        """Build from a dict of features, in its order.

        Features with different batch sizes make a variable batch; `force_variable_stride` always makes one.
        """
        if not jt_dict:
            return KeyedJaggedTensor.empty()
        return _made(join_features(jt_dict, force_variable_stride))

    @staticmethod
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Concatenate the features of all tensors, which must have one batch size.

        Tensors without keys are skipped. Key offsets are joined if all tensors have fetched theirs. All tensors or
        none must have inverse indices. Raises `InputError` for an empty list, repeated keys, or tensors that do not
        match.
        """
        if not kjt_list:
            raise InputError(
                "KeyedJaggedTensor.concat: got an empty list; expected at least one tensor. Pass the tensors."
            )
        for kjt in kjt_list:
            if not isinstance(kjt, KeyedJaggedTensor):
                raise InputError(
                    f"KeyedJaggedTensor.concat: got a {type(kjt).__name__} in the list; expected keyed jagged tensors. "
                    "Build one with from_jt_dict."
                )
        tensors = [kjt for kjt in kjt_list if len(kjt._parts.keys) > 0]
        if len(tensors) <= 1:
            return (tensors or list(kjt_list))[0]
        return _made(join([kjt._parts for kjt in tensors]))

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """Return a tensor without keys and bags."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        lengths = torch.empty(0, dtype=lengths_dtype, device=device)
        values = torch.empty(0, dtype=values_dtype, device=device)
        return _made(Parts(Keys.of(()), values, weights, Segments(lengths, None)))

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor, device: torch.device | None = None) -> KeyedJaggedTensor:
        """Without `device`: return a tensor without keys and bags, with the dtypes and the batch sizes of `kjt`.

        With `device`: return uninitialised memory there with the shapes of `kjt`, for `copy_(kjt)` to fill.
        """
        parts = kjt._parts
        if device is not None:
            return _made(parts.map(functools.partial(allocate_like, device=device)))
        like = JaggedTensor.empty_like(parts.as_jagged())
        weights, stride = like.weights_or_none(), kjt.stride()
        return _made(Parts(Keys.of(()), like.values(), weights, like._segments, stride, parts.strides))

    # -- reading -----------------------------------------------------------------------------------------------

    def keys(self) -> list[str]:
        """Return a new list of the feature names, in order."""
        return list(self._parts.keys.names)

    def values(self) -> Tensor:
        """Return all ids, key by key [N, ...]."""
        return self._parts.values

    def weights(self) -> Tensor:
        """Return the weights, one number per id; raise `InputError` without weights."""
        if self._parts.weights is None:
            raise InputError(
                "KeyedJaggedTensor: got no weights; expected a weighted tensor. Make it with weights=, or call "
                "weights_or_none()."
            )
        return self._parts.weights

    def weights_or_none(self) -> Tensor | None:
        """Return the weights, one number per id, or None."""
        return self._parts.weights

    def lengths(self) -> Tensor:
        """Return the number of ids of each bag, flat and key-major [F * B]."""
        return self._parts.segments.lengths()

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths if they were given or already derived, else None."""
        return self._parts.segments.lengths_or_none()

    def offsets(self) -> Tensor:
        """Return the start of each bag, and the end of the last [F * B + 1]."""
        return self._parts.segments.offsets()

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets if they were given or already derived, else None."""
        return self._parts.segments.offsets_or_none()

    def stride(self) -> int:
        """Return the batch size; `split` and `permute` keep it.

        For a variable batch: the number of samples of its inverse indices, else the largest key's bags.
        """
        return self._parts.stride()

    def stride_per_key(self) -> list[int]:
        """Return the number of bags of each key [F]."""
        return self._parts.stride_per_key()

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return the number of bags of each key from each rank [F][R]; empty unless the batch is variable."""
        strides = self._parts.strides
        return [] if strides is None else [list(row) for row in strides.counts()]

    def variable_stride_per_key(self) -> bool:
        """Return True for a variable batch, whose keys may have different batch sizes."""
        return self._parts.strides is not None

    def inverse_indices(self) -> InverseIndices:
        """Return (keys, int [F, B]): the bag that each sample of the full batch uses; raise `InputError` without."""
        inverse_indices = self._parts.inverse_indices
        if inverse_indices is None:
            raise InputError(
                "KeyedJaggedTensor: got no inverse indices; expected some. Make the tensor with inverse_indices=, or "
                "call inverse_indices_or_none()."
            )
        return inverse_indices

    def inverse_indices_or_none(self) -> InverseIndices | None:
        """Return the inverse indices, or None."""
        return self._parts.inverse_indices

    def sync(self) -> KeyedJaggedTensor:
        """Fetch the key offsets: one wait for the device, now instead of at the first slice.

        For a single key on a device they are 0 and N, without a wait. On the meta device every key gets an equal number
        of ids, and the first one also the remainder.

        Raises `InputError` if the lengths do not sum to the number of values. For a single key on a device, the code
        that later reads the lengths raises instead.
        """
        self._synced()
        return self

    def unsync(self) -> KeyedJaggedTensor:
        """Drop the key offsets, and the slices made with them."""
        if self._parts.key_offsets is not None:
            self._parts = self._parts._replace(key_offsets=None)
        self._jt_dict = None
        return self

    def length_per_key(self) -> list[int]:
        """Return the number of ids of each key [F]."""
        return key_lengths(self._synced())

    def length_per_key_or_none(self) -> list[int] | None:
        """Return the number of ids of each key if the key offsets are fetched, else None."""
        return None if self._parts.key_offsets is None else self.length_per_key()

    def offset_per_key(self) -> list[int]:
        """Return a new list with the start of each key's ids, and the end of the last [F + 1]."""
        key_offsets = self._synced().key_offsets
        assert key_offsets is not None, "a synced tensor has key offsets"
        return list(key_offsets)

    def _synced(self) -> Parts:
        """Return the parts with key offsets, fetched once. Nothing is stored while a graph is traced."""
        parts = self._parts
        if parts.key_offsets is not None:
            return parts
        key_offsets = parts.fetch_key_offsets()
        synced = parts._replace(key_offsets=key_offsets)
        if not torch.compiler.is_compiling():
            check_key_offsets(parts, key_offsets)
            self._parts = synced
        return synced

    def offset_per_key_or_none(self) -> list[int] | None:
        """Return the start of each key's ids if the key offsets are fetched, else None."""
        key_offsets = self._parts.key_offsets
        return None if key_offsets is None else list(key_offsets)

    def lengths_offset_per_key(self) -> list[int]:
        """Return the start of each key's bags in the lengths [F + 1]."""
        return self._parts.bag_offsets()

    def index_per_key(self) -> dict[str, int]:
        """Return a new dict: feature name -> position."""
        return self._parts.keys.positions()

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._parts.values.device

    def size_in_bytes(self) -> int:
        """Return the bytes of all tensors of this object."""
        return size_in_bytes(self._parts.tensors())

    # -- slicing by key ----------------------------------------------------------------------------------------

    # `kjt[0]` looks up a feature named 0, so disable Python's iteration by position.
    __iter__ = None

    def __contains__(self, key: object) -> bool:
        """Return True if there is a feature of that name."""
        return key in self._parts.keys

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return the bags of one feature, as views; raise `UnknownKeyError` (also a `KeyError`) if it is missing."""
        position = self._parts.keys.position(key)
        if not torch.compiler.is_compiling() and self._jt_dict is not None:
            return self._jt_dict[key]
        return slice_one(self._synced(), position)

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Return the bags of all features, as views. The dict is cached until `unsync`, so do not edit it.

        With `compute_offsets` the offsets of all features are computed together.
        """
        known = None if torch.compiler.is_compiling() else self._jt_dict
        if known is None:
            known = slice_all(self._synced(), compute_offsets) if len(self._parts.keys) else {}
            if not torch.compiler.is_compiling():
                self._jt_dict = known
        return known

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Split into parts of `segments[i]` neighbouring features, as views; the sizes must sum to the number of keys.

        split([1, 2]) of keys a, b, c -> keys a | keys b, c
        """
        return [_made(parts) for parts in split(self._synced(), segments)]

    def permute(self, indices: Sequence[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """Return the features at `indices`, in that order; features may be omitted or repeated.

        A repeated feature has several equal copies, and a lookup by name returns one of them. Such a tensor can be
        sliced, permuted and looked up. The constructor and `concat` raise for its repeated keys.

        `indices_tensor` is the same list on the batch's device, if there is one. Only a permutation that omits or
        repeats features needs the key offsets, and so may wait for the device.
        """
        parts = self._synced() if permute_needs_key_offsets(self._parts, indices) else self._parts
        return _made(permute(parts, indices, indices_tensor))

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """Return an equal tensor: lengths are always flat. For compatibility with TorchRec."""
        return _made(self._parts)

    # -- moving ------------------------------------------------------------------------------------------------

    def to(
        self, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> KeyedJaggedTensor:
        """Return a copy on `device`; tensors already there are shared. `dtype` converts the weights, never the ids."""
        move = functools.partial(Tensor.to, device=device, non_blocking=non_blocking)
        return _made(self._parts.map(move, functools.partial(move, dtype=dtype)))

    def pin_memory(self) -> KeyedJaggedTensor:
        """Return a copy in pinned memory, for asynchronous transfers."""
        return _made(self._parts.map(lambda tensor: tensor.pin_memory()))

    def copy_(self, kjt: KeyedJaggedTensor, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Overwrite this tensor's memory with `kjt`, which must have the same keys and shapes."""
        self._parts = copy_parts_(self._parts, kjt._parts, non_blocking)
        self._jt_dict = None
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory allocated until the work queued on `stream` is done. No effect for tensors on the host."""
        record_stream(self._parts.tensors(), stream)

    def clear_storage(self) -> int:
        """Free the storage of all tensors and return its bytes. The contents cannot be read afterwards."""
        return clear_storage(self._parts.tensors())

    def __repr__(self) -> str:
        """Return the bags if the tensor is small and readable, else its shapes: debuggers call it at any time."""
        parts = self._parts
        return features_text(parts, self.__getitem__) if is_readable(parts) else shapes_text(parts)

    def __reduce__(self) -> tuple[Any, ...]:
        leaves, context = flatten(self._parts)
        return _rebuild, (leaves, dump_context(context), self._parts.key_offsets)


def _made(parts: Parts) -> KeyedJaggedTensor:
    """Build a tensor from consistent parts, without checks."""
    kjt = KeyedJaggedTensor.__new__(KeyedJaggedTensor)
    kjt._parts = parts
    kjt._jt_dict = None
    return kjt


def with_values(kjt: KeyedJaggedTensor, values: Tensor) -> KeyedJaggedTensor:
    """Return the batch with other values, as many as it has."""
    return _made(kjt._parts._replace(values=values))


def kjt_is_equal(kjt_1: object, kjt_2: object) -> bool:
    """Return True if two tensors have equal keys in order, batch sizes, ids, weights and inverse indices.

    Returns False for tensors on different devices, and for objects that are not a `KeyedJaggedTensor`.
    """
    if not isinstance(kjt_1, KeyedJaggedTensor) or not isinstance(kjt_2, KeyedJaggedTensor):
        return False
    one, other = kjt_1._parts, kjt_2._parts
    if one.keys != other.keys or one.strides != other.strides or one.stride() != other.stride():
        return False
    inverse_1, inverse_2 = one.inverse_indices, other.inverse_indices
    if inverse_1 is None or inverse_2 is None:
        if inverse_1 is not inverse_2:
            return False
    elif (
        list(inverse_1[0]) != list(inverse_2[0])
        or inverse_1[1].device != inverse_2[1].device
        or not torch.equal(inverse_1[1], inverse_2[1])
    ):
        return False
    return jt_is_equal(one.as_jagged(), other.as_jagged())


def leaves_of(kjt: KeyedJaggedTensor) -> tuple[list[Any], Context]:
    """Return the given tensors of a batch, and the static rest; `from_leaves` is the inverse, without key offsets."""
    return flatten(kjt._parts)


def text_leaves_of(kjt: KeyedJaggedTensor) -> tuple[list[Any], str]:
    """Return `leaves_of` with the static rest as text, and without a batch size: the input of an op that looks up."""
    return flatten_as_text(kjt._parts)


def _flatten_with_keys(kjt: KeyedJaggedTensor) -> tuple[list[tuple[Any, Any]], Context]:
    leaves, context = flatten(kjt._parts)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(context[1], leaves, strict=True)], context


def from_leaves(leaves: Any, context: Context) -> KeyedJaggedTensor:
    """Rebuild a batch from the results of `leaves_of`."""
    return _made(unflatten(leaves, context))


pytree.register_pytree_node(
    KeyedJaggedTensor,
    leaves_of,
    from_leaves,
    serialized_type_name="tilerec.KeyedJaggedTensor",
    to_dumpable_context=dump_context,
    from_dumpable_context=load_context,
    flatten_with_keys_fn=_flatten_with_keys,
)


def _rebuild(leaves: list[Any], dumped_context: list[Any], key_offsets: list[int] | None) -> KeyedJaggedTensor:
    """Rebuild from `__reduce__`, for copies and pickles."""
    return _made(unflatten(leaves, load_context(dumped_context))._replace(key_offsets=key_offsets))


# The pickle contains only tensors, names and numbers, so `torch.load(weights_only=True)` and `torch.export.load` may
# read it.
torch.serialization.add_safe_globals([_rebuild])
