"""`TorchMetric`: a metric of the torchmetrics package beside tilerec's measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric

from tilerec.errors import InputError
from tilerec.metrics.rank_sums import RankSums
from tilerec.metrics.samples import Samples


@dataclass(frozen=True)
class TorchMetric:
    """A torchmetrics object with a name; a module keeps one copy of it per task.

        TorchMetric("ndcg", RetrievalNormalizedDCG(top_k=10), groups="indexes")

    The metric has its own states and its own reduction over ranks. It has a lifetime's value only; for a window over
    updates, pass `torchmetrics.wrappers.Running(metric, window=...)`.

    Attributes:
        name: part of the keys of values.
        metric: called as `update(predictions, labels)`.
        groups: name of the argument of `update` that takes the groups; "" if it takes none.
        weights: name of the argument of `update` that takes the weights; "" if it takes none.
        integer_labels: pass labels as int64, as classification and retrieval metrics need.
    """

    name: str
    metric: Metric
    groups: str = ""
    weights: str = ""
    integer_labels: bool = True

    def copies(self, tasks: int, ranks: RankSums) -> torch.nn.ModuleList:
        """Return one metric per task, with states that are part of the state dict and reduced over these ranks."""
        metrics = [self.metric.clone() for _ in range(tasks)]
        for metric in metrics:
            metric.persistent(True)
            metric.process_group = ranks.process_group
            metric.sync_on_compute = not ranks.alone
        return torch.nn.ModuleList(metrics)

    def update(self, metrics: torch.nn.ModuleList, samples: Samples) -> None:
        """Pass a batch to the metric of each task; an empty batch has no effect."""
        if not samples.labels_TN.shape[1]:
            return
        if self.groups and samples.groups_TN is None:
            raise InputError(
                f"Metric {self.name}: got no groups; expected one group per sample. Pass update(groups=...)."
            )
        labels_TN = samples.labels_TN.long() if self.integer_labels else samples.labels_TN
        for task, metric in enumerate(metrics):
            named = {}
            if self.groups and samples.groups_TN is not None:
                named[self.groups] = samples.groups_TN[task]
            if self.weights:
                named[self.weights] = samples.weights_TN[task]
            metric.update(samples.predictions_TN[task], labels_TN[task], **named)  # type: ignore[operator]

    def values(self, metrics: torch.nn.ModuleList) -> dict[str, list[Tensor]]:
        """Return the values of all tasks by name. Collective, if torch.distributed is initialized."""
        found: dict[str, list[Tensor]] = {}
        for metric in metrics:
            value = metric.compute() if metric.update_called else torch.tensor(float("nan"))  # type: ignore[operator]
            parts = value if isinstance(value, Mapping) else {self.name: value}
            for name, part in parts.items():
                found.setdefault(name if name == self.name else f"{self.name}_{name}", []).append(part)
        return found
