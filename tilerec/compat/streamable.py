"""TorchRec's bases of batches: objects that a pipeline copies to a device on a stream of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from tilerec.data.batch import Batch
from tilerec.sparse.jagged_tensor import JaggedTensor
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor


class Multistreamable(ABC):
    """An object whose memory several streams use."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Mark the memory as used by a stream, as `torch.Tensor.record_stream` does."""


class Pipelineable(Multistreamable):
    """A `Multistreamable` that can be copied to a device."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool) -> Pipelineable:
        """Return a copy on a device."""


for _kind in (Batch, JaggedTensor, KeyedJaggedTensor, KeyedTensor):
    Pipelineable.register(_kind)
