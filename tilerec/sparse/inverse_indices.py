"""Inverse indices of a deduplicated batch: the bag of each key that each sample of the full batch uses.

    keys ["a", "b"], index [[0, 0, 1], [0, 1, 2]]   samples 0 and 1 share bag 0 of "a"; each sample has its own of "b"

A deduplicated batch holds each distinct bag of a key once, so its batch size varies by key. Inverse indices map samples
to bags.

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
"""(keys, int tensor [F, B]): for each key, the bag that each sample of the full batch uses."""


def checked_inverse(given: InverseIndices | None) -> InverseIndices | None:
    """Check types and shapes of a caller's inverse indices. Their users, and `validate_keyed_jagged_tensor`, check
    the contents.
    """
    if given is None:
        return None
    if not isinstance(given, (tuple, list)) or len(given) != 2 or not isinstance(given[1], Tensor):
        raise InputError(
            f"KeyedJaggedTensor: got a {type(given).__name__} as inverse_indices; expected a pair. Pass (keys, int "
            f"tensor [keys, batch])."
        )
    keys, index_FB = given
    if index_FB.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"KeyedJaggedTensor: got inverse indices of {index_FB.dtype}; expected torch.int64 or torch.int32. Convert "
            "them."
        )
    if index_FB.dim() != 2 or (not torch.compiler.is_compiling() and index_FB.shape[0] != len(keys)):
        raise InputError(
            f"KeyedJaggedTensor: got inverse indices of shape {list(index_FB.shape)} for {shorten(keys)}; expected "
            f"[{len(keys)}, batch]. Pass one row per key, and one column per sample of the full batch."
        )
    return keys, index_FB


def inverse_of(keys: Keys, inverse_indices: InverseIndices | None) -> InverseIndices | None:
    """Return the rows of `inverse_indices` that belong to `keys`, in the order of `keys`."""
    if inverse_indices is None:
        return None
    names, index_FB = inverse_indices
    row = {name: position for position, name in enumerate(names)}
    if tuple(names) == keys.names:
        return inverse_indices
    lacking = [key for key in keys if key not in row]
    if lacking:
        raise InputError(
            f"KeyedJaggedTensor: got inverse indices for {shorten(names)}, none for {shorten(lacking)}; expected a row "
            f"for every key of a variable batch. Add the missing keys to inverse_indices."
        )
    chosen = upload([row[key] for key in keys], index_FB.device)
    return list(keys.names), index_FB.index_select(0, chosen)


def join_inverse(pairs: Sequence[InverseIndices]) -> InverseIndices:
    """Concatenate the rows of all `pairs`, one pair after the other."""
    return [key for keys, _ in pairs for key in keys], torch.cat([index for _, index in pairs])
