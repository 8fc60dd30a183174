"""Several queries as one batch, and its outputs as one answer for each.

A jagged input's values lie key by key. So the parts of each key are taken from all queries in turn.

Legend: B samples, K keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tilerec.errors import InputError
from tilerec.export.arrays import Array, check_array
from tilerec.export.manifest import Manifest
from tilerec.export.signature import BATCH, InputSpec
from tilerec.serve.wire import Query


def can_join(manifest: Manifest) -> bool:
    """Return True if every input and output has a size for the samples: outputs of a joined batch can be parted."""
    inputs = all(BATCH in spec.shape for own in manifest.signature.inputs for spec in own.tensors[-1:])
    return inputs and all(spec.shape[:1] == (BATCH,) for spec in manifest.outputs)


def joined(queries: Sequence[Query], manifest: Manifest) -> list[Array]:
    """Return the tensors of all queries as one batch."""
    if len(queries) == 1:
        return queries[0].tensors
    made: list[Array] = []
    at = 0
    for own in manifest.signature.inputs:
        parts = [query.tensors[at : at + len(own.tensors)] for query in queries]
        made += _joined_input(own, parts)
        at += len(own.tensors)
    return made


def _joined_input(own: InputSpec, parts: Sequence[list[Array]]) -> list[Array]:
    if not own.keys:
        return [np.concatenate(tensors) for tensors in zip(*parts, strict=True)]
    ends = [np.cumsum(tensors[-1].sum(1))[:-1] for tensors in parts]
    flat: list[Array] = []
    keys = len(own.keys)
    for place in range(len(own.tensors) - 1):  # values, and weights
        split = [np.split(tensors[place], own) for tensors, own in zip(parts, ends, strict=True)]
        flat.append(np.concatenate([one[key] for key in range(keys) for one in split]))
    return [*flat, np.concatenate([tensors[-1] for tensors in parts], 1)]


def parted(outputs: Sequence[Array], queries: Sequence[Query]) -> list[list[Array]]:
    """Return the outputs of each query."""
    if len(queries) == 1:
        return [list(outputs)]
    ends = np.cumsum([query.samples for query in queries])[:-1]
    split = [np.split(tensor, ends) for tensor in outputs]
    return [list(one) for one in zip(*split, strict=True)]


def check(query: Query, manifest: Manifest) -> None:
    """Raise `InputError` for a query that would spoil a joined batch: wrong shapes, or lengths that do not fit ids."""
    sizes: dict[str, int] = {}
    at = 0
    for own in manifest.signature.inputs:
        tensors = query.tensors[at : at + len(own.tensors)]
        for spec, tensor in zip(own.tensors, tensors, strict=True):
            check_array(spec, tensor, sizes)
        if own.kind != "Tensor":
            lengths, count = tensors[-1], tensors[0].shape[0]
            # A length above the count is wrong by itself; without such ones the sum cannot overflow.
            total = int(lengths.sum(dtype=np.int64))
            if total != count or bool(((lengths < 0) | (lengths > count)).any()):
                raise InputError(
                    f"Input '{own.name}': got lengths with the sum {total} for {count} ids; expected "
                    f"lengths from 0 to {count} with the sum {count}. Correct the lengths."
                )
        at += len(own.tensors)
