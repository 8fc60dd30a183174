"""`HeadFill`: fills a new head, the copies of hot rows on this rank, while a table moves.

Rows that were hot are copied from the old head. Rows that become hot come from their owners.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilerec.errors import CommsError
from tilerec.ops.cache.definition import indexable
from tilerec.sharding.head_rows import HotCopies
from tilerec.sharding.logical import CopiesFill, LogicalTensor

Ids = npt.NDArray[np.int64]


class _TensorFill(NamedTuple):
    """The fill of one tensor. `old`: the same tensor of the old head; `fresh`: its rows that become hot, maybe all."""

    head: Tensor
    old: Tensor | None
    fresh: Tensor
    fill: CopiesFill


class HeadFill:
    """The fill of the tensors of a new head.

    Args:
        ids, before: the hot ids after the move and before it, ascending.
    """

    def __init__(self, ids: Ids, before: Ids) -> None:
        stays = np.isin(ids, before)
        self._fresh = torch.from_numpy(np.flatnonzero(~stays))
        self._kept = torch.from_numpy(np.flatnonzero(stays))
        self._was = torch.from_numpy(np.searchsorted(before, ids[stays]))
        self._ids_fresh = torch.from_numpy(ids[~stays])
        self._tensors: list[_TensorFill] = []

    def add(self, head: Tensor, old: Tensor | None, rows: LogicalTensor) -> None:
        """Add a tensor, and allocate its messages. Nothing is read or written before `run`.

        Args:
            head: the tensor `[H, columns]` or `[H]`.
            old: the same tensor of the old head; None: there is no old head.
            rows: the rows that it has copies of.
        """
        fresh = head.new_empty((len(self._fresh), *head.shape[1:])) if len(self._kept) else head
        copies = HotCopies(self._ids_fresh.to(head.device), fresh)
        fill = CopiesFill(replace(rows, copies=copies))
        self._tensors.append(_TensorFill(head, old if len(self._kept) else None, fresh, fill))

    @torch.no_grad()
    def run(self) -> None:
        """Fill the head. Collective. A rank that cannot read its rows raises after the last exchange."""
        failure: Exception | None = None
        for head, old, fresh, fill in self._tensors:
            try:
                fill.run()
                if old is not None:
                    indexable(head)[self._kept.to(head.device)] = indexable(old)[self._was.to(head.device)]
                if fresh is not head:
                    indexable(head)[self._fresh.to(head.device)] = indexable(fresh)
            except CommsError:  # a peer is gone
                raise
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure
