"""`TrainStep`: forward, backward and update of one batch, or of a cycle of batches that count as one.

    accumulate = 1    forward, backward, update
    accumulate = k    k forwards, then one backward of their weighted losses, then one update

Tables with an attached optimizer update in the backward. One backward per cycle therefore updates each touched row
once, as one batch of k times the size does. The activations of the k forwards stay alive until then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError, InputError
from tilerec.parallel.two_d.dmp_collection import DMPCollection
from tilerec.pipelines.batch_in_flight import BatchInFlight
from tilerec.pipelines.batch_structure import samples_of
from tilerec.pipelines.passes import Pass

ModelForward = Callable[[Any], tuple[Tensor, Any]]


@final
class TrainStep:
    """The part of a pipeline that trains.

    Args:
        model: `model(batch)` returns (losses, output).
        optimizer: of the parameters that the backward does not update; None for a pipeline that only evaluates.
        forward: called in place of the model.
        accumulate: number of batches per update.
        sync_interval: updates between two averages of the replicas of a `DMPCollection` with `sync="average"`, unless
            the model has its own interval.
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, forward: ModelForward | None, accumulate: int,
        sync_interval: int | None, who: str,
    ) -> None:  # fmt: skip
        if accumulate < 1:
            raise ConfigError(
                f"{who}: accumulate: got {accumulate}; expected at least 1. Leave it out to update for every batch."
            )
        if sync_interval is not None and sync_interval < 1:
            raise ConfigError(
                f"{who}: dmp_collection_sync_interval_batches: got {sync_interval}; expected at least 1, or None."
            )
        self.model, self._optimizer, self._forward = model, optimizer, forward
        self._accumulate, self._sync_interval, self._who = accumulate, sync_interval, who
        self._updates = 0

    def forward(self, batch: BatchInFlight, held: Pass) -> None:
        """Compute the loss and the output of a batch; clear the gradients first if a new cycle begins."""
        training = self.model.training and self._optimizer is not None
        if training and not held.held:
            self._optimizer.zero_grad()
        function = self.model if self._forward is None else self._forward
        result = function(batch.batch)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise InputError(
                f"{self._who}: the model returned a {type(result).__name__}; expected (losses, output). Wrap the "
                "model, or pass custom_model_fwd=."
            )
        losses, batch.output = result
        if training:
            if not isinstance(losses, Tensor):
                raise InputError(
                    f"{self._who}: the model returned losses of type {type(losses).__name__}; expected a tensor. "
                    "Return (losses, output), or call model.eval() for a pipeline that does not train."
                )
            batch.loss = torch.sum(losses, dim=0) if losses.dim() else losses
            if self._accumulate > 1 or batch.some_ended:
                batch.samples = samples_of(batch.batch)
            held.held.append(batch)

    def backward(self, batch: BatchInFlight, held: Pass) -> None:
        """Run the backward if the batch completes a cycle, or is the last one."""
        if batch.loss is None or (len(held.held) < self._accumulate and not held.is_over()):
            return
        cycle, held.held = held.held, []
        loss = self._loss_of(cycle)
        for one in cycle:
            one.loss = None
        loss.backward()
        batch.trained = True

    def _loss_of(self, cycle: list[BatchInFlight]) -> Tensor:
        """Return the loss of a cycle: the mean of its batches' losses, weighted by their samples."""
        # While some ranks have no batches left, the loss is the mean over the samples of all ranks. Otherwise it is the
        # mean of the ranks' own means, as in `DistributedDataParallel`.
        of_all_ranks = any(one.some_ended for one in cycle)
        if len(cycle) == 1 and not of_all_ranks:
            return cycle[0].loss
        own = [one.samples for one in cycle]
        total = float(sum(own))
        if of_all_ranks:
            every = [one.all_samples or [] for one in cycle]
            total = sum(map(sum, every)) / len(every[0])
        return torch.stack(
            [one.loss * (samples / max(total, 1.0)) for one, samples in zip(cycle, own, strict=True)]
        ).sum()

    def update(self, batch: BatchInFlight, held: Pass) -> None:
        """Step the optimizer after a backward, and average replicas that are due."""
        if not batch.trained:
            return
        self._optimizer.step()
        self._updates += 1
        if self._sync_interval is not None and self._updates % self._sync_interval == 0:
            for module in self._replicated():
                module.sync()

    def _replicated(self) -> list[DMPCollection]:
        """Return the model's 2D wrapper if it has no interval of its own."""
        model = self.model
        return [model] if isinstance(model, DMPCollection) and model.sync_interval is None else []
