"""State of buckets that are spread over ranks, as tensors of the whole table."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.modules.id_state import BucketStateView
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.sharding.logical import Cover, LogicalTensor, Piece
from tilerec.sharding.state import load, shown
from tilerec.spec.tile import Tile


@final
class BucketsView(BucketStateView):
    """The state of a table's buckets as logical tensors: rank r holds buckets [cuts[r], cuts[r + 1])."""

    def __init__(self, group: Group, cuts: Sequence[int]) -> None:
        self.group, self.cuts = group, tuple(cuts)

    def logical(self, own: Tensor, per_bucket: int) -> LogicalTensor:
        """Return the logical tensor of which this rank holds `own`.

        Args:
            own: this rank's part: whole buckets.
            per_bucket: rows of each bucket.
        """
        width = own.shape[1] if own.dim() == 2 else 1
        tiles = [
            Tile(first * per_bucket, last * per_bucket, 0, width, (rank,))
            for rank, (first, last) in enumerate(itertools.pairwise(self.cuts))
        ]
        rows = self.cuts[-1] * per_bucket
        cover = Cover.of_cells((rows, width), tiles) if own.dim() == 2 else Cover.of_rows(rows, tiles)
        return LogicalTensor(cover, (Piece(self.group.rank, own),), self.group, own.new_empty(0))

    def show(self, own: Tensor, per_bucket: int) -> Tensor:
        return shown(self.logical(own, per_bucket))

    def take(self, own: Tensor, per_bucket: int, value: Tensor) -> None:
        load(self.logical(own, per_bucket), value)

    def fill(self, made: Tensor, per_bucket: int, before: BucketsView, own: Tensor) -> None:
        """Move the buckets from their ranks under `before` to their ranks under this view. Collective.

        Args:
            made: output: this rank's part under this view.
            before: the view that `own` belongs to.
            own: this rank's part under `before`.
        """
        # As int64: communication backends do not support every integer dtype.
        words = torch.zeros_like(made, dtype=torch.int64)
        self.logical(words, per_bucket).load(before.logical(own.to(torch.int64), per_bucket))
        made.copy_(words)

    def __deepcopy__(self, memo: dict[int, Any]) -> BucketsView:
        return self  # a copied module uses the same group


def full_state_of(module: ManagedCollisionModule, destination: dict[str, Any], prefix: str) -> None:
    """Add the `state_dict` entries of a table's ids to `destination`, as whole plain tensors. Collective."""
    view = module._view
    for name, (tensor, per_bucket) in module.id_map.state_tensors().items():
        whole = view.logical(tensor, per_bucket).full() if isinstance(view, BucketsView) else tensor
        destination[prefix + name] = whole
    destination.update({prefix + name: number for name, number in module.numbers().items()})
