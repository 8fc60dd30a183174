"""`MetricModule`: measures of every task, over a window of the latest samples and over a lifetime.

Glossary
    lifetime   all samples since the start (or `reset`)
    window     the latest steps of all ranks with at most `window` samples together; at least the last step

    update     samples ─► terms of all measures and tasks, once ─► one [T, K] float64 tensor ─► one addition
    compute    sums of lifetime and window of all measures ─► one all-reduce ─► values

An update adds tensors on their device and never waits for it. `compute` does the expensive work.

Legend: T tasks, N samples of one update, K sums, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError, InputError
from tilerec.metrics.auc import AUC, GroupedAUC
from tilerec.metrics.measure import (
    CTR,
    MAE,
    MSE,
    NE,
    RMSE,
    Accuracy,
    Calibration,
    LogLoss,
    Measure,
    Precision,
    Recall,
)
from tilerec.metrics.measure_sums import MeasureSums, Value
from tilerec.metrics.rank_sums import RankGroup, RankSums
from tilerec.metrics.samples import Samples
from tilerec.metrics.torch_metric import TaskMetrics, TorchMetric

MEASURES: tuple[type[Measure], ...] = (
    NE,
    LogLoss,
    Calibration,
    CTR,
    MSE,
    RMSE,
    MAE,
    Accuracy,
    Precision,
    Recall,
    AUC,
    GroupedAUC,
)
"""Measures that a module takes by name, with their default settings."""


class MetricModule(nn.Module):
    """Measures of one or several tasks, equal for every division of the samples into batches and ranks.

    The state dict has lifetime and window. Save it under `synced`, and it can be loaded by any number of ranks.

    Args:
        tasks: names; one prediction and one label per task.
        measures: names of `MEASURES`, `Measure` objects, or `TorchMetric`s.
        window: number of samples, over all ranks, of the windowed values; 0 for lifetime values only.
        group: the ranks whose samples the values cover: a `tilerec.comms` group or a process group of torch; by default
            torch's default group, if there is one.
        alone: values cover this rank's samples only.
        entries: size of the ring of sums. If the window has more steps, an entry covers several, and the window's start
            is exact to 2 / entries of the window.
    """

    def __init__(
        self,
        tasks: Sequence[str] = ("click",),
        measures: Sequence[str | Measure | TorchMetric] = ("ne", "log_loss", "auc", "calibration"),
        *,
        window: int = 100_000,
        group: RankGroup = None,
        alone: bool = False,
        entries: int = 8192,
    ) -> None:
        super().__init__()
        if isinstance(tasks, str) or not tasks or len(set(tasks)) != len(tasks):
            raise ConfigError(
                f"MetricModule: got tasks={tasks!r}; expected a list of at least one name, each once. Rename one."
            )
        if window < 0:
            raise ConfigError(f"MetricModule: got window={window}; expected at least 0 samples. Change it.")
        if entries < 2:
            raise ConfigError(f"MetricModule: got entries={entries}; expected at least 2. Leave it out.")
        self.tasks = tuple(tasks)
        self.window = window
        self._ranks = RankSums(group, alone=alone)
        all_measures = [_measure(given) for given in measures]
        names = [measure.name for measure in all_measures]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"MetricModule: got measures {names}; expected at least one, each once. Leave one out.")
        own = [measure for measure in all_measures if isinstance(measure, Measure)]
        self._sums = MeasureSums(self.tasks, own, window, entries)
        others = [measure for measure in all_measures if isinstance(measure, TorchMetric)]
        self._others = [TaskMetrics(other, len(self.tasks)) for other in others]
        self._synced = False

    def update(
        self,
        predictions: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        groups: Tensor | None = None,
    ) -> None:
        """Add the samples of a step. On several ranks, every rank calls it in every step, with N = 0 if it has none.

        Args:
            predictions: probabilities, [N] for one task or [T, N].
            labels: the same shape; 0, 1 or anything between.
            weights: the same shape, at least 0; 1 if not given.
            groups: group of each sample, integers, [N] for all tasks or [T, N]; only `GroupedAUC` and some
                `TorchMetric`s need them.
        """
        self._check(predictions, labels, weights, groups)
        with torch.no_grad():
            tasks = len(self.tasks)
            count = predictions.shape[-1]
            self._add(
                Samples(
                    predictions.reshape(tasks, count),
                    labels.reshape(tasks, count),
                    None if weights is None else weights.reshape(tasks, count),
                    None if groups is None else groups.long().expand(tasks, count),
                ),
                narrow=predictions.dtype != torch.float64,
            )

    def add(self, samples: Samples, *, narrow: bool = False) -> None:
        """Add the samples of a step that are [T, N] already; see `update`.

        Args:
            samples: of all tasks.
            narrow: stored samples may be float32.
        """
        with torch.no_grad():
            self._add(samples, narrow=narrow)

    def _add(self, samples: Samples, *, narrow: bool) -> None:
        if self._synced:
            raise InputError(
                "MetricModule: got an update under `synced`. Update after the with block, or the samples are lost."
            )
        device = samples.given[1].device
        if device != self._sums.device:
            self._to(device)
        if samples.groups_TN is None:
            for other in self._others:
                other.check_without_groups()
        self._sums.add(samples, narrow=narrow, drop=self._ranks.size == 1)
        for other in self._others:
            other.update(samples)

    def compute(self) -> dict[str, Tensor]:
        """Return float64 scalars `{"<task>/<measure>/lifetime": …, "<task>/<measure>/window": …}`; NaN if undefined.

        Measures with an approximate lifetime, such as AUC, also have "<task>/<measure>/lifetime_error", the maximum
        difference from the exact value. Collective.
        """
        return {
            f"{task}/{value.measure}/{value.scope}": value.values_T[index]
            for value in self.values()
            for index, task in enumerate(self.tasks)
        }

    def values(self, extra: Tensor | None = None) -> list[Value]:
        """Return the values of all measures, float64 [T] each. Collective; one all-reduce.

        The ranks first assume that their windows have the same steps, which is so if their batches have equal sizes.
        The all-reduce shows whether they do. Otherwise the ranks exchange their numbers of samples, and reduce again.

        Args:
            extra: float64 numbers [X] that the same all-reduce replaces by their sums over ranks, in place.
        """
        if self._synced:
            raise InputError("MetricModule: got compute under `synced`. Compute before or after the with block.")
        with torch.no_grad():
            found = self._sums.values(self._ranks, extra)
            return found + [
                Value(name, "lifetime", values_T, torch.zeros_like(values_T, dtype=torch.bool))
                for other in self._others
                for name, values_T in other.values(self._ranks).items()
            ]

    @property
    def window_samples(self) -> int:
        """Number of samples of all ranks in the window of the last `compute`; 0 before."""
        return self._sums.window_samples

    def reset(self) -> None:
        """Forget all samples."""
        self._sums.reset()
        for other in self._others:
            other.reset()

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Replace this rank's state by that of all ranks within a with block, to save it. Collective.

            with metrics.synced():
                state = metrics.state_dict()     # equal on all ranks: rank 0 saves it

        All ranks of a later run load that state, whatever their number. `update` and `compute` raise `InputError`
        within the block.
        """
        with torch.no_grad():
            own = self._sums.state()
            own_of_others = [other.state() for other in self._others]
            self._sums.load(self._sums.merged(self._ranks), empty=False)
            for other in self._others:
                other.put(other.merged(self._ranks))
        self._synced = True
        try:
            yield
        finally:
            self._synced = False
            with torch.no_grad():
                self._sums.load(own, empty=False)
                for other, state in zip(self._others, own_of_others, strict=True):
                    other.put(state)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the sums, the samples of exact windows and their counts, as plain tensors and names."""
        covers_all = self._synced or self._ranks.size == 1
        ranks = {"rank": 0, "ranks": 1} if covers_all else {"rank": self._ranks.rank, "ranks": self._ranks.size}
        others = {other.given.name: other.state() for other in self._others}
        return {"tasks": list(self.tasks), **ranks, **self._sums.state(), "torchmetrics": others}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Replace all sums and samples; see `synced`."""
        if list(state["tasks"]) != list(self.tasks):
            raise InputError(
                f"Metric state: got tasks {list(state['tasks'])}; expected {list(self.tasks)}. Load it into metrics "
                "with the same tasks."
            )
        ranks, rank = state["ranks"], state["rank"]
        if ranks != 1 and (ranks, rank) != (self._ranks.size, self._ranks.rank):
            raise InputError(
                f"Metric state: got that of rank {rank} of {ranks} on rank {self._ranks.rank} of {self._ranks.size}; "
                "expected that of all ranks. Save it under `with metrics.synced():`."
            )
        if set(state["torchmetrics"]) != {other.given.name for other in self._others}:
            raise InputError(
                f"Metric state: got torchmetrics {sorted(state['torchmetrics'])}; expected "
                f"{sorted(other.given.name for other in self._others)}. Load it into metrics with the same measures."
            )
        empty = ranks == 1 and self._ranks.rank != 0
        with torch.no_grad():
            self._sums.load(state, empty=empty)
            for other in self._others:
                other.reset() if empty else other.put(state["torchmetrics"][other.given.name])

    def _apply(self, fn: Any, recurse: bool = True) -> MetricModule:
        super()._apply(fn, recurse)
        self._to(fn(torch.zeros(0, device=self._sums.device)).device)
        return self

    def _to(self, device: torch.device) -> None:
        self._sums.to(device)
        for other in self._others:
            other.to(device)

    def _check(self, predictions: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None) -> None:
        """Raise if shapes disagree."""
        tasks, shape = len(self.tasks), predictions.shape
        equal = shape == labels.shape and (weights is None or shape == weights.shape) and groups is None
        if equal and ((len(shape) == 2 and shape[0] == tasks) or (len(shape) == 1 and tasks == 1)):
            return
        given = {"predictions": predictions, "labels": labels, "weights": weights, "groups": groups}
        for name, tensor in given.items():
            if tensor is None:
                continue
            shape = tensor.shape
            fits = (len(shape) == 2 and shape[0] == tasks) or (len(shape) == 1 and tasks == 1)
            shared = name == "groups" and len(shape) == 1 and shape[0] == predictions.shape[-1]
            if not shared and (not fits or shape != predictions.shape):
                wanted = "[N]" if tasks == 1 else f"[{tasks}, N]"
                beside = "" if name == "predictions" else f" with predictions of shape {list(predictions.shape)}"
                raise InputError(
                    f"MetricModule for {tasks} task(s): got {name} of shape {list(shape)}{beside}; expected all of "
                    f"shape {wanted}. Pass a number for each task and sample."
                )


def _measure(given: str | Measure | TorchMetric) -> Measure | TorchMetric:
    if isinstance(given, (Measure, TorchMetric)):
        return given
    for known in MEASURES:
        measure = known()
        if measure.name == given:
            return measure
    names = [known().name for known in MEASURES]
    raise ConfigError(f"MetricModule: got measure {given!r}; expected one of {names}. Correct it.")
