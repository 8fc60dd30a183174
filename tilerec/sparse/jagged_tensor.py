"""`JaggedTensor`: bags of different lengths in one run of values.

Glossary
    bag       the items of one sample, possibly none
    values_N  the items of all bags, one bag after the other; `values_N` may be [N] or [N, ...]
    weights_N one number per item, or of the shape of the values, or none
    lengths_B, offsets_B1   see `sparse/segments.py`:  bag b = values[offsets[b] : offsets[b + 1]]

Offsets may begin later than 0 and end before N: the bags are then part of a larger run of values. (A keyed tensor wants
offsets that begin at 0 and end at N: `sync()` and `validate_keyed_jagged_tensor` say where they do not.)
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
from tilerec.sparse.items import SHOWN, allocate_like, check_items, shown_in_full
from tilerec.sparse.segments import Segments, checked_segments
from tilerec.torch_private import pytree


@final
class JaggedTensor:
    """Bags of different lengths.

    Args:
        values: [N] or [N, ...], any dtype.
        weights: one number per item, [N], or one per element, of the shape of the values; none by default.
        lengths: [B], int32 or int64: items per bag.
        offsets: [B + 1], int32 or int64: where bags begin. One of the two is required, the other is derived when
            asked for.

    Raises `InputError` for values without a dimension, weights of another shape, lengths and offsets that
    are both missing, not integers, or disagree in number, and for anything that is not a tensor. Types and shapes are
    checked; what the lengths say is not, since reading it would wait for the device.

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
        """A jagged tensor of parts that are known to fit; checks nothing."""
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
        """No bags."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        lengths = torch.empty(0, dtype=lengths_dtype, device=device)
        return JaggedTensor(torch.empty(0, dtype=values_dtype, device=device), weights, lengths)

    @staticmethod
    def empty_like(jt: JaggedTensor, device: torch.device | None = None) -> JaggedTensor:
        """Without `device`: no bags, with the dtypes of `jt`.

        With `device`: uninitialised memory there for all of `jt`, to be filled by `copy_(jt)`.
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
        """One bag per tensor of the list; lengths are int32.

        Raises `InputError` for an empty list (it has no dtype: use `JaggedTensor.empty`) and for weights that do not
        match the values.
        """
        if not values:
            raise InputError(
                "JaggedTensor.from_dense: the list is empty; use JaggedTensor.empty(values_dtype=...)."
            )
        for name, bags in (("values", values), ("weights", weights or [])):
            for bag in bags:
                if not isinstance(bag, Tensor) or bag.dim() == 0:
                    raise InputError(
                        f"JaggedTensor.from_dense: {name} hold {bag!r}; wanted a list of tensors, one [items] per bag."
                    )
        sizes = [bag.shape[0] for bag in values]
        if weights is not None and [bag.shape[0] for bag in weights] != sizes:
            raise InputError(
                "JaggedTensor.from_dense: weights and values differ in the number of bags or of their items."
            )
        return JaggedTensor(
            torch.cat(values),
            None if weights is None else torch.cat(weights),
            torch.tensor(sizes, dtype=torch.int32, device=values[0].device),
        )

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """The first `lengths[b]` items of each row of `values` [B, L] (or [B, L, ...]); weights are padded alike.

        values [[1, 2, 3], [4, 5, 6]], lengths [1, 3] -> bags [1] and [4, 5, 6]

        Waits for the device once, to learn how many items there are.
        """
        segments = checked_segments("JaggedTensor.from_dense_lengths", lengths, None)
        if values.dim() < 2 or values.shape[0] != segments.count():
            raise InputError(
                f"JaggedTensor.from_dense_lengths: values have shape {list(values.shape)} with "
                f"{segments.count()} lengths; "
                f"wanted one row per length."
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
                    f"JaggedTensor.from_dense_lengths: a length of {longest} exceeds the row's {values.shape[1]} "
                    f"items; cut the lengths or widen the rows."
                )
            if shortest < 0:
                raise InputError(
                    f"JaggedTensor.from_dense_lengths: a length of {shortest} is negative; wanted 0 or more."
                )
        total = int(offsets_B1[-1].item())
        jagged_weights = None if weights is None else padded_to_jagged(weights, offsets_B1, total)
        return JaggedTensor.from_segments(
            padded_to_jagged(values, offsets_B1, total), jagged_weights, segments
        )

    def to_dense(self) -> list[Tensor]:
        """One tensor per bag: views of the values. Waits for the device.

        Raises `InputError` for bags that reach outside of the values.
        """
        return self._bags(self._values)

    def to_dense_weights(self) -> list[Tensor] | None:
        """The weights of each bag, or None without weights. Waits for the device."""
        return None if self._weights is None else self._bags(self._weights)

    def _bags(self, items_N: Tensor) -> list[Tensor]:
        if torch.compiler.is_compiling():
            return list(items_N.split(self._segments.lengths().tolist()))
        bounds = self._segments.offsets().tolist()
        first, last = bounds[0], bounds[-1]
        sizes = list(map(sub, bounds[1:], bounds[:-1]))
        if first < 0 or last > items_N.shape[0] or min(sizes, default=0) < 0:
            raise InputError(
                f"JaggedTensor: bags of {_few(sizes)} items from {first} on do not fit {items_N.shape[0]} values; "
                f"wanted lengths that are not negative and sum to the number of values."
            )
        # The bags may be part of a larger run of values.
        return list(items_N[first:last].split(sizes))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """[B, L, ...]: bags as rows of `desired_length` items, cut or padded at the end.

        Without `desired_length` the longest bag decides, which waits for the device.
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """The weights as `to_padded_dense` lays out the values, or None without weights."""
        if self._weights is None:
            return None
        return self._padded(self._weights, desired_length, padding_value)

    def _padded(self, items_N: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        if desired_length is None:
            lengths_B = self._segments.lengths()
            desired_length = int(lengths_B.max().item()) if lengths_B.shape[0] > 0 else 0
        return jagged_to_padded(items_N, self._segments.offsets(), desired_length, padding_value)

    def values(self) -> Tensor:
        """All items, one bag after the other [N, ...]."""
        return self._values

    def weights(self) -> Tensor:
        """The weights [N] or [N, ...]; `InputError` if there are none."""
        if self._weights is None:
            raise InputError(
                "JaggedTensor: it has no weights; pass weights= when it is made, or ask weights_or_none()."
            )
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """The weights [N] or [N, ...], or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """Items per bag [B]."""
        return self._segments.lengths()

    def lengths_or_none(self) -> Tensor | None:
        """Lengths if they were given or asked for before."""
        return self._segments.lengths_or_none()

    def offsets(self) -> Tensor:
        """Where bags begin [B + 1]."""
        return self._segments.offsets()

    def offsets_or_none(self) -> Tensor | None:
        """Offsets if they were given or asked for before."""
        return self._segments.offsets_or_none()

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def to(self, device: torch.device, non_blocking: bool = False) -> JaggedTensor:
        """A copy on `device` (tensors already there are shared)."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> JaggedTensor:
        """A copy in page-locked memory, for transfers that overlap."""
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
                f"JaggedTensor.copy_: this one has values {list(ours[0])}, weights {ours[1] and list(ours[1])} and "
                f"{ours[2]} bags, the source values {list(theirs[0])}, weights {theirs[1] and list(theirs[1])} and "
                f"{theirs[2]} bags; wanted the same; make a new one with to(device)."
            )
        self._values.copy_(jt._values, non_blocking=non_blocking)
        if self._weights is not None:
            self._weights.copy_(jt.weights(), non_blocking=non_blocking)
        self._segments.copy_(jt._segments, non_blocking)
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory alive until work queued on `stream` is done. No effect for tensors on the host."""
        for tensor in self._tensors():
            if tensor.device.type != "cpu":
                tensor.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Memory of every tensor held."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        payload = [self._values] if self._weights is None else [self._values, self._weights]
        return payload + self._segments.tensors()

    def _map(self, function: Callable[[Tensor], Tensor]) -> JaggedTensor:
        weights = None if self._weights is None else function(self._weights)
        return JaggedTensor.from_segments(function(self._values), weights, self._segments.map(function))

    def __str__(self) -> str:
        if self._values.is_meta:
            return f"JaggedTensor({describe_parts(self)})\n"
        return f"JaggedTensor({{\n    {describe_bags(self, indent=4)}\n}})\n"

    def __repr__(self) -> str:
        """The bags of a small tensor that can be read, shapes otherwise: a debugger asks at any time."""
        return str(self) if readable(self) else f"JaggedTensor({describe_parts(self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        leaves, present = _flatten(self)
        return _rebuild, (leaves, list(present))


def describe_bags(jt: JaggedTensor, indent: int) -> str:
    """The bags as nested lists: bare without weights, under "values" and "weights" with them."""
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
    """Shapes, dtype and device, for a tensor whose contents cannot or should not be shown."""
    values, weighted = jt.values(), jt.weights_or_none() is not None
    if not _holds_tensors(jt):
        leaves = {name: part for name, part in zip(_FIELDS, _parts(jt), strict=True) if part is not None}
        return ", ".join(f"{name} {part!r}" for name, part in leaves.items())
    return (
        f"values {list(values.shape)} {values.dtype}, {jt._segments.count()} bags"
        f"{', weights' if weighted else ''}, device={str(values.device)!r}"
    )


def readable(jt: JaggedTensor) -> bool:
    """Whether the contents are small, sound and there to be read."""
    if not _holds_tensors(jt) or not shown_in_full(jt.values()) or jt._segments.count() > SHOWN:
        return False
    bounds = jt.offsets()
    return bool((bounds.diff() >= 0).all() and bounds[0] >= 0 and bounds[-1] <= jt.values().shape[0])


def _holds_tensors(jt: JaggedTensor) -> bool:
    """False for a tree of shapes, say, that was mapped from a jagged tensor's leaves."""
    return all(part is None or isinstance(part, Tensor) for part in _parts(jt))


def _few(numbers: list[int], limit: int = 8) -> str:
    return str(numbers) if len(numbers) <= limit else f"[{', '.join(map(str, numbers[:limit]))}, …]"


def jt_is_equal(jt_1: object, jt_2: object) -> bool:
    """Whether two jagged tensors hold the same: dtypes, values, weights and where bags begin (floats up to rounding).

    False for tensors on different devices, and for anything that is not a `JaggedTensor`.
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


# A pytree leaf for each tensor that was given; which ones they are is static. What was derived is not part of the
# value, so it never changes the structure a compiler or exporter sees.

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
    """Undo `__reduce__`: a copy, or what comes out of a pickle."""
    return _unflatten(leaves, tuple(present))


# Nothing but tensors and names goes in: `torch.load(weights_only=True)` and `torch.export.load` may read it.
torch.serialization.add_safe_globals([_rebuild])
