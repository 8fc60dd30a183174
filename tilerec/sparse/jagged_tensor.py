"""`JaggedTensor`: bags of different lengths in one tensor of values.

Glossary
    bag       the items of one sample, possibly none
    values_N  the items of all bags, one bag after the other: [N] or [N, ...]
    weights_N one number per item, or of the shape of the values; optional
    lengths_B, offsets_B1   see `sparse/segments.py`:  bag b = values[offsets[b] : offsets[b + 1]]

Offsets may start above 0 and end below N: the bags are then a part of the values. The offsets of a keyed jagged tensor
must start at 0 and end at N; `sync()` and `validate_keyed_jagged_tensor` check that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import sub
from typing import Any, final

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.jagged.definition import jagged_to_padded, padded_to_jagged
from tilerec.sparse.memory import allocate_like, record_stream, size_in_bytes
from tilerec.sparse.segments import Segments, checked_segments
from tilerec.sparse.value_checks import SHOWN, check_items, is_printable_in_full
from tilerec.torch_private import pytree


@final
class JaggedTensor:
    """Bags of different lengths.

    Args:
        values: [N] or [N, ...], any dtype.
        weights: one number per item, [N], or one per element, of the shape of the values; none by default.
        lengths: [B], int32 or int64: items per bag.
        offsets: [B + 1], int32 or int64: start of each bag, and end of the last. Pass `lengths` or `offsets`; the other
            is derived at its first use.

    Raises `InputError` for values without a dimension, weights of another shape, and objects that are not tensors. Also
    if lengths and offsets are both missing, are not integers, or differ in number. Types and shapes are checked;
    contents are not, since reading them would wait for the device.

    Bags [10, 11], [] and [12]::

        JaggedTensor(torch.tensor([10, 11, 12]), lengths=torch.tensor([2, 0, 1]))
    """

    __slots__ = ("_segments", "_values", "_weights")

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        check_items("JaggedTensor", values, weights)
        self._values = values
        self._weights = weights
        self._segments = checked_segments("JaggedTensor", lengths, offsets)

    @staticmethod
    def from_segments(values: Tensor, weights: Tensor | None, segments: Segments) -> JaggedTensor:
        """Build a jagged tensor from consistent parts, without checks."""
        jagged = JaggedTensor.__new__(JaggedTensor)
        jagged._values = values
        jagged._weights = weights
        jagged._segments = segments
        return jagged

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """Return a tensor without bags."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        lengths = torch.empty(0, dtype=lengths_dtype, device=device)
        return JaggedTensor(torch.empty(0, dtype=values_dtype, device=device), weights, lengths)

    @staticmethod
    def empty_like(jt: JaggedTensor, device: torch.device | None = None) -> JaggedTensor:
        """Without `device`: return a tensor without bags, with the dtypes of `jt`.

        With `device`: return uninitialised memory there with the shapes of `jt`, for `copy_(jt)` to fill.
        """
        if device is not None:
            return jt._map(functools.partial(allocate_like, device=device))
        weights = jt.weights_or_none()
        lengths = jt._segments.given_lengths
        return JaggedTensor.empty(
            is_weighted=weights is not None,
            device=jt.device(),
            values_dtype=jt.values().dtype,
            weights_dtype=None if weights is None else weights.dtype,
            lengths_dtype=jt._segments.offsets().dtype if lengths is None else lengths.dtype,
        )

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> JaggedTensor:
        """Make one bag per tensor of the list; lengths are int32.

        Raises `InputError` for an empty list (it has no dtype: use `JaggedTensor.empty`) and for weights that do not
        match the values.
        """
        if not values:
            raise InputError(
                "JaggedTensor.from_dense: got an empty list; expected at least one tensor. Use "
                "JaggedTensor.empty(values_dtype=...)."
            )
        for name, bags in (("values", values), ("weights", weights or [])):
            for bag in bags:
                if not isinstance(bag, Tensor) or bag.dim() == 0:
                    raise InputError(
                        f"JaggedTensor.from_dense: got {bag!r} in {name}; expected a list of tensors. Pass one [items] "
                        "per bag."
                    )
        sizes = [bag.shape[0] for bag in values]
        if weights is not None and [bag.shape[0] for bag in weights] != sizes:
            raise InputError(
                "JaggedTensor.from_dense: got weights with another number of bags or items than the values; expected "
                "the same. Pass one weight per item."
            )
        return JaggedTensor(
            torch.cat(values),
            None if weights is None else torch.cat(weights),
            torch.tensor(sizes, dtype=torch.int32, device=values[0].device),
        )

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """Make a bag of the first `lengths[b]` items of each row of `values` [B, L] (or [B, L, ...]).

        values [[1, 2, 3], [4, 5, 6]], lengths [1, 3] -> bags [1] and [4, 5, 6]

        Weights are padded like the values. Waits for the device once, to read the number of items.
        """
        segments = checked_segments("JaggedTensor.from_dense_lengths", lengths, None)
        if values.dim() < 2 or values.shape[0] != segments.count():
            raise InputError(
                f"JaggedTensor.from_dense_lengths: got values of shape {list(values.shape)} with "
                f"{segments.count()} lengths; "
                f"expected [lengths, items]. Pass one row per length."
            )
        shapes = (values.shape[:2], values.shape)
        if weights is not None and not torch.compiler.is_compiling() and weights.shape not in shapes:
            raise InputError(
                f"JaggedTensor.from_dense_lengths: got weights of shape {list(weights.shape)}; expected one number per "
                f"padded item, {list(values.shape[:2])}, or per element, {list(values.shape)}. Pad them like values."
            )
        offsets_B1 = segments.offsets()
        if not torch.compiler.is_compiling() and lengths.numel() > 0:
            shortest, longest = (int(length) for length in torch.stack(lengths.aminmax()).tolist())
            if longest > values.shape[1]:
                raise InputError(
                    f"JaggedTensor.from_dense_lengths: got a length of {longest}; expected at most the "
                    f"{values.shape[1]} items of a row. Cut the lengths or widen the rows."
                )
            if shortest < 0:
                raise InputError(
                    f"JaggedTensor.from_dense_lengths: got a length of {shortest}; expected 0 or more. Clamp the "
                    "lengths."
                )
        total = int(offsets_B1[-1].item())
        jagged_weights = None if weights is None else padded_to_jagged(weights, offsets_B1, total)
        return JaggedTensor.from_segments(padded_to_jagged(values, offsets_B1, total), jagged_weights, segments)

    def to_dense(self) -> list[Tensor]:
        """Return one tensor per bag, as views of the values. Waits for the device.

        Raises `InputError` for bags that reach outside the values.
        """
        return self._bags(self._values)

    def to_dense_weights(self) -> list[Tensor] | None:
        """Return the weights of each bag, or None without weights. Waits for the device."""
        return None if self._weights is None else self._bags(self._weights)

    def _bags(self, items_N: Tensor) -> list[Tensor]:
        if torch.compiler.is_compiling():
            return list(items_N.split(self._segments.lengths().tolist()))
        bounds = self._segments.offsets().tolist()
        first, last = bounds[0], bounds[-1]
        sizes = list(map(sub, bounds[1:], bounds[:-1]))
        if first < 0 or last > items_N.shape[0] or min(sizes, default=0) < 0:
            raise InputError(
                f"JaggedTensor: got bags of {_shortened(sizes)} items from {first} on; expected bags within the "
                f"{items_N.shape[0]} values. Pass lengths from 0 that sum to the number of values."
            )
        # The bags may be a part of the values.
        return list(items_N[first:last].split(sizes))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Return the bags as rows of `desired_length` items, truncated or padded at the end: [B, L, ...].

        By default `desired_length` is that of the longest bag; reading it waits for the device.
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """Return the weights in the layout of `to_padded_dense`, or None without weights."""
        if self._weights is None:
            return None
        return self._padded(self._weights, desired_length, padding_value)

    def _padded(self, items_N: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        if desired_length is None:
            lengths_B = self._segments.lengths()
            desired_length = int(lengths_B.max().item()) if lengths_B.shape[0] > 0 else 0
        return jagged_to_padded(items_N, self._segments.offsets(), desired_length, padding_value)

    def values(self) -> Tensor:
        """Return all items, one bag after the other [N, ...]."""
        return self._values

    def weights(self) -> Tensor:
        """Return the weights [N] or [N, ...]; raise `InputError` without weights."""
        if self._weights is None:
            raise InputError(
                "JaggedTensor: got no weights; expected a weighted tensor. Make it with weights=, or call "
                "weights_or_none()."
            )
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return the weights [N] or [N, ...], or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the number of items of each bag [B]."""
        return self._segments.lengths()

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths if they were given or already derived, else None."""
        return self._segments.lengths_or_none()

    def offsets(self) -> Tensor:
        """Return the start of each bag, and the end of the last [B + 1]."""
        return self._segments.offsets()

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets if they were given or already derived, else None."""
        return self._segments.offsets_or_none()

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def to(self, device: torch.device, non_blocking: bool = False) -> JaggedTensor:
        """Return a copy on `device`; tensors that are already there are shared."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> JaggedTensor:
        """Return a copy in pinned memory, for asynchronous transfers."""
        return self._map(lambda tensor: tensor.pin_memory())

    def copy_(self, jt: JaggedTensor, non_blocking: bool = False) -> JaggedTensor:
        """Overwrite this tensor's memory with `jt`, which must have the same shapes."""
        ours = (
            self._values.shape,
            None if self._weights is None else self._weights.shape,
            self._segments.count(),
        )
        theirs = (jt._values.shape, None if jt._weights is None else jt._weights.shape, jt._segments.count())
        if ours != theirs:
            raise InputError(
                f"JaggedTensor.copy_: got a source with values {list(theirs[0])}, weights "
                f"{theirs[1] and list(theirs[1])} and {theirs[2]} bags; expected values {list(ours[0])}, weights "
                f"{ours[1] and list(ours[1])} and {ours[2]} bags. Make a new tensor with to(device)."
            )
        self._values.copy_(jt._values, non_blocking=non_blocking)
        if self._weights is not None:
            self._weights.copy_(jt.weights(), non_blocking=non_blocking)
        self._segments.copy_(jt._segments, non_blocking)
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory allocated until the work queued on `stream` is done. No effect for tensors on the host."""
        record_stream(self._tensors(), stream)

    def size_in_bytes(self) -> int:
        """Return the bytes of all tensors of this object."""
        return size_in_bytes(self._tensors())

    def _tensors(self) -> list[Tensor]:
        payload = [self._values] if self._weights is None else [self._values, self._weights]
        return payload + self._segments.tensors()

    def _map(self, function: Callable[[Tensor], Tensor]) -> JaggedTensor:
        weights = None if self._weights is None else function(self._weights)
        return JaggedTensor.from_segments(function(self._values), weights, self._segments.map(function))

    def __repr__(self) -> str:
        """Return the bags if the tensor is small and readable, else its shapes: debuggers call it at any time."""
        if readable(self):
            return f"JaggedTensor({{\n    {describe_bags(self, indent=4)}\n}})\n"
        return f"JaggedTensor({describe_parts(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        leaves, present = _flatten(self)
        return _rebuild, (leaves, list(present))


def describe_bags(jt: JaggedTensor, indent: int) -> str:
    """Format the bags as nested lists; with weights, under the names "values" and "weights"."""
    values = _nested(jt.to_dense())
    weighted = jt.to_dense_weights()
    if weighted is None:
        return values
    inner = " " * (indent + 4)
    weights = _nested(weighted)
    return f'"values": {values},\n{inner[4:]}"weights": {weights}'


def _nested(bags: list[Tensor]) -> str:
    return "[" + ", ".join(str(bag.tolist()) for bag in bags) + "]"


def describe_parts(jt: JaggedTensor) -> str:
    """Format shapes, dtype and device, for a tensor whose contents are unreadable or large."""
    values, weighted = jt.values(), jt.weights_or_none() is not None
    if not _holds_tensors(jt):
        leaves = {name: part for name, part in zip(_FIELDS, _parts(jt), strict=True) if part is not None}
        return ", ".join(f"{name} {part!r}" for name, part in leaves.items())
    return (
        f"values {list(values.shape)} {values.dtype}, {jt._segments.count()} bags"
        f"{', weights' if weighted else ''}, device={str(values.device)!r}"
    )


def readable(jt: JaggedTensor) -> bool:
    """Return True if the contents are small, valid and available on a device with memory."""
    if not _holds_tensors(jt) or not is_printable_in_full(jt.values()) or jt._segments.count() > SHOWN:
        return False
    bounds = jt.offsets()
    return bool((bounds.diff() >= 0).all() and bounds[0] >= 0 and bounds[-1] <= jt.values().shape[0])


def _holds_tensors(jt: JaggedTensor) -> bool:
    """Return False for a tree mapped from a jagged tensor's leaves to other objects, such as shapes."""
    return all(part is None or isinstance(part, Tensor) for part in _parts(jt))


def _shortened(numbers: list[int], limit: int = 8) -> str:
    return str(numbers) if len(numbers) <= limit else f"[{', '.join(map(str, numbers[:limit]))}, …]"


def jt_is_equal(jt_1: object, jt_2: object) -> bool:
    """Return True if two jagged tensors have equal dtypes, values, weights and bags (floats up to rounding).

    Returns False for tensors on different devices, and for objects that are not a `JaggedTensor`.
    """
    if not isinstance(jt_1, JaggedTensor) or not isinstance(jt_2, JaggedTensor):
        return False
    return (
        _same(jt_1.values(), jt_2.values())
        and _same(jt_1.weights_or_none(), jt_2.weights_or_none())
        and _same(jt_1.lengths().long(), jt_2.lengths().long())
        and jt_1._segments.begin() == jt_2._segments.begin()
    )


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return torch.allclose(one, other) if one.is_floating_point() else torch.equal(one, other)


# Each given tensor is a pytree leaf; the names of the leaves are static. Derived tensors are not part of the value, so
# they never change the structure for compilers and exporters.

_FIELDS = ("values", "weights", "lengths", "offsets")


def _parts(jt: JaggedTensor) -> tuple[Tensor | None, ...]:
    return jt._values, jt._weights, jt._segments.given_lengths, jt._segments.given_offsets


def _flatten(jt: JaggedTensor) -> tuple[list[Any], tuple[str, ...]]:
    present = [(name, part) for name, part in zip(_FIELDS, _parts(jt), strict=True) if part is not None]
    return [part for _, part in present], tuple(name for name, _ in present)


def _flatten_with_keys(jt: JaggedTensor) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    leaves, present = _flatten(jt)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(present, leaves, strict=True)], present


def _unflatten(leaves: Any, present: tuple[str, ...]) -> JaggedTensor:
    parts = dict(zip(present, leaves, strict=True))
    segments = Segments(parts.get("lengths"), parts.get("offsets"))
    return JaggedTensor.from_segments(parts["values"], parts.get("weights"), segments)


pytree.register_pytree_node(
    JaggedTensor,
    _flatten,
    _unflatten,
    serialized_type_name="tilerec.JaggedTensor",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)


def _rebuild(leaves: list[Any], present: list[str]) -> JaggedTensor:
    """Rebuild from `__reduce__`, for copies and pickles."""
    return _unflatten(leaves, tuple(present))


# The pickle contains only tensors and names, so `torch.load(weights_only=True)` and `torch.export.load` may read it.
torch.serialization.add_safe_globals([_rebuild])
