"""Copy of a keyed jagged tensor's contents into the memory of another one."""

from __future__ import annotations

from tilerec.errors import InputError
from tilerec.sparse.kjt_fields import Parts


def copy_parts_(ours: Parts, theirs: Parts, non_blocking: bool) -> Parts:
    """Overwrite the tensors of `ours`; see `KeyedJaggedTensor.copy_`. Returns `ours` with the new key offsets.

    Raises:
        InputError: keys, batch sizes by key, or the presence of inverse indices differ.
    """
    if ours.keys != theirs.keys:
        raise InputError(
            f"KeyedJaggedTensor.copy_: got a source with keys {list(theirs.keys.names[:8])}; expected "
            f"{list(ours.keys.names[:8])}. Make a new tensor with to(device)."
        )
    if ours.strides != theirs.strides:
        raise InputError(
            "KeyedJaggedTensor.copy_: got a source with other batch sizes by key and rank; expected the same. Make "
            "a new tensor with to(device)."
        )
    if (ours.inverse_indices is None) != (theirs.inverse_indices is None):
        raise InputError(
            "KeyedJaggedTensor.copy_: got inverse indices in only one of the tensors; expected both or none. Make "
            "a new tensor with to(device)."
        )
    ours.as_jagged().copy_(theirs.as_jagged(), non_blocking)
    inverse_indices = ours.inverse_indices
    if inverse_indices is not None and theirs.inverse_indices is not None:
        names, index_FB = theirs.inverse_indices
        inverse_indices = (list(names), inverse_indices[1].copy_(index_FB, non_blocking=non_blocking))
    return ours._replace(inverse_indices=inverse_indices, key_offsets=theirs.key_offsets)
