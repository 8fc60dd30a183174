"""The saved state of a table's ids: its names, how ranks show it together, and whether it is for this table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.modules.buckets import Buckets
from tilerec.ops.backends import advise_huge_pages
from tilerec.storage.flat import HUGE_FROM

HASH_NAMES = ("ids", "used", "since", "last", "hits", "expires", "admission")
"""Of the fields of `HashState`, in order."""


class StateView(ABC):
    """How the state of the buckets that are here looks in a state dict, where others hold the rest."""

    @abstractmethod
    def show(self, own: Tensor, per_bucket: int) -> Tensor:
        """The tensor of all buckets, `per_bucket` of its first dimension each."""

    @abstractmethod
    def take(self, own: Tensor, per_bucket: int, value: Tensor) -> None:
        """Write what a state dict holds for all buckets into this part of it."""


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Zeros; on the CPU in large pages where there are many: ids come at random, and each touches one place of each."""
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    if made.device.type == "cpu" and made.nbytes >= HUGE_FROM:
        advise_huge_pages(made)  # best before they are first written
    return made.zero_()


def misfit(
    who: str, own: Buckets, max_probe: int, wanted: Mapping[str, tuple[Tensor, int]], whole: int,
    state: Mapping[str, Any],
) -> str | None:  # fmt: skip
    """Why a saved state is not for a table, in words; None where it is.

    Args:
        wanted: by name the tensors it fills and their entries per bucket. whole: of how many buckets it tells.
    """
    said = state.get("geometry")
    if isinstance(said, Tensor) and said.numel() == 4:
        count, size, shared, probe = said.tolist()
        if (count, size, shared) != (own.count, own.size, own.shared):
            return (
                f"{who}: the state is of {count} buckets of {size} rows ({shared} of them shared), and this "
                f"table has {own.count} of {own.size} ({own.shared} shared); load it into a table of its size, and "
                "resize that."
            )
        if probe > max_probe:
            return (
                f"{who}: the state was made with max_probe={probe}, and with {max_probe} ids that lie "
                f"further from their start would not be found; use max_probe={probe} or more."
            )
    for name, (tensor, per_bucket) in wanted.items():
        value = state.get(name)
        want = (whole * per_bucket, *tensor.shape[1:])
        if not isinstance(value, Tensor):
            return f"{who}: '{name}' is a {type(value).__name__}, wanted a tensor."
        if tuple(value.shape) != want:
            return (
                f"{who}: size mismatch for '{name}': the state has shape {tuple(value.shape)}, this table "
                f"{want}; it is of other buckets, or of other features."
            )
    return None
