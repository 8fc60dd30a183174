"""Row orders of later updates, sorted ahead by `prefetch` on its current stream while the GPU has time.

    prefetch (batch i + 1)   sorts its occurrences by row (`ops/update/order.py`)    any time before its backward
    backward (batch i + 1)   the update finds the order by the batch's ids, waits for the stream that made it, and does
                             not sort

An order is keyed by the tensors of its batch and their versions. The update ignores it and sorts
as usual if the batch was written to since, or if its tables are placed or grouped differently now. The order of a batch
that is never trained on keeps its memory (some 20 bytes per occurrence) until MOST others have been kept. So a missing
or stale order costs only time.

On the CPU no orders are made: the CPU kernels find rows in another way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from tilerec.ops.gradient.record import GradientRecord
from tilerec.ops.runtime.upload import capturing
from tilerec.storage.prefetched_results import PrefetchedResults, Sources
from tilerec.torch_private import is_view


@final
class PrefetchedOrders:
    """Row orders computed ahead of their updates."""

    def __init__(self) -> None:
        self.made = PrefetchedResults()

    def make(self, leaves: Sequence[Tensor], handles: Sequence[int], record: GradientRecord) -> None:
        """Sort a batch's occurrences by row and keep the order.

        Args:
            leaves, handles: leaves and handles of the tables that will be updated together.
            record: the record that the backward will submit; its `grad` is not read.
        """
        sources = _sources(record, handles)
        if sources is None or capturing() or _may_be_stepped(record.sample_weights):
            return
        position = {handle: t for t, handle in enumerate(handles)}
        order = torch.ops.tilerec.order_rows(
            leaves, record.ids, record.offsets, record.sample_weights, [position[sink] for sink in record.sinks],
            record.starts, record.bags, record.grad_starts, record.grad_strides, record.means,
        )  # fmt: skip
        self.made.keep(sources, order, record.ids.device)

    def take(self, handles: Sequence[int], record: GradientRecord) -> list[Tensor] | None:
        """Return the order of this batch, once, or None; the current stream waits for the stream that made it."""
        if not self.made:
            return None
        return self.made.take(_sources(record, handles))


def _may_be_stepped(weights: Tensor | None) -> bool:
    """Return True if an optimizer may write to the sample weights: with `fused=True` their version does not change."""
    return weights is not None and weights.requires_grad and (weights.is_leaf or is_view(weights))


def _sources(record: GradientRecord, handles: Sequence[int]) -> Sources | None:
    """Return the inputs of an order: tensors, and per feature the places of its bags and their gradients."""
    lists = (
        tuple(handles), record.sinks, record.starts, record.bags, record.grad_starts, record.grad_strides,
        record.means,
    )  # fmt: skip
    return Sources.of((record.ids, record.offsets, record.sample_weights), lists)
