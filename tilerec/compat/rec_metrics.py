"""TorchRec's classes of single metrics, over `RecMetricModule`: `NEMetric`, `NEMetricComputation` and their like.

    metric = NEMetric(world_size=1, my_rank=0, batch_size=B, tasks=[RecTaskInfo("click")], window_size=100_000)
    metric.update(predictions={"click": p}, labels={"click": y}, weights={"click": w})
    metric.compute()                                  # {"ne-click|lifetime_ne": ..., "ne-click|window_ne": ...}

`RecMetricModule` computes many metrics in one pass and one collective; these classes take one each.

Legend: T tasks, N samples of an update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilerec.errors import ConfigError, InputError
from tilerec.metrics.metrics_config import MetricsConfig, RecComputeMode, RecMetricDef, RecMetricEnum, RecTaskInfo
from tilerec.metrics.rec_metric_module import RecMetricModule, generate_metric_module


class MetricPrefix(str, Enum):
    """The samples of a value: all since the start, or the last ones."""

    DEFAULT = ""
    LIFETIME = "lifetime_"
    WINDOW = "window_"


@dataclass(frozen=True)
class MetricComputationReport:
    """A value of a computation.

    Attributes:
        name: of the number, such as "ne"; equal to the member of `RecMetricEnum`.
        metric_prefix: see `MetricPrefix`.
        value: [T] float64.
    """

    name: str
    metric_prefix: MetricPrefix
    value: Tensor
    description: str | None = None


class RecMetric(nn.Module):
    """One metric of some tasks. Subclasses name the metric.

    Args:
        world_size: number of ranks; must agree with the process group.
        my_rank, batch_size, compute_mode, fused_update_limit, compute_on_all_ranks, should_validate_update: accepted
            without effect, as in `MetricsConfig`.
        tasks: with distinct names.
        window_size: samples of the window, over all ranks.
        process_group: the ranks; None for torch's default group, if there is one.
        arguments: as in `RecMetricDef`, such as `threshold`.

    Raises:
        ConfigError: tasks share a name, the group has another number of ranks, or an argument is unknown.
    """

    metric: ClassVar[RecMetricEnum]

    def __init__(
        self, world_size: int, my_rank: int, batch_size: int, tasks: Sequence[RecTaskInfo],
        compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION, window_size: int = 100,
        fused_update_limit: int = 0, compute_on_all_ranks: bool = False, should_validate_update: bool = False,
        process_group: dist.ProcessGroup | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.task_names = [task.name for task in tasks]
        if len(set(self.task_names)) < len(self.task_names) or not tasks:
            raise ConfigError(
                f"{type(self).__name__}: got tasks {self.task_names}; expected at least one, with distinct names. "
                "Rename them."
            )
        # Updates name tensors by task, not by the keys of a model's output.
        own = [RecTaskInfo(name, f"{name} label", f"{name} prediction", f"{name} weight") for name in self.task_names]
        definition = RecMetricDef(rec_tasks=own, window_size=window_size, arguments=arguments)
        config = MetricsConfig(rec_metrics={self.metric: definition}, throughput_metric=None)
        self.module = generate_metric_module(
            RecMetricModule, config, batch_size, world_size, my_rank, {}, torch.device("cpu"), process_group
        )

    def update(
        self, *, predictions: Tensor | Mapping[str, Tensor], labels: Tensor | Mapping[str, Tensor],
        weights: Tensor | Mapping[str, Tensor] | None = None,
        required_inputs: Mapping[str, Tensor] | None = None, **_: Any,
    ) -> None:  # fmt: skip
        """Add samples.

        Args:
            predictions, labels, weights: [N] or [N, 1] by task, or [T, N]. Without weights each sample counts alike.
            required_inputs: further tensors, such as "grouping_keys" [N] for grouped AUC.

        Raises:
            InputError: a task has no tensor, or tensors differ in their number of samples.
        """
        found = dict(required_inputs or {})
        for kind, given in (("prediction", predictions), ("label", labels), ("weight", weights)):
            for index, name in enumerate(self.task_names):
                tensor = found[f"{name} prediction"].new_ones(()) if given is None else self._of(given, index, kind)
                found[f"{name} {kind}"] = tensor.expand_as(found[f"{name} prediction"]) if given is None else tensor
        self.module.update(found)

    def _of(self, given: Tensor | Mapping[str, Tensor], index: int, kind: str) -> Tensor:
        name = self.task_names[index]
        if isinstance(given, Tensor):
            rows = given.reshape(1, -1) if len(self.task_names) == 1 else given
            if rows.dim() != 2 or len(rows) != len(self.task_names):
                raise InputError(
                    f"{type(self).__name__}: got {kind}s of shape {list(given.shape)}; expected "
                    f"[{len(self.task_names)}, N], a row for each task. Stack them, or pass a dictionary by task."
                )
            return rows[index]
        if name not in given:
            raise InputError(
                f"{type(self).__name__}: got {kind}s of {sorted(given)}; expected one for each task, such as {name!r}. "
                "Pass a dictionary by the names of tasks."
            )
        return given[name]

    def compute(self) -> dict[str, Tensor]:
        """Return values by TorchRec's keys. Collective."""
        return self.module.compute()

    def sync(self) -> None:
        """Replace this rank's state by that of all ranks, until `unsync`. Collective."""
        self.module.sync()

    def unsync(self) -> None:
        """Put this rank's own state back."""
        self.module.unsync()

    def reset(self) -> None:
        """Forget all samples."""
        self.module.reset()


class RecMetricComputation(nn.Module):
    """One metric of tasks without names. Subclasses name the class of the metric.

    Args:
        my_rank, batch_size: accepted without effect.
        n_tasks: T.
        window_size: samples of the window, over all ranks.
        process_group: the ranks; None for torch's default group, if there is one.
        arguments: as in `RecMetric`; those of compatibility are accepted without effect.
    """

    metric_class: ClassVar[type[RecMetric]]

    def __init__(
        self, my_rank: int, batch_size: int, n_tasks: int, window_size: int, compute_on_all_ranks: bool = False,
        should_validate_update: bool = False, process_group: dist.ProcessGroup | None = None, **arguments: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        ranks = dist.get_world_size(process_group) if dist.is_available() and dist.is_initialized() else 1
        tasks = [RecTaskInfo(str(index)) for index in range(n_tasks)]
        self.of_tasks = self.metric_class(
            ranks, my_rank, batch_size, tasks, window_size=window_size, process_group=process_group, **arguments
        )

    def update(self, *, predictions: Tensor, labels: Tensor, weights: Tensor | None = None, **more: Any) -> None:
        """Add samples: predictions, labels and weights [T, N]."""
        self.of_tasks.update(predictions=predictions, labels=labels, weights=weights, **more)

    def compute(self) -> list[MetricComputationReport]:
        """Return the values of all tasks, for the lifetime and the window. Collective."""
        found: dict[str, list[Tensor]] = {}
        for key, value in self.of_tasks.compute().items():
            found.setdefault(key.partition("|")[2], []).append(value)
        reports = []
        for name, values in found.items():
            scope, _, number = name.partition("_")
            reports.append(MetricComputationReport(number, MetricPrefix(f"{scope}_"), torch.stack(values)))
        return reports

    def reset(self) -> None:
        """Forget all samples."""
        self.of_tasks.reset()


class NEMetric(RecMetric):
    """`RecMetric` of normalized entropy."""

    metric = RecMetricEnum.NE


class NEMetricComputation(RecMetricComputation):
    """`RecMetricComputation` of normalized entropy."""

    metric_class = NEMetric


class AUCMetric(RecMetric):
    """`RecMetric` of the area under the ROC curve."""

    metric = RecMetricEnum.AUC


class AUCMetricComputation(RecMetricComputation):
    """`RecMetricComputation` of the area under the ROC curve."""

    metric_class = AUCMetric


class CalibrationMetric(RecMetric):
    """`RecMetric` of predictions over labels."""

    metric = RecMetricEnum.CALIBRATION


class CalibrationMetricComputation(RecMetricComputation):
    """`RecMetricComputation` of predictions over labels."""

    metric_class = CalibrationMetric


class CTRMetric(RecMetric):
    """`RecMetric` of the mean label."""

    metric = RecMetricEnum.CTR


class CTRMetricComputation(RecMetricComputation):
    """`RecMetricComputation` of the mean label."""

    metric_class = CTRMetric


class MSEMetric(RecMetric):
    """`RecMetric` of the mean squared error, and its root."""

    metric = RecMetricEnum.MSE


class MSEMetricComputation(RecMetricComputation):
    """`RecMetricComputation` of the mean squared error, and its root."""

    metric_class = MSEMetric


class MAEMetric(RecMetric):
    """`RecMetric` of the mean absolute error."""

    metric = RecMetricEnum.MAE


class MAEMetricComputation(RecMetricComputation):
    """`RecMetricComputation` of the mean absolute error."""

    metric_class = MAEMetric


class AccuracyMetric(RecMetric):
    """`RecMetric` of accuracy at a threshold."""

    metric = RecMetricEnum.ACCURACY


class AccuracyMetricComputation(RecMetricComputation):
    """`RecMetricComputation` of accuracy at a threshold."""

    metric_class = AccuracyMetric


class PrecisionMetric(RecMetric):
    """`RecMetric` of precision at a threshold."""

    metric = RecMetricEnum.PRECISION


class PrecisionMetricComputation(RecMetricComputation):
    """`RecMetricComputation` of precision at a threshold."""

    metric_class = PrecisionMetric


class RecallMetric(RecMetric):
    """`RecMetric` of recall at a threshold."""

    metric = RecMetricEnum.RECALL


class RecallMetricComputation(RecMetricComputation):
    """`RecMetricComputation` of recall at a threshold."""

    metric_class = RecallMetric


class WeightedAvgMetric(RecMetric):
    """`RecMetric` of the mean prediction."""

    metric = RecMetricEnum.WEIGHTED_AVG


class WeightedAvgMetricComputation(RecMetricComputation):
    """`RecMetricComputation` of the mean prediction."""

    metric_class = WeightedAvgMetric
