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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Literal

import torch
from torch import Tensor, nn

from tilerec.data.dataset import Dataset
from tilerec.data.share import Share
from tilerec.errors import ConfigError, FileError, InputError, TilerecError
from tilerec.metrics.auc import AUC
from tilerec.metrics.module import MetricModule
from tilerec.ops.runtime.readback import drain
from tilerec.parallel.check_replicas import check_replicas
from tilerec.pipelines.train_pipelines import PrefetchTrainPipelineSparseDist
from tilerec.train.config import RunConfig
from tilerec.train.evaluate import Scores
from tilerec.train.loss import click_loss
from tilerec.train.optimizers import Optimizers
from tilerec.train.run_logger import Event, Watcher
from tilerec.train.table_stats import TableStats
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
            model, self, device, custom_model_fwd=self._forward, group=world.group, even=False
        )  # every rank has a share of every global batch, so all have equally many
        if config.trace:
            self._pipeline.start_trace()
        self._metrics = MetricModule(
            dataset.tasks,
            [AUC(exact=True, lifetime=False)],
            window=config.train.metric_window,
            group=world.group,
        ).to(device)
        self._table_stats = TableStats(model, world.group)
        self._logged_seconds = 0.0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._logged_steps = 0
        self._epoch = 0
        self._position = 0
        self.steps = 0
        self.samples = 0
        self.seconds = 0.0

    def learn(self) -> None:
        """Train for all epochs, or up to `max_steps`."""
        options = self._options
        self._model.train()
        since = time.perf_counter()
        for epoch, share, loss in self._pipeline.outputs(self._shares()):
            self._epoch, self._position = epoch, share.end
            self.steps += 1
            self.samples += share.total
            self._loss_sum += loss
            if options.check_replicas_every and self.steps % options.check_replicas_every == 0:
                check_replicas(self._model)
            if self.steps % options.log_every == 0:
                values = self._progress()
                # Reading the values has waited for the device, so the elapsed time includes the device's work.
                self.seconds += time.perf_counter() - since
                self._emit_train(values)
                since = time.perf_counter()
            if options.eval_every and self.steps % options.eval_every == 0 and self.steps != options.max_steps:
                self._wait()
                self.seconds += time.perf_counter() - since
                self.evaluate()
                since = time.perf_counter()
        if not self.steps:
            raise ConfigError("The training part has no samples. Use more data, or hold out less of it.")
        if self.steps > self._logged_steps:
            values = self._progress()
            self.seconds += time.perf_counter() - since
            self._emit_train(values)
        if self._config.trace:
            try:
                self._pipeline.write_trace(self._config.trace)
            except FileError as error:  # the trained model counts more
                warnings.warn(f"{error} The run continues without a trace.", stacklevel=2)

    def evaluate(self) -> tuple[dict[str, Scores], Tensor]:
        """Return the scores of each task on the held-out part, and its labels; log the scores. Collective."""
        tasks, batches = self._dataset.tasks, self._dataset.held_out(self._options.eval_batch_size)
        self._table_stats.pause()
        found = self._world.predict(self._model, batches, self._device, len(tasks))
        self._table_stats.resume()
        scores = Scores.by_task(found, tasks)
        self._emit("eval", _numbers(Scores.mean(scores.values())))
        return scores, found.labels

    def _emit_train(self, values: dict[str, float]) -> None:
        """Send the progress since the last event, with the use of the tables, to every watcher. Collective."""
        use = self._table_stats.values(self.seconds - self._logged_seconds)
        self._logged_seconds = self.seconds
        self._emit("train", {**values, "samples_per_second": self.samples / self.seconds, **use})

    def _emit(self, kind: Literal["train", "eval"], values: dict[str, float]) -> None:
        """Send an event to every watcher."""
        event = Event(kind, self.steps, self.samples, values)
        for watcher in self._watchers:
            watcher.record(event)

    def state_dict(self) -> dict[str, float]:
        """Return the position of the run in its data, and its counters; alike on every rank.

        The order of the data is a function of the data's seed, the epoch and the position, so these numbers continue a
        run on any number of ranks.
        """
        return {
            "epoch": self._epoch,
            "position": self._position,
            "steps": self.steps,
            "samples": self.samples,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue after the step at which `state_dict` was called; call it before `learn`."""
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self.steps, self.samples = int(state["steps"]), int(state["samples"])
        self.seconds = self._logged_seconds = float(state["seconds"])
        self._logged_steps = self.steps

    def _shares(self) -> Iterator[tuple[int, Share]]:
        """Yield the remaining shares with their epochs; the pipeline reads them ahead of their steps."""
        left = self._options.max_steps - self.steps if self._options.max_steps else None
        yield from itertools.islice(self._remaining_shares(), left)

    def _remaining_shares(self) -> Iterator[tuple[int, Share]]:
        start = self._position
        for epoch in range(self._epoch, self._options.epochs):
            for share in self._dataset.train_shares(
                self._options.batch_size,
                epoch,
                rank=self._world.rank,
                world_size=self._world.size,
                start=start,
            ):
                _check_labels(share.batch.labels, self._dataset.tasks)
                yield epoch, share
            start = 0

    def zero_grad(self) -> None:
        """Clear gradients and set the learning rates of this step; the pipeline calls it."""
        self._optimizers.prepare(self.steps)

    def step(self) -> None:
        """Update the dense parameters; the pipeline calls it after the backward."""
        self._optimizers.step()

    def _forward(self, numbered: tuple[int, Share]) -> tuple[Tensor, tuple[int, Share, Tensor]]:
        """Return the loss, and the epoch and the share with this rank's part of the loss, on the device."""
        epoch, share = numbered
        batch = share.batch
        logits = self._step_module(batch.dense_features, batch.sparse_features)
        loss = click_loss(
            logits,
            batch.labels,
            batch.weights,
            task_weights=self._options.task_weights,
            global_batch=share.total,
            world_size=self._world.size,
        )
        probabilities = logits.detach().reshape(batch.labels.shape).sigmoid()
        weights = batch.weights
        if batch.labels.dim() == 2:
            labels_TB = batch.labels.t().contiguous()
            weights = None if weights is None else weights.expand_as(labels_TB).contiguous()
            self._metrics.update(probabilities.t().contiguous(), labels_TB, weights)
        else:
            self._metrics.update(probabilities, batch.labels, weights)
        return loss, (epoch, share, loss.detach())

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
        values = self._metrics.compute()
        by_task = [values[f"{task}/auc/window"].item() for task in self._dataset.tasks]
        return {"loss": loss, "auc": sum(by_task) / len(by_task), "lr_factor": factor}

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _numbers(scores: Scores) -> dict[str, float]:
    return {name: value for name, value in asdict(scores).items() if name != "samples"}


def _check_labels(labels: Tensor, tasks: Sequence[str]) -> None:
    """Raise `InputError` for labels on the CPU that are not from 0 to 1; on a GPU the check would wait for it."""
    if labels.device.type != "cpu" or not labels.numel():
        return
    low, high = labels.aminmax()
    if not (low >= 0 and high <= 1):
        bad = labels if labels.dim() == 2 else labels[:, None]
        row, column = (~((bad >= 0) & (bad <= 1))).nonzero()[0].tolist()
        raise InputError(
            f"label {tasks[column]!r}: got {bad[row, column].item():g}; expected 0 to 1. Set at_least on the label "
            "column (labels of at least that number become 1), or convert the column."
        )
