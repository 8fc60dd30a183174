"""Orders of updates to come, made while the GPU has time: by `prefetch`, on whichever stream is current there.

    prefetch (batch i + 1)   its occurrences are sorted by row (`ops/order.py`)    any time before its backward
    backward (batch i + 1)   the update finds the order by the batch's ids, waits for the stream that made it, and sorts
                             nothing

An order belongs to the very tensors of its batch, in the versions that they had: of a batch that was written to since,
or of tables that lie or are grouped otherwise now, it is not read, and the update sorts as ever. A batch that is
never trained on costs its order's memory (some 20 bytes per occurrence) until MOST others have come. So a missing or
stale order costs time and nothing else.

On the CPU nothing is made: the kernels there find rows in another way. Nor while a CUDA graph is captured: what a
graph waits for must be in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilerec.ops.gradient import GradientRecord
from tilerec.ops.upload import capturing

MOST = 4
"""Orders that a table keeps (with those of its group) for batches to come."""


@dataclass(frozen=True)
class Batch:
    """What an order was made of. It keeps its tensors alive: no other batch can have their memory."""

    tensors: tuple[Tensor | None, ...]  # ids, offsets, sample weights
    marks: tuple[Any, ...]
    lists: tuple[Any, ...]  # per feature: sink, first bag, bags, start and stride in the gradient, mean

    @staticmethod
    def of(record: GradientRecord, handles: Sequence[int]) -> Batch | None:
        """None for tensors whose writes nobody counts (inference mode's)."""
        tensors = (record.ids, record.offsets, record.sample_weights)
        if any(t is not None and t.is_inference() for t in tensors):
            return None
        lists = (
            tuple(handles), record.sinks, record.starts, record.bags, record.grad_starts, record.grad_strides,
            record.means,
        )  # fmt: skip
        return Batch(tensors, tuple([_mark(t) for t in tensors]), lists)


def _mark(tensor: Tensor | None) -> tuple[Any, ...] | None:
    if tensor is None:
        return None
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor._version)


@dataclass(frozen=True)
class _Made:
    batch: Batch
    order: list[Tensor]
    stream: Any
    event: Any


class OrdersAhead:
    """The orders that wait for their updates."""

    def __init__(self) -> None:
        self._made: list[_Made] = []  # replaced, never changed: several threads may prefetch

    def make(self, leaves: Sequence[Tensor], handles: Sequence[int], record: GradientRecord) -> None:
        """Order a batch's rows.

        Args:
            leaves, handles: of the tables that will be updated together.
            record: as the backward will hand it in; its `grad` is not read.
        """
        batch = Batch.of(record, handles)
        if batch is None or capturing():
            return
        position = {handle: t for t, handle in enumerate(handles)}
        order = torch.ops.tilerec.order_rows(
            leaves, record.ids, record.offsets, record.sample_weights, [position[sink] for sink in record.sinks],
            record.starts, record.bags, record.grad_starts, record.grad_strides, record.means,
        )  # fmt: skip
        stream = torch.cuda.current_stream(record.ids.device)
        for tensor in batch.tensors:
            if tensor is not None:
                tensor.record_stream(stream)
        event = torch.cuda.Event()
        event.record(stream)
        # Asked for again, it is made again: a graph's replay may have filled the batch anew, which no version counts.
        others = [made for made in self._made if not _same(made.batch, batch)]
        self._made = [*others, _Made(batch, order, stream, event)][-MOST:]

    def take(self, handles: Sequence[int], record: GradientRecord) -> list[Tensor] | None:
        """The order of this batch, once; behind it the current stream waits, if another one made it."""
        if not self._made:
            return None
        batch = Batch.of(record, handles)
        found = None if batch is None else next((m for m in self._made if _same(m.batch, batch)), None)
        if found is None:
            return None
        self._made = [made for made in self._made if made is not found]
        if capturing():
            return None
        stream = torch.cuda.current_stream(record.ids.device)
        if stream != found.stream:
            stream.wait_event(found.event)
            for tensor in found.order:
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return found.order


def _same(one: Batch, other: Batch) -> bool:
    now = tuple([_mark(t) for t in one.tensors])  # a write since then counts, whoever holds the tensor
    return one.marks == now == other.marks and one.lists == other.lists
