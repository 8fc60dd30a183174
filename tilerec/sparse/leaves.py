"""The leaves of a keyed jagged tensor: one per tensor that was given, for pytrees, compilers, exporters and pickles.

Keys, and which leaves there are, are static: the *context*. Batch sizes follow from shapes, those of a variable batch
are a leaf; a batch size that neither shows is static, too. What was fetched or derived is not part of the value: it
changes neither the structure nor the number of graphs.
"""

from __future__ import annotations

from typing import Any

from tilerec.sparse.keys import Keys
from tilerec.sparse.parts import Parts
from tilerec.sparse.segments import Segments
from tilerec.sparse.strides import Strides

Context = tuple[tuple[str, ...], tuple[str, ...], int, tuple[str, ...]]
"""Keys, the names of the leaves, `Parts.known_stride` where the batch size depends on it, the keys of the inverse
indices."""


def flatten(parts: Parts) -> tuple[list[Any], Context]:
    """Leaves and context. "a": [1, 2], [] by lengths -> [values, lengths], (("a",), ("values", "lengths"), 0, ())."""
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


def unflatten(leaves: Any, context: Context) -> Parts:
    """The parts that `flatten` took apart; leaves may be anything a tree is mapped to."""
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
    """The context as lists, names and numbers, which JSON and `torch.load(weights_only=True)` take."""
    keys, present, stride, inverse_keys = context
    return [list(keys), list(present), stride, list(inverse_keys)]


def load_context(dumped: list[Any]) -> Context:
    """Undo `dump_context`."""
    keys, present, stride, inverse_keys = dumped
    return tuple(keys), tuple(present), stride, tuple(inverse_keys)
