"""`DevicePrefetcher`: copies batches to the device ahead of their step.

On a GPU it uses its own stream. The host launches a step without waiting, and then prepares batch i + 1 while batch i
trains. Work that depends only on the batch overlaps with that step: its copy, its exchange with the rows' owners (if
sharded), and the sort for its update.

    stream of the steps    step i ----------------------- | step i + 1 (waits for the copy, its update for the sort)
    stream of the batches  copy, route, sort of batch i + 1

The host runs at most 3 steps ahead of the GPU, because batches that wait for their step take memory.
"""

from __future__ import annotations

from collections import deque
from typing import final

import torch
from torch import nn

from tilerec.data.batch import Batch
from tilerec.ops.runtime.gpu import is_gpu
from tilerec.storage.prefetched_results import StreamEvent

AHEAD = 3


@final
class DevicePrefetcher:
    """Asynchronous copies of batches to a device, with a model's prefetch.

    Args:
        model: on a GPU, its `prefetch(sparse_features)` is called if it has one. The returned features replace the
            batch's.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._prefetch = getattr(model, "prefetch", None)
        self._stream = torch.cuda.Stream(device) if is_gpu(device) else None
        self._steps: deque[torch.cuda.Event] = deque()  # recorded at the ends of the latest steps

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch on the device, ready for a step on the current stream."""
        # An unknown stream wrote a batch that is on the GPU already.
        if self._stream is None or is_gpu(batch.labels.device):
            return batch.to(self._device, non_blocking=True)
        self._keep_pace()
        with torch.cuda.stream(self._stream):
            here = batch.to(self._device, non_blocking=True)
            arrived = StreamEvent(self._device)
            features = here.sparse_features
            if self._prefetch is not None:
                features = self._prefetch(features)
        arrived.wait(())
        here.record_stream(torch.cuda.current_stream(self._device))
        here.sparse_features = features
        return here

    def _keep_pace(self) -> None:
        """Wait for the step that is `AHEAD` steps before the last launched one."""
        self._steps.append(torch.cuda.current_stream(self._device).record_event())
        if len(self._steps) > AHEAD:
            self._steps.popleft().synchronize()
