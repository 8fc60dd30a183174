"""Pytree leaves of a keyed jagged tensor: one per given tensor, for compilers, exporters and pickles.

The *context* is static: the keys, the names of the leaves, and a batch size that no leaf has. Other batch sizes are
derived from shapes; those of a variable batch are a leaf. Fetched and derived tensors are not part of the value, so
they change neither the structure nor the number of graphs.
"""

from __future__ import annotations

from typing import Any

from tilerec.sparse.keys import Keys
from tilerec.sparse.kjt_fields import Parts
from tilerec.sparse.segments import Segments
from tilerec.sparse.strides import Strides

Context = tuple[tuple[str, ...], tuple[str, ...], int, tuple[str, ...]]
"""(keys, names of the leaves, `Parts.known_stride` if the batch size depends on it, keys of the inverse indices)."""


def flatten(parts: Parts) -> tuple[list[Any], Context]:
    """Return leaves and context: "a": [1, 2], [] -> [values, lengths], (("a",), ("values", "lengths"), 0, ())."""
    inverse = parts.inverse_indices
    leaves = {
        "values": parts.values,
        "weights": parts.weights,
        "lengths": parts.segments.given_lengths,
        "offsets": parts.segments.given_offsets,
        "stride_per_key_per_rank": None if parts.strides is None else parts.strides.tensor(),
        "inverse_indices": None if inverse is None else inverse[1],
    }
    present = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    stride = parts.known_stride if len(parts.keys) == 0 or parts.strides is not None else 0
    inverse_keys = () if inverse is None else tuple(inverse[0])
    return list(present.values()), (parts.keys.names, tuple(present), stride, inverse_keys)


def flatten_as_text(parts: Parts) -> tuple[list[Any], str]:
    """Return the leaves, and the context as text for `ast.literal_eval`, with a stride of 0."""
    leaves, (_, present, _, inverse_keys) = flatten(parts)
    return leaves, f"({parts.keys.text}, {present!r}, 0, {inverse_keys!r})"


def unflatten(leaves: Any, context: Context) -> Parts:
    """Rebuild the parts from the results of `flatten`; leaves may be any objects that a tree is mapped to."""
    keys, present, stride, inverse_keys = context
    found = dict(zip(present, leaves, strict=True))
    strides = found.get("stride_per_key_per_rank")
    inverse = found.get("inverse_indices")
    return Parts(
        Keys.known(keys),
        found["values"],
        found.get("weights"),
        Segments(found.get("lengths"), found.get("offsets")),
        stride,
        None if strides is None else Strides(None, strides),
        None if inverse is None else (list(inverse_keys), inverse),
    )


def dump_context(context: Context) -> list[Any]:
    """Convert the context to lists, names and numbers, for JSON and `torch.load(weights_only=True)`."""
    keys, present, stride, inverse_keys = context
    return [list(keys), list(present), stride, list(inverse_keys)]


def load_context(dumped: list[Any]) -> Context:
    """Rebuild the context from the result of `dump_context`."""
    keys, present, stride, inverse_keys = dumped
    return tuple(keys), tuple(present), stride, tuple(inverse_keys)
