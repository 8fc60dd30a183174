"""`DeviceCopy`: copies batches to the device ahead of their step.

On a GPU the copies, and all work that depends only on a batch, run on a stream of their own. The host launches a step
without waiting, and then prepares later batches while the step runs.

    stream of the steps    step i ----------------------- | step i + 1 (waits for the copy)
    stream of the batches  copy, route, sort of later batches

The host runs at most 3 steps ahead of the GPU, because batches that wait for their step take memory.
"""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, final

import torch

from tilerec.ops.runtime.gpu import is_gpu
from tilerec.pipelines.batch_in_flight import BatchInFlight
from tilerec.pipelines.batch_structure import Marks, moved, record_stream, tensors_of
from tilerec.storage.prefetched_results import StreamEvent

STEPS_AHEAD = 3
"""Maximum number of steps by which the host is ahead of the GPU."""


@final
class DeviceCopy:
    """Asynchronous copies of batches to a device, and the stream for the work ahead of a step.

    A batch in pinned memory is copied while the GPU computes. Batches that are on the device stay as they are.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if is_gpu(device) else None
        self._steps: deque[torch.cuda.Event] = deque()  # recorded at the ends of the latest steps

    def ahead(self, batch: BatchInFlight) -> contextlib.AbstractContextManager[Any]:
        """Return a context for work on a batch ahead of its step: on a GPU, the stream of the batches.

        The stream that wrote a batch on the GPU is unknown, so work on such a batch runs on the current stream.
        """
        if self._stream is None or batch.stays:
            return contextlib.nullcontext()
        return torch.cuda.stream(self._stream)

    def __call__(self, batch: BatchInFlight, who: str) -> None:
        """Copy a batch that was read; `who` is the pipeline, in errors."""
        if batch.error is not None or batch.batch is None:
            return
        # The empty batch of a rank that has run out has no marks.
        tensors = tensors_of(batch.batch) if batch.marks is None else batch.marks.tensors
        if self.device.type == "cpu" and all(tensor.is_cpu for tensor in tensors):
            batch.stays = bool(tensors)
            return
        here = [self._is_here(tensor) for tensor in tensors]
        batch.stays = any(here)
        with self.ahead(batch):
            if not all(here):
                batch.check_unwritten(who)
                batch.batch = moved(batch.batch, self.device)
                batch.marks = Marks.of(tensors_of(batch.batch))
            if self._stream is not None:
                batch.arrived = StreamEvent(self.device)

    def _is_here(self, tensor: torch.Tensor) -> bool:
        device = tensor.device
        return device.type == self.device.type and self.device.index in (None, device.index)

    def arrive(self, batch: BatchInFlight) -> None:
        """Make the current stream wait for a batch whose step comes next, and keep the host's pace."""
        if batch.arrived is None:
            return
        batch.arrived.wait(())
        record_stream(batch.batch, torch.cuda.current_stream(self.device))
        self._steps.append(torch.cuda.current_stream(self.device).record_event())
        if len(self._steps) > STEPS_AHEAD:
            self._steps.popleft().synchronize()
