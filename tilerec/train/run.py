"""`Run`: a run in progress, that is, the steps between two log events and the events themselves.

    for each batch:  clear gradients, set learning rates
                     logits = model(dense, sparse); loss = mean cross entropy
                     backward (updates tables), step (updates all other parameters)

Numbers stay on the device between two log events. Reading them is the run's only wait for the device.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from typing import Literal

import torch
from torch import Tensor, nn

from tilerec.data.dataset import Dataset
from tilerec.data.share import Share
from tilerec.errors import ConfigError, FileError, TilerecError
from tilerec.metrics.functional import auc
from tilerec.metrics.module import MetricModule
from tilerec.ops.runtime.readback import drain
from tilerec.parallel.check_replicas import check_replicas
from tilerec.pipelines.train_pipelines import PrefetchTrainPipelineSparseDist
from tilerec.train.config import RunConfig
from tilerec.train.evaluate import Scores
from tilerec.train.loss import click_loss
from tilerec.train.optimizers import Optimizers
from tilerec.train.run_logger import Event, Watcher
from tilerec.train.world import World


class Run:
    """A run in progress: model, optimizers, counters."""

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        model: nn.Module,
        device: torch.device,
        world: World,
        all_watchers: list[Watcher],
    ) -> None:
        self._config = config
        self._options = config.train
        self._dataset = dataset
        self._model = model
        self._device = device
        self._world = world
        self._watchers = all_watchers
        self._optimizers = Optimizers(model, config.train)
        self._step_module = world.data_parallel(model)
        self._pipeline = PrefetchTrainPipelineSparseDist(
            model, self, device, custom_model_fwd=self._forward, group=world.group
        )
        if config.trace:
            self._pipeline.start_trace()
        # Divide the configured window over the ranks; `_auc` concatenates the ranks' windows.
        window = -(-config.train.metric_window // world.size)
        self._metrics = MetricModule(measures=["auc"], window=window, sync_on_compute=False).to(device)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._logged_steps = 0
        self.steps = 0
        self.samples = 0
        self.seconds = 0.0

    def learn(self) -> None:
        """Train for all epochs, or up to `max_steps`."""
        options = self._options
        self._model.train()
        since = time.perf_counter()
        for samples, loss in self._pipeline.outputs(self._shares()):
            self.steps += 1
            self.samples += samples
            self._loss_sum += loss
            if options.check_replicas_every and self.steps % options.check_replicas_every == 0:
                check_replicas(self._model)
            if self.steps % options.log_every == 0:
                values = self._progress()
                # Reading the values has waited for the device, so the elapsed time includes the device's work.
                self.seconds += time.perf_counter() - since
                self._emit("train", {**values, "samples_per_second": self.samples / self.seconds})
                since = time.perf_counter()
            if (
                options.eval_every
                and self.steps % options.eval_every == 0
                and self.steps != options.max_steps
            ):
                self._wait()
                self.seconds += time.perf_counter() - since
                self.evaluate()
                since = time.perf_counter()
        if not self.steps:
            raise ConfigError("The training part has no samples. Use more data, or hold out less of it.")
        if self.steps > self._logged_steps:
            values = self._progress()
            self.seconds += time.perf_counter() - since
            self._emit("train", {**values, "samples_per_second": self.samples / self.seconds})
        if self._config.trace:
            try:
                self._pipeline.write_trace(self._config.trace)
            except FileError as error:  # the trained model counts more
                warnings.warn(f"{error} The run continues without a trace.", stacklevel=2)

    def evaluate(self) -> tuple[Scores, Tensor]:
        """Return the scores on the held-out part, and its labels; log the scores. Collective."""
        size = self._options.eval_batch_size
        predictions, labels = self._world.predict(self._model, self._dataset, size, self._device)
        scores = Scores.of(predictions, labels)
        self._emit("eval", {name: value for name, value in asdict(scores).items() if name != "samples"})
        return scores, labels

    def _emit(self, kind: Literal["train", "eval"], values: dict[str, float]) -> None:
        """Send an event to every watcher."""
        event = Event(kind, self.steps, self.samples, values)
        for watcher in self._watchers:
            watcher.record(event)

    def _shares(self) -> Iterator[Share]:
        """Return the shares of all epochs; the pipeline reads them ahead of their steps."""
        epochs = (
            self._dataset.train_shares(
                self._options.batch_size, epoch, rank=self._world.rank, world_size=self._world.size
            )
            for epoch in range(self._options.epochs)
        )
        return itertools.islice(itertools.chain.from_iterable(epochs), self._options.max_steps or None)

    def zero_grad(self) -> None:
        """Clear gradients and set the learning rates of this step; the pipeline calls it."""
        self._optimizers.prepare(self.steps)

    def step(self) -> None:
        """Update the dense parameters; the pipeline calls it after the backward."""
        self._optimizers.step()

    def _forward(self, share: Share) -> tuple[Tensor, tuple[int, Tensor]]:
        """Return the loss, and the step's samples on all ranks with this rank's part of the loss, on the device."""
        batch = share.batch
        logits = self._step_module(batch.dense_features, batch.sparse_features)
        loss = click_loss(logits, batch.labels, global_batch=share.total, world_size=self._world.size)
        self._metrics.update(logits.detach().reshape(-1).sigmoid(), batch.labels)
        return loss, (share.total, loss.detach())

    def _progress(self) -> dict[str, float]:
        """Return the mean loss since the last event and the AUC of the latest samples; waits for the device."""
        drain(self._device)
        loss = self._world.mean(self._loss_sum).item() / (self.steps - self._logged_steps)
        if not math.isfinite(loss):
            raise TilerecError(
                f"The loss is {loss} after step {self.steps}. Lower train.embedding_optimizer.lr or "
                "train.dense_optimizer.lr, or look for values that are not finite in the dense features."
            )
        self._loss_sum.zero_()
        self._logged_steps = self.steps
        factor = self._options.lr_factor(self.steps - 1)
        return {"loss": loss, "auc": self._auc(), "lr_factor": factor}

    def _auc(self) -> float:
        """Return the AUC of the latest samples of all ranks."""
        samples = self._world.gathered("metric windows", self._metrics.window_samples.reshape(-1))
        return auc(*samples.view(-1, 3).unbind(1)).item()

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
