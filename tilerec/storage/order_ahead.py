"""Orders of updates to come, made while the GPU has time: by `prefetch`, on whichever stream is current there.

    prefetch (batch i + 1)   its occurrences are sorted by row (`ops/update/order.py`)    any time before its backward
    backward (batch i + 1)   the update finds the order by the batch's ids, waits for the stream that made it, and sorts
                             nothing

An order belongs to the very tensors of its batch, in the versions that they had (`made_ahead.py`): of a batch that was
written to since, or of tables that lie or are grouped otherwise now, it is not read, and the update sorts as ever. A
batch that is never trained on costs its order's memory (some 20 bytes per occurrence) until MOST others have come. So a
missing or stale order costs time and nothing else.

On the CPU nothing is made: the kernels there find rows in another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from tilerec.ops.gradient.definition import GradientRecord
from tilerec.ops.runtime.upload import capturing
from tilerec.storage.made_ahead import MadeAhead, Sources
from tilerec.torch_private import is_view


@final
class OrdersAhead:
    """The orders that wait for their updates."""

    def __init__(self) -> None:
        self.made = MadeAhead()

    def make(self, leaves: Sequence[Tensor], handles: Sequence[int], record: GradientRecord) -> None:
        """Order a batch's rows.

        Args:
            leaves, handles: of the tables that will be updated together.
            record: as the backward will hand it in; its `grad` is not read.
        """
        sources = _sources(record, handles)
        if sources is None or capturing() or _stepped(record.sample_weights):
            return
        position = {handle: t for t, handle in enumerate(handles)}
        order = torch.ops.tilerec.order_rows(
            leaves, record.ids, record.offsets, record.sample_weights, [position[sink] for sink in record.sinks],
            record.starts, record.bags, record.grad_starts, record.grad_strides, record.means,
        )  # fmt: skip
        self.made.keep(sources, order, record.ids.device)

    def take(self, handles: Sequence[int], record: GradientRecord) -> list[Tensor] | None:
        """The order of this batch, once; behind it the current stream waits, if another one made it."""
        if not self.made:
            return None
        return self.made.take(_sources(record, handles))


def _stepped(weights: Tensor | None) -> bool:
    """Whether an optimizer may write to sample weights: with `fused=True` it does so uncounted."""
    return weights is not None and weights.requires_grad and (weights.is_leaf or is_view(weights))


def _sources(record: GradientRecord, handles: Sequence[int]) -> Sources | None:
    """What an order is made of: tensors, and per feature where its bags and their gradients lie."""
    lists = (
        tuple(handles), record.sinks, record.starts, record.bags, record.grad_starts, record.grad_strides,
        record.means,
    )  # fmt: skip
    return Sources.of((record.ids, record.offsets, record.sample_weights), lists)
