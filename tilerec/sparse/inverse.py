"""Inverse indices: which bag of each key every sample of the full batch uses.

    keys ["a", "b"], index [[0, 0, 1], [0, 1, 2]]   samples 0 and 1 share bag 0 of "a"; "b" has a bag for each

A batch that was deduplicated holds each key's distinct bags once, so that its batch size varies by key; a sample finds
its bags here.

Shapes
    index_FB  int32 or int64   the bag of key f that sample b uses
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.runtime.upload import upload
from tilerec.sparse.keys import Keys, shorten

InverseIndices = tuple[list[str], Tensor]
"""Keys, and for each of them the bag every sample of the full batch uses, int [F, B]."""


def checked_inverse(given: InverseIndices | None) -> InverseIndices | None:
    """A caller's inverse indices; what they say is checked where it is used, and by `validate_keyed_jagged_tensor`."""
    if given is None:
        return None
    if not isinstance(given, (tuple, list)) or len(given) != 2 or not isinstance(given[1], Tensor):
        raise InputError(
            f"KeyedJaggedTensor: inverse_indices are a {type(given).__name__}; wanted a pair (keys, int tensor "
            f"[keys, batch])."
        )
    keys, index_FB = given
    if index_FB.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"KeyedJaggedTensor: inverse indices have dtype {index_FB.dtype}; wanted torch.int64 or torch.int32."
        )
    if index_FB.dim() != 2 or (not torch.compiler.is_compiling() and index_FB.shape[0] != len(keys)):
        raise InputError(
            f"KeyedJaggedTensor: inverse indices for {shorten(keys)} have shape {list(index_FB.shape)}; wanted one row "
            f"per key and one column per sample of the full batch, [{len(keys)}, batch]."
        )
    return keys, index_FB


def inverse_of(keys: Keys, inverse_indices: InverseIndices | None) -> InverseIndices | None:
    """The rows of `inverse_indices` that belong to `keys`, in their order."""
    if inverse_indices is None:
        return None
    names, index_FB = inverse_indices
    row = {name: position for position, name in enumerate(names)}
    if tuple(names) == keys.names:
        return inverse_indices
    lacking = [key for key in keys if key not in row]
    if lacking:
        raise InputError(
            f"KeyedJaggedTensor: inverse indices are for {shorten(names)}, none for {shorten(lacking)}; wanted a row "
            f"for every key of a variable batch; add them to inverse_indices."
        )
    chosen = upload([row[key] for key in keys], index_FB.device)
    return list(keys.names), index_FB.index_select(0, chosen)


def join_inverse(pairs: Sequence[InverseIndices]) -> InverseIndices:
    """The rows of all `pairs`, one pair after the other."""
    return [key for keys, _ in pairs for key in keys], torch.cat([index for _, index in pairs])
