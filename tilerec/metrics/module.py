"""`MetricModule`: measures of every task, over a window of the latest samples and over a lifetime.

Glossary
    lifetime   all samples since the start (or `reset`), stored as sums
    window     the latest samples, stored in a ring buffer

An update adds tensors on their device and never waits for it. `compute` does the expensive work.

Legend: T tasks, N samples of one update, W samples of the window, K sums of one measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from tilerec.errors import ConfigError, InputError
from tilerec.metrics.measure import AUC, NE, Calibration, LogLoss, Measure

_EVERY_MEASURE = ("ne", "log_loss", "auc", "calibration")


class MetricModule(Metric):
    """Normalized entropy, log loss, AUC and calibration of one or several tasks.

    `torchmetrics.Metric` provides `.to()`, `reset`, `state_dict` (after `persistent()`), and the sum of the states over
    the ranks of a process group in `compute`. The windows of several ranks are concatenated.

    Args:
        tasks: names; one prediction and one label per task.
        measures: any of "ne", "log_loss", "auc", "calibration", or `Measure` objects.
        window: W, number of stored samples for the windowed values; 0 for lifetime values only. The window takes 24
            bytes per sample and task.
    """

    full_state_update = False
    higher_is_better = None
    is_differentiable = False

    window_samples: Tensor  # float64 [W, 3, T], in compute [ranks, W, 3, T]: prediction, label, weight
    window_next: Tensor  # int64 []: ring position of the next sample

    def __init__(
        self,
        tasks: Sequence[str] = ("click",),
        measures: Sequence[str | Measure] = _EVERY_MEASURE,
        *,
        window: int = 100_000,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if isinstance(tasks, str) or not tasks or len(set(tasks)) != len(tasks):
            raise ConfigError(
                f"MetricModule: got tasks={tasks!r}; expected a list of at least one name, each once."
            )
        if window < 0:
            raise ConfigError(f"MetricModule: got window={window}; expected at least 0.")
        self.tasks = tuple(tasks)
        self.window = window
        self._measures = tuple(_measure(given) for given in measures)
        names = [measure.name for measure in self._measures]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"MetricModule: got measures {names}; expected at least one, each once.")
        nothing = torch.zeros(len(self.tasks), 0)
        for measure in self._measures:
            zeros_KT = torch.zeros_like(measure.sums(nothing, nothing, nothing))
            self.add_state(f"sums_{measure.name}", zeros_KT, dist_reduce_fx="sum")
        # Weight 0 marks an empty ring position.
        self.add_state(
            "window_samples",
            torch.zeros(window, 3, len(self.tasks), dtype=torch.float64),
            dist_reduce_fx="cat",
        )
        self.add_state("window_next", torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")

    def update(self, predictions: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add samples.

        Args:
            predictions: probabilities, [N] for one task or [T, N].
            labels: the same shape; 0, 1 or anything between.
            weights: the same shape, at least 0; 1 if not given.
        """
        samples = self._samples(predictions, labels, weights)
        for measure in self._measures:
            state = getattr(self, f"sums_{measure.name}")
            state += measure.sums(samples[0], samples[1], samples[2])
        if self.window:
            latest = samples[:, :, -self.window :].permute(2, 0, 1)
            count = latest.shape[0]
            place = (self.window_next + torch.arange(count, device=latest.device)) % self.window
            self.window_samples.index_copy_(0, place, latest)
            self.window_next = (self.window_next + count) % self.window

    def compute(self) -> dict[str, Tensor]:
        """Return float64 scalars `{"<task>/<measure>/lifetime": …, "<task>/<measure>/window": …}`; NaN if undefined."""
        values = {}
        # torchmetrics stacks the windows of several ranks: [ranks, W, 3, T].
        window = self.window_samples.reshape(-1, 3, len(self.tasks))
        for measure in self._measures:
            lifetime_T = measure.from_sums(getattr(self, f"sums_{measure.name}"))
            for index, task in enumerate(self.tasks):
                values[f"{task}/{measure.name}/lifetime"] = lifetime_T[index]
                if self.window:
                    values[f"{task}/{measure.name}/window"] = measure.exact(*window[:, :, index].unbind(1))
        return values

    def _samples(self, predictions: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Return predictions, labels and weights as float64 [3, T, N]."""
        given = {"predictions": predictions, "labels": labels}
        if weights is not None:
            given["weights"] = weights
        tasks = len(self.tasks)
        for name, tensor in given.items():
            shape = tuple(tensor.shape)
            fits = (tensor.dim() == 2 and shape[0] == tasks) or (tensor.dim() == 1 and tasks == 1)
            if not fits or shape != tuple(predictions.shape):
                wanted = "[N]" if tasks == 1 else f"[{tasks}, N]"
                raise InputError(
                    f"MetricModule for {tasks} task(s): got {name} of shape {list(shape)} with predictions of shape "
                    f"{list(predictions.shape)}; expected all of shape {wanted}."
                )
        if weights is None:
            weights = torch.ones_like(labels, dtype=torch.float64)
        parts = [part.detach().double().reshape(tasks, -1) for part in (predictions, labels, weights)]
        return torch.stack(parts)


def _measure(given: str | Measure) -> Measure:
    if isinstance(given, Measure):
        return given
    known: dict[str, Measure] = {measure.name: measure for measure in (NE(), LogLoss(), AUC(), Calibration())}
    if given not in known:
        raise ConfigError(f"MetricModule: got measure {given!r}; expected one of {list(known)}.")
    return known[given]
