"""`RecMetricModule`: TorchRec's interface over `MetricModule` (`torchrec.metrics.metric_module`).

    metrics = generate_metric_module(RecMetricModule, config, batch_size=B, world_size=W, my_rank=r,
                                     state_metrics_mapping={}, device=device, process_group=group)
    metrics.update(model_out)                  # every step: {"label": ..., "prediction": ..., "weight": ...}
    if metrics.should_compute():
        values = metrics.compute()             # {"ne-DefaultTask|window_ne": ..., "throughput-throughput|...": ...}

Legend: T tasks, N samples of an update.
"""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilerec.errors import ConfigError, InputError
from tilerec.metrics.measure import Measure
from tilerec.metrics.metrics_config import MetricsConfig, RecTaskInfo
from tilerec.metrics.module import MetricModule
from tilerec.metrics.rank_sums import RankGroup, RankSums
from tilerec.metrics.rec_measures import rec_measures
from tilerec.metrics.samples import Samples
from tilerec.metrics.throughput import ThroughputMetric


class StateMetric(Protocol):
    """A source of further values, such as an optimizer's learning rate."""

    def get_metrics(self) -> dict[str, Any]:
        """Return values by key."""


class RecMetricModule(nn.Module):
    """Metrics of a model's output, by TorchRec's names.

    All metrics with the same tasks and window share one `MetricModule`, with one all-reduce per report. Use
    `generate_metric_module` to build it.

    Args:
        metrics_config: settings.
        group: see `MetricModule`.
        state_metrics: further sources of values, by name.
        clock: returns seconds.
    """

    def __init__(
        self,
        metrics_config: MetricsConfig,
        group: RankGroup = None,
        state_metrics: Mapping[str, StateMetric] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._config = metrics_config
        self._ranks = RankSums(group)
        self._state_metrics = dict(state_metrics or {})
        self._clock = clock
        self._fused = rec_measures(metrics_config)
        self.metric_modules = nn.ModuleList(
            MetricModule([task.name for task in fused.tasks], list(fused.measures.values()), window=window, group=group)
            for window, fused in self._fused
        )
        self.throughput_metric: ThroughputMetric | None = None
        throughput = metrics_config.throughput_metric
        if throughput is not None:
            self.throughput_metric = ThroughputMetric(
                window_seconds=throughput.window_size, warmup_steps=throughput.warmup_steps, clock=clock
            )
        self.compute_interval_steps = metrics_config.compute_interval_steps
        self.trained_batches = 0
        self._last_compute: tuple[int, float] | None = None  # number of batches, and time
        self._synced: tuple[ExitStack, dict[str, Any]] | None = None

    def update(self, model_out: Mapping[str, Tensor]) -> None:
        """Add the samples of a step.

        Args:
            model_out: predictions (probabilities), labels and weights of all tasks, [N] or [N, 1] each; further tensors
                are ignored.
        """
        # Check the input of all modules before the first one counts it.
        found = [_samples(fused.tasks, model_out, fused.needs_groups) for _, fused in self._fused]
        for module, (samples, narrow) in zip(self.metric_modules, found, strict=True):
            module.add(samples, narrow=narrow)  # type: ignore[operator]
        count = next((tensor.shape[0] for tensor in model_out.values()), 0)
        if found:
            count = found[0][0].labels_TN.shape[1]
        if self.throughput_metric is not None:
            self.throughput_metric.update(count)
        self.trained_batches += 1

    def should_compute(self) -> bool:
        """Return whether it is time to call `compute`: every `compute_interval_steps` updates, alike on all ranks."""
        return self.trained_batches % self.compute_interval_steps == 0

    def compute(self) -> dict[str, Any]:
        """Return all values by TorchRec's keys, such as "ne-click|window_ne". Collective.

        Values that the samples do not define are TorchRec's: 0, 0.5 for AUC, NaN for NE.
        """
        if self._synced is not None:
            raise InputError("RecMetricModule: got compute after sync(). Call unsync() first.")
        values: dict[str, Any] = {}
        numbers = self._numbers()
        for index, (module, (_, fused)) in enumerate(zip(self.metric_modules, self._fused, strict=True)):
            for value in module.values(None if index else numbers):  # type: ignore[operator]
                measure = fused.measures.get(value.measure)
                undefined = measure.undefined if isinstance(measure, Measure) else math.nan
                known_T = torch.where(value.undefined_T, undefined, value.values_T)
                prefix = fused.prefixes.get(value.measure, value.measure)
                for task, number in zip(fused.tasks, known_T, strict=True):
                    name = value.measure.removeprefix(f"{prefix} ")
                    scope, _, error = value.scope.partition("_")
                    values[f"{prefix}-{task.name}|{scope}_{name}{error and '_' + error}"] = number
        if not self.metric_modules:
            numbers = self._ranks.sum("metric sums", numbers)
        ranks = self._ranks.size
        if self.throughput_metric is not None:
            of_all = self.throughput_metric.values(numbers[1:], ranks)
            values |= {f"throughput-throughput|{name}": value for name, value in of_all.items()}
        for metric in self._state_metrics.values():
            values |= metric.get_metrics()
        self._adapt_interval(numbers[0].item() / ranks)
        return values

    def sync(self) -> None:
        """Replace this rank's state by that of all ranks, to save it, until `unsync`. Collective."""
        if self._synced is not None:
            raise InputError("RecMetricModule: got sync() twice. Call unsync() between.")
        stack = ExitStack()
        for module in self.metric_modules:
            stack.enter_context(module.synced())  # type: ignore[operator]
        self._synced = (
            stack,
            self._own_state(self._ranks.sum("metric sums", self._numbers()), self._ranks.size, True),
        )

    def unsync(self) -> None:
        """Put this rank's own state back; without effect if there was no `sync`."""
        if self._synced is not None:
            stack, _ = self._synced
            self._synced = None
            stack.close()

    def reset(self) -> None:
        """Forget all samples of metrics; throughput continues."""
        for module in self.metric_modules:
            module.reset()  # type: ignore[operator]

    def get_required_inputs(self) -> list[str]:
        """Return the keys that `update` reads."""
        keys: dict[str, None] = {}
        for _, fused in self._fused:
            for task in fused.tasks:
                keys |= dict.fromkeys((task.label_name, task.prediction_name))
                keys |= dict.fromkeys([task.weight_name] if task.weighted else [])
                keys |= dict.fromkeys([task.group_name] if fused.needs_groups else [])
        return list(keys)

    def get_extra_state(self) -> dict[str, Any]:
        """Return the number of batches and the throughput's counts."""
        if self._synced is not None:
            return self._synced[1]
        return self._own_state(self._numbers(), 1, self._ranks.size == 1)

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Replace the number of batches and the throughput's counts."""
        self.trained_batches = int(state["trained_batches"])
        if self.throughput_metric is not None and "throughput" in state:
            empty = bool(state["all_ranks"]) and self._ranks.rank != 0
            self.throughput_metric.load(state["throughput"], empty=empty)

    def _own_state(self, numbers: Tensor, ranks: int, all_ranks: bool) -> dict[str, Any]:
        state = {"trained_batches": self.trained_batches, "all_ranks": all_ranks}
        if self.throughput_metric is None:
            return state
        return {**state, "throughput": self.throughput_metric.state(numbers[1:], ranks)}

    def _numbers(self) -> Tensor:
        """Return the seconds per batch since the last report, and the throughput's numbers."""
        seconds = 0.0
        if self._last_compute is not None and self.trained_batches > self._last_compute[0]:
            batches, then = self._last_compute
            seconds = (self._clock() - then) / (self.trained_batches - batches)
        own = torch.tensor([seconds], dtype=torch.float64)
        return own if self.throughput_metric is None else torch.cat([own, self.throughput_metric.numbers()])

    def _adapt_interval(self, batch_seconds: float) -> None:
        """Keep the seconds between two reports within the configured limits; equal inputs on all ranks."""
        config = self._config
        if batch_seconds > 0:
            seconds = batch_seconds * self.compute_interval_steps
            if seconds < config.min_compute_interval:
                self.compute_interval_steps = math.ceil(config.min_compute_interval / batch_seconds - 1e-6)
            elif seconds > config.max_compute_interval:
                self.compute_interval_steps = max(1, int(config.max_compute_interval / batch_seconds))
        self._last_compute = self.trained_batches, self._clock()


Module = TypeVar("Module", bound=RecMetricModule)


def generate_metric_module(
    metric_class: type[Module],
    metrics_config: MetricsConfig,
    batch_size: int,
    world_size: int,
    my_rank: int,
    state_metrics_mapping: Mapping[Any, StateMetric],
    device: torch.device,
    process_group: dist.ProcessGroup | None = None,
) -> Module:
    """Build a `RecMetricModule` on a device.

    Args:
        metric_class: `RecMetricModule` or a subclass.
        metrics_config: settings.
        batch_size, world_size, my_rank: accepted for compatibility. Samples are counted, and the ranks are those of the
            process group; `world_size` must agree with it.
        state_metrics_mapping: sources of values for `metrics_config.state_metrics`.
        device: of the sums.
        process_group: the ranks; None for torch's default group, if there is one.
    """
    ranks = RankSums(process_group)
    if world_size != ranks.size:
        raise ConfigError(
            f"generate_metric_module: got world_size={world_size} with a group of {ranks.size} ranks; expected the "
            "same number. Call torch.distributed.init_process_group before, or pass the process group."
        )
    missing = [name for name in metrics_config.state_metrics if name not in state_metrics_mapping]
    if missing:
        raise ConfigError(
            f"generate_metric_module: got no state metric {missing}; expected one for each of "
            "metrics_config.state_metrics. Add it to state_metrics_mapping."
        )
    sources = {name.value: state_metrics_mapping[name] for name in metrics_config.state_metrics}
    return metric_class(metrics_config, process_group, sources).to(device)


def _samples(tasks: Sequence[RecTaskInfo], model_out: Mapping[str, Tensor], groups: bool) -> tuple[Samples, bool]:
    """Return the samples of all tasks in float64 [T, N], and whether all predictions have at most 32 bits."""
    keys = [task.prediction_name for task in tasks] + [task.label_name for task in tasks]
    weighted = any(task.weighted for task in tasks)
    tensors = [_tensor(model_out, key, task) for key, task in zip(keys, (*tasks, *tasks), strict=True)]
    if weighted:
        ones = torch.ones_like(tensors[0])
        tensors += [_tensor(model_out, task.weight_name, task) if task.weighted else ones for task in tasks]
        keys += [task.weight_name for task in tasks]
    of_groups = [_tensor(model_out, task.group_name, task) for task in tasks] if groups else []
    shape, dtype = tensors[0].shape, tensors[0].dtype
    same = all(tensor.dtype == dtype for tensor in tensors)
    for key, tensor in zip(keys + [task.group_name for task in tasks if groups], tensors + of_groups, strict=True):
        if tensor.shape != shape:
            raise InputError(
                f"model_out[{key!r}]: got {tensor.numel()} samples; expected {shape.numel()}, as {keys[0]!r} has. Pass "
                "one number per sample."
            )
    narrow = all(tensor.dtype != torch.float64 for tensor in tensors[: len(tasks)])
    with torch.no_grad():
        if not same:
            tensors = [tensor.double() for tensor in tensors]
        # One copy for all tensors of all tasks.
        columns = torch.stack(tensors).double().view(-1, len(tasks), shape.numel())
        groups_TN = torch.stack(of_groups).long() if groups else None
    return Samples(columns[0], columns[1], columns[2] if weighted else None, groups_TN), narrow


def _tensor(model_out: Mapping[str, Tensor], key: str, task: RecTaskInfo) -> Tensor:
    """Return a tensor of a model's output as [N]."""
    tensor = model_out.get(key)
    if tensor is None:
        near = difflib.get_close_matches(key, list(model_out), 1)
        raise InputError(
            f"model_out: got no {key!r}, which task {task.name!r} reads; expected one of its keys "
            f"{sorted(model_out)}. {f'Did you mean {near[0]!r}? ' if near else ''}Correct the task's names, or pass "
            "weighted=False for a task without weights."
        )
    return tensor if tensor.dim() == 1 else tensor.detach().reshape(-1)
