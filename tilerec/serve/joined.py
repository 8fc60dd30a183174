"""Several queries as one batch, and its outputs as one answer for each.

A jagged input's values lie key by key. So the parts of each key are taken from all queries in turn.

Legend: B samples, K keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.export.manifest import Manifest
from tilerec.export.signature import BATCH, InputSpec
from tilerec.serve.wire import Query


def can_join(manifest: Manifest) -> bool:
    """Return True if every input and output has a size for the samples: outputs of a joined batch can be parted."""
    inputs = all(BATCH in spec.shape for own in manifest.signature.inputs for spec in own.tensors[-1:])
    return inputs and all(spec.shape[:1] == (BATCH,) for spec in manifest.outputs)


def joined(queries: Sequence[Query], manifest: Manifest) -> list[Tensor]:
    """Return the tensors of all queries as one batch."""
    if len(queries) == 1:
        return queries[0].tensors
    made: list[Tensor] = []
    at = 0
    for own in manifest.signature.inputs:
        parts = [query.tensors[at : at + len(own.tensors)] for query in queries]
        made += _joined_input(own, parts)
        at += len(own.tensors)
    return made


def _joined_input(own: InputSpec, parts: Sequence[list[Tensor]]) -> list[Tensor]:
    if not own.keys:
        return [torch.cat(list(tensors)) for tensors in zip(*parts, strict=True)]
    sizes = [tensors[-1].sum(1).tolist() for tensors in parts]
    flat: list[Tensor] = []
    for place in range(len(own.tensors) - 1):  # values, and weights
        split = [tensors[place].split(own_sizes) for tensors, own_sizes in zip(parts, sizes, strict=True)]
        flat.append(torch.cat([one[key] for key in range(len(own.keys)) for one in split]))
    return [*flat, torch.cat([tensors[-1] for tensors in parts], 1)]


def parted(outputs: Sequence[Tensor], queries: Sequence[Query]) -> list[list[Tensor]]:
    """Return the outputs of each query."""
    if len(queries) == 1:
        return [list(outputs)]
    split = [tensor.split([query.samples for query in queries]) for tensor in outputs]
    return [list(one) for one in zip(*split, strict=True)]


def check(query: Query, manifest: Manifest) -> None:
    """Raise `InputError` for a query that would spoil a joined batch: wrong shapes, or lengths that do not fit ids."""
    sizes: dict[str, int] = {}
    at = 0
    for own in manifest.signature.inputs:
        tensors = query.tensors[at : at + len(own.tensors)]
        for spec, tensor in zip(own.tensors, tensors, strict=True):
            spec.check(tensor, sizes)
        if own.kind != "Tensor":
            lengths, count = tensors[-1], tensors[0].shape[0]
            # A length above the count is wrong by itself; without such ones the sum cannot overflow.
            if int(lengths.sum()) != count or bool(((lengths < 0) | (lengths > count)).any()):
                raise InputError(
                    f"Input '{own.name}': got lengths with the sum {int(lengths.sum())} for {count} ids; expected "
                    f"lengths from 0 to {count} with the sum {count}. Correct the lengths."
                )
        at += len(own.tensors)
