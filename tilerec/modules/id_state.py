"""Saved state of a table's id map: names, a view across ranks, and checks before loading."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.modules.buckets import Buckets
from tilerec.ops.backends import advise_huge_pages
from tilerec.storage.flat_storage import HUGE_FROM

HASH_NAMES = ("ids", "used", "since", "last", "hits", "expires", "admission")
"""Names of the fields of `HashState`, in order."""


class BucketStateView(ABC):
    """View of the state of all buckets in a state dict, when this rank holds only some of them."""

    @abstractmethod
    def show(self, own: Tensor, per_bucket: int) -> Tensor:
        """Return the tensor of all buckets; each takes `per_bucket` entries of the first dimension."""

    @abstractmethod
    def take(self, own: Tensor, per_bucket: int, value: Tensor) -> None:
        """Copy this rank's part of a state dict's tensor of all buckets into `own`."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Return zeros. Large CPU tensors use huge pages: ids arrive in random order, and each reads one entry of each."""
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    if made.device.type == "cpu" and made.nbytes >= HUGE_FROM:
        advise_huge_pages(made)  # best before the first write
    return made.zero_()


def mismatch_error(
    who: str, own: Buckets, max_probe: int, wanted: Mapping[str, tuple[Tensor, int]], whole: int,
    state: Mapping[str, Any],
) -> str | None:  # fmt: skip
    """Return an error message if a saved state does not fit a table, else None.

    Args:
        wanted: name to (tensor to fill, entries of its first dimension per bucket).
        whole: number of buckets that the state covers.
    """
    layout = state.get("geometry")
    if isinstance(layout, Tensor) and layout.numel() == 4:
        count, size, shared, probe = layout.tolist()
        if (count, size, shared) != (own.count, own.size, own.shared):
            return (
                f"{who}: got a state of {count} buckets of {size} rows ({shared} of them shared); expected "
                f"{own.count} of {own.size} ({own.shared} shared). Load it into a table of its size, and resize that."
            )
        if probe > max_probe:
            return (
                f"{who}: got a state written with max_probe={probe}; expected at most {max_probe}, because ids further "
                f"from their start would not be found. Use max_probe={probe} or more."
            )
    for name, (tensor, per_bucket) in wanted.items():
        value = state.get(name)
        want = (whole * per_bucket, *tensor.shape[1:])
        if not isinstance(value, Tensor):
            return f"{who}: got a {type(value).__name__} as '{name}'; expected a tensor."
        if tuple(value.shape) != want:
            return (
                f"{who}: size mismatch for '{name}': got shape {tuple(value.shape)}; expected {want}. The state "
                "belongs to other buckets, or to other features."
            )
    return None


def read_state(
    state_dict: Mapping[str, Any], prefix: str, names: Sequence[str], strict: bool, missing_keys: list[str],
    unexpected_keys: list[str],
) -> dict[str, Any] | None:  # fmt: skip
    """Return a module's entries of a state dict by name; None if one is missing.

    Reports missing and unexpected keys as `Module._load_from_state_dict` does. Without `strict`, a state dict without
    any of the names reports none.
    """
    found = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
    if strict:
        own = {prefix + name for name in names}
        unexpected_keys.extend(key for key in state_dict if key.startswith(prefix) and key not in own and prefix)
    missing = [prefix + name for name in names if name not in found]
    if missing and (strict or found):
        missing_keys.extend(missing)
    return None if missing else found
