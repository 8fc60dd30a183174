"""Samples of a variable batch: the inverse indices give the bag that each sample uses, per feature.

    keys ["a", "b"], bags [2, 3], index [[0, 0, 1], [0, 1, 2]]   samples 0 and 1 share bag 0 of "a"

On the CPU an index outside the bags raises immediately. On other devices the host does not wait. The index is clamped
into the bags, and the error is raised later, by asynchronous readback (`ops/runtime/readback.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.runtime.fetch import host_readable
from tilerec.ops.runtime.readback import on_arrival, poll
from tilerec.ops.runtime.upload import upload
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.torch_private import dispatch_mode_count


def check_samples(who: str, wanted: Sequence[str], features: KeyedJaggedTensor) -> None:
    """Raise an `InputError` if a variable batch lacks inverse indices, or if an index is outside its bags.

    Args:
        who: name of the module, for messages.
        wanted: the features that the module reads.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        raise InputError(
            f"{who}: got a batch of {sorted(set(features.stride_per_key()))} samples per key without inverse_indices, "
            "so its features have no common batch size. Pass inverse_indices=(keys, indices) with the batch."
        )
    keys, index_FB = inverse
    missing = [feature for feature in wanted if feature not in keys]
    if missing:
        raise InputError(
            f"{who}: feature '{missing[0]}' is not among the keys of the batch's inverse_indices, {list(keys)[:20]}. "
            "Give indices for every feature that the tables read."
        )
    traced = torch.compiler.is_compiling() or dispatch_mode_count()
    if traced or index_FB.is_meta or not index_FB.numel():
        return
    bags = _bags(features, keys)
    bags_F1 = upload(bags, index_FB.device)[:, None]
    wrong_FB = (index_FB < 0) | (index_FB >= bags_F1)
    report = partial(_raise_wrong, keys, bags, index_FB.shape[1])
    if host_readable(index_FB):
        if bool(wrong_FB.any()):
            at = wrong_FB.flatten().nonzero()[0, 0]
            report([1, int(at), int(index_FB.flatten()[at])])
        return
    at = wrong_FB.flatten().to(torch.uint8).argmax()
    on_arrival(torch.stack((wrong_FB.any().long(), at, index_FB.flatten()[at].long())), report)
    poll(index_FB.device)


def sample_bags(features: KeyedJaggedTensor) -> dict[str, Tensor]:
    """Return the bag of every sample by feature, int [B]. Outside the CPU, indices are clamped into the bags."""
    keys, index_FB = features.inverse_indices()
    if not (host_readable(index_FB) or index_FB.is_meta) and not torch.compiler.is_compiling():
        last_F1 = upload([max(count - 1, 0) for count in _bags(features, keys)], index_FB.device)[:, None]
        index_FB = torch.minimum(index_FB.clamp(min=0), last_F1.to(index_FB.dtype))
    return dict(zip(keys, index_FB.unbind(0), strict=True))


def _bags(features: KeyedJaggedTensor, keys: Sequence[str]) -> list[int]:
    """Return the number of bags of each key; for a key that the batch lacks, the largest int64."""
    own = dict(zip(features.keys(), features.stride_per_key(), strict=False))
    return [own.get(key, torch.iinfo(torch.int64).max) for key in keys]


def _raise_wrong(keys: Sequence[str], bags: Sequence[int], samples: int, numbers: Sequence[int]) -> None:
    wrong, at, bag = numbers
    if wrong:
        raise_bad_inverse_index(keys[at // samples], at % samples, bag, bags[at // samples])


def raise_bad_inverse_index(feature: str, sample: int, bag: int, bags: int) -> NoReturn:
    """Raise the `InputError` for a sample that uses a bag outside `[0, bags)`."""
    raise InputError(
        f"Feature '{feature}': inverse_indices of sample {sample} is bag {bag}; expected one of [0, {bags}). Check how "
        "the batch was deduplicated."
    )
