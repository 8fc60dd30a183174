"""`TorchMetric`: a metric of the torchmetrics package beside tilerec's measures.

The ranks exchange their metrics' states when a value is computed, and merge them. Ranks may have updated a different
number of times, or never. (torchmetrics' own reduction then waits forever for some metrics.)

Legend: T tasks, W ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError, MissingExtraError

try:
    from torchmetrics import Metric
except ModuleNotFoundError:
    raise MissingExtraError("tilerec.metrics", "torchmetrics", "train") from None

from tilerec.metrics.rank_sums import RankSums
from tilerec.metrics.samples import Samples


@dataclass(frozen=True)
class TorchMetric:
    """A torchmetrics object with a name; a module keeps one copy of it per task.

        TorchMetric("ndcg", RetrievalNormalizedDCG(top_k=10), groups="indexes")

    It has a lifetime's value only.

    Attributes:
        name: part of the keys of values.
        metric: called as `update(predictions, labels)`, float64 and int64 or float64 [N].
        groups: name of the argument of `update` that takes the groups; "" if it takes none.
        weights: name of the argument of `update` that takes the weights; "" if it takes none.
        integer_labels: pass labels as int64, as classification and retrieval metrics need.
    """

    name: str
    metric: Metric
    groups: str = ""
    weights: str = ""
    integer_labels: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.metric, Metric):
            raise ConfigError(
                f"TorchMetric {self.name!r}: got a {type(self.metric).__name__}; expected a torchmetrics.Metric. Pass "
                "the metrics of a collection one by one."
            )


@final
class TaskMetrics:
    """Copies of a metric, one per task.

    Args:
        given: the metric.
        tasks: T.
    """

    def __init__(self, given: TorchMetric, tasks: int) -> None:
        self.given = given
        self._samples = 0  # of this rank
        self._metrics = [given.metric.clone() for _ in range(tasks)]
        self._device = torch.device("cpu")
        for metric in self._metrics:
            metric.compute_with_cache = False
            metric.reset()

    def to(self, device: torch.device) -> None:
        """Move the states."""
        self._device = device
        for metric in self._metrics:
            metric.to(device)

    def check_without_groups(self) -> None:
        """Raise if the metric needs groups."""
        if self.given.groups:
            raise InputError(
                f"Metric {self.given.name}: got no groups; expected one group per sample. Pass update(groups=...)."
            )

    def update(self, samples: Samples) -> None:
        """Pass a batch to the metric of each task; an empty batch has no effect."""
        count = samples.labels_TN.shape[1]
        if not count:
            return
        given = self.given
        labels_TN = samples.labels_TN.long() if given.integer_labels else samples.labels_TN
        for task, metric in enumerate(self._metrics):
            named = {}
            if given.groups and samples.groups_TN is not None:
                named[given.groups] = samples.groups_TN[task]
            if given.weights:
                named[given.weights] = samples.weights_TN[task]
            metric.update(samples.predictions_TN[task], labels_TN[task], **named)
        self._samples += count

    def values(self, ranks: RankSums) -> dict[str, Tensor]:
        """Return the values of all tasks by name, [T] each; NaN without samples. Collective."""
        found: dict[str, list[Tensor]] = {}
        own = self.state()
        merged = self.merged(ranks)
        if not merged["samples"]:
            return {self.given.name: torch.full((len(self._metrics),), float("nan"))}
        self.put(merged)
        try:
            for metric in self._metrics:
                value = _compute(metric)
                parts = value.items() if isinstance(value, Mapping) else [("", value)]
                for name, part in parts:
                    key = f"{self.given.name}_{name}" if name else self.given.name
                    found.setdefault(key, []).append(part)
        finally:
            self.put(own)
        return {name: torch.stack(parts) for name, parts in found.items()}

    def merged(self, ranks: RankSums) -> dict[str, Any]:
        """Return the state of all ranks together. Collective."""
        own = self.state()
        if ranks.size == 1:
            return own
        on_cpu = {"samples": own["samples"], "states": [_to(state, "cpu") for state in own["states"]]}
        states = [state for state in ranks.objects(on_cpu) if state["samples"]]
        if not states:
            return own
        together = [self.given.metric.clone().cpu() for _ in self._metrics]
        for task, metric in enumerate(together):
            metric.reset()
            _put(metric, states[0]["states"][task])
            for state in states[1:]:
                try:
                    metric.merge_state(state["states"][task])
                except RuntimeError as error:
                    raise ConfigError(
                        f"TorchMetric {self.given.name!r}: got {type(metric).__name__}, whose states cannot be merged "
                        f"over ranks ({error}). Use it on one rank, or another metric."
                    ) from error
        return {
            "samples": sum(state["samples"] for state in states),
            "states": [_to(metric.metric_state, self._device) for metric in together],
        }

    def state(self) -> dict[str, Any]:
        """Return this rank's number of samples and copies of the states of all tasks."""
        states = [_to(metric.metric_state, self._device) for metric in self._metrics]
        return {"samples": self._samples, "states": states}

    def put(self, state: Mapping[str, Any]) -> None:
        """Replace the states of all tasks."""
        self._samples = int(state["samples"])
        for metric, own in zip(self._metrics, state["states"], strict=True):
            _put(metric, _to(own, self._device))

    def reset(self) -> None:
        """Forget all samples."""
        self._samples = 0
        for metric in self._metrics:
            metric.reset()


def _put(metric: Metric, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        setattr(metric, name, value)


def _to(state: Mapping[str, Any], device: str | torch.device) -> dict[str, Any]:
    """Return a copy of a state, tensors or lists of tensors by name, on a device."""
    return {
        name: value.to(device, copy=True)
        if isinstance(value, Tensor)
        else [part.to(device, copy=True) for part in value]
        for name, value in state.items()
    }


def _compute(metric: Metric) -> Any:
    """Return the value of the states as they are, without torchmetrics' reduction over ranks."""
    with warnings.catch_warnings():
        # A rank without samples of its own computes from the states of others.
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")
        alone = metric.clone()
        alone.distributed_available_fn = _never
        return alone.compute()


def _never() -> bool:
    return False
