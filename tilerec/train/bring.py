"""`Bringer`: batches come to the device.

On a GPU on a stream of their own. The host gives the GPU a step and goes on at once, so it brings batch i + 1 while
batch i trains: what only the batch decides (its copy, where sharded its way to the rows' owners, the sort for its
update) is done beside that step.

    stream of the steps    step i ----------------------- | step i + 1 (waits for the copy, its update for the sort)
    stream of the batches  copy, route, sort of batch i + 1

The host goes at most 3 steps ahead of the GPU: batches that wait for their step take memory.
"""

from __future__ import annotations

from collections import deque
from typing import final

import torch
from torch import nn

from tilerec.data.batch import Batch
from tilerec.storage.made_ahead import Moment

AHEAD = 3


@final
class Bringer:
    """Brings batches to a device, for a model.

    Args:
        model: one that has `prefetch(sparse_features)` is asked for it on a GPU, and called with what that returns.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._prefetch = getattr(model, "prefetch", None)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._steps: deque[torch.cuda.Event] = deque()  # where the latest steps end

    def __call__(self, batch: Batch) -> Batch:
        """The batch as a step on the current stream takes it."""
        if self._stream is None or batch.labels.is_cuda:  # what is there was made by who knows which stream
            return batch.to(self._device, non_blocking=True)
        self._keep_pace()
        with torch.cuda.stream(self._stream):
            here = batch.to(self._device, non_blocking=True)
            arrived = Moment(self._device)
            features = here.sparse_features
            if self._prefetch is not None:
                features = self._prefetch(features)
        arrived.wait(())
        here.record_stream(torch.cuda.current_stream(self._device))
        here.sparse_features = features
        return here

    def _keep_pace(self) -> None:
        """Wait for the step `AHEAD` before the one that was given to the GPU last."""
        self._steps.append(torch.cuda.current_stream(self._device).record_event())
        if len(self._steps) > AHEAD:
            self._steps.popleft().synchronize()
