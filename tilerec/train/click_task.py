"""`ClickTask`: probabilities of clicks, trained with binary cross entropy.

Legend: B samples, n samples of a batch, T tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, final

import pyarrow as pa
import torch
from torch import Tensor, nn

from tilerec.data.batch import Batch
from tilerec.data.dataset import RowDataset
from tilerec.data.share import Share
from tilerec.errors import ConfigError, InputError
from tilerec.metrics.auc import AUC
from tilerec.metrics.module import MetricModule
from tilerec.train.config import TrainConfig
from tilerec.train.evaluate import Scores
from tilerec.train.loss import click_loss
from tilerec.train.predictions import score_columns, score_table, scored_rows
from tilerec.train.task import Evaluation, Task, check_state
from tilerec.train.world import World


@final
class ClickTask(Task):
    """Probabilities of the labels of one or several columns.

    Args:
        tasks: names of the label columns [T].
        weights: of the tasks in the loss [T]; () for 1 each.
        options: of the training; `metric_window` is the number of samples in the training AUC.
        device: of the model.
        world: the ranks.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        weights: Sequence[float],
        options: TrainConfig,
        device: torch.device,
        world: World,
    ) -> None:
        self._tasks, self._weights, self._device, self._world = tasks, weights, device, world
        self._metrics = MetricModule(
            tasks, [AUC(exact=True, lifetime=False)], window=options.metric_window, group=world.group
        ).to(device)

    def check(self, batch: Batch) -> None:
        """Raise `InputError` for labels on the CPU that are not from 0 to 1; on a GPU the check would wait for it.

        Files and tables check their labels when they are read (`Dataset.with_label_bounds`), and name the place of a
        bad one. This check is for other data sets.
        """
        labels = batch.labels
        if labels.device.type != "cpu" or not labels.numel():
            return
        low, high = labels.aminmax()
        if not (low >= 0 and high <= 1):
            bad = labels if labels.dim() == 2 else labels[:, None]
            row, column = (~((bad >= 0) & (bad <= 1))).nonzero()[0].tolist()
            raise InputError(
                f"label {self._tasks[column]!r}: got {bad[row, column].item():g}; expected 0 to 1. Set at_least on the "
                "label column (labels of at least that number become 1), or convert the column."
            )

    def loss(self, model: nn.Module, share: Share) -> Tensor:
        batch = share.batch
        logits = model(batch.dense_features, batch.sparse_features)
        if not isinstance(logits, Tensor):
            raise ConfigError(
                f"model: got an output of type {type(logits).__name__}; expected logits with task.kind = 'click', the "
                "default. Set task.kind = 'retrieval' for two towers, 'next_item' for SASRec."
            )
        loss = click_loss(
            logits,
            batch.labels,
            batch.weights,
            task_weights=self._weights,
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
        return loss

    def progress(self) -> dict[str, float]:
        """Return the AUC of the latest samples, the mean over the tasks."""
        values = self._metrics.compute()
        by_task = [values[f"{task}/auc/window"].item() for task in self._tasks]
        return {"auc": sum(by_task) / len(by_task)}

    def window_state(self) -> dict[str, Any]:
        """Return the samples of the training AUC: 24 bytes per sample of the window and task."""
        with self._metrics.synced():
            return {"metrics": self._metrics.get_extra_state()}

    def load_window_state(self, state: Mapping[str, Any]) -> None:
        """Continue with these samples.

        Raises:
            InputError: the state is of other tasks.
        """
        if state:
            check_state(self, state, ("metrics",))
            self._metrics.set_extra_state(state["metrics"])

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Evaluation:
        """Return exact scores of each task; takes 12 bytes per sample and task."""
        found = self._world.predict(model, batches, self._device, len(self._tasks))
        return Evaluation(Scores.by_task(found, self._tasks), found.labels)

    def prediction_columns(self) -> Sequence[str]:
        return score_columns(self._tasks)

    def predict(
        self, model: nn.Module, dataset: RowDataset, keys: Sequence[str], batch_size: int
    ) -> Iterator[tuple[int, pa.Table]]:
        first = 0
        for _, table, scores in scored_rows(model, dataset, keys, batch_size, self._device, self._world):
            yield len(scores), score_table(table, scores, self._tasks, first)
            first += len(scores)
