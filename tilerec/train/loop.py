"""The training loop: trains a model on batches and returns its scores.

    for each batch:  clear gradients, set learning rates
                     logits = model(dense, sparse); loss = mean cross entropy
                     backward (updates tables), step (updates all other parameters)

Numbers stay on the device between two log events. Reading them is the loop's only wait for the device.

On several ranks (`world.py`) each rank takes its share of every batch, and rank 0 writes the logs. All reported numbers
cover all samples, and equal those of one process except for the last digits.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor, nn

from tilerec.atomic_file import write_file
from tilerec.comms.process import ProcessGroupComms
from tilerec.data.dataset import Dataset
from tilerec.data.delimited import RowCount
from tilerec.errors import ConfigError, FileError, TilerecError
from tilerec.metrics.functional import auc
from tilerec.metrics.module import MetricModule
from tilerec.ops.runtime.readback import drain
from tilerec.parallel.check_replicas import check_replicas
from tilerec.spec.plan import ShardingPlan
from tilerec.train.config import ParallelConfig, RunConfig
from tilerec.train.device_prefetcher import DevicePrefetcher
from tilerec.train.evaluate import Scores
from tilerec.train.loss import click_loss
from tilerec.train.optimizers import Optimizers
from tilerec.train.override import settings
from tilerec.train.rank_batches import Share
from tilerec.train.run_logger import Event, JsonLines, LogFiles, TensorBoard, Terminal, Watcher, finite
from tilerec.train.world import World


@dataclass(frozen=True)
class RunResult:
    """Result of a finished run.

    Attributes:
        name: of the recipe.
        steps, samples: number of training steps and samples.
        seconds: of training, without the evaluations.
        held_out: scores on the held-out part after the last step.
        best: scores of the true probabilities on the held-out part, if the dataset has them.
        best_expected_auc: AUC of the true probabilities, expected over labels drawn from them.
        rows: counts of read and skipped rows of the source.
        model: the trained model; on several ranks, with this rank's tiles.
        log_dir: folder of the logs; "" for none.
        ranks: number of ranks that trained together.
        log_errors: one message per log that could not be written completely, on the rank that writes logs.
    """

    name: str
    steps: int
    samples: int
    seconds: float
    held_out: Scores
    best: Scores | None
    best_expected_auc: float | None
    rows: RowCount
    model: nn.Module
    log_dir: str
    ranks: int = 1
    log_errors: tuple[str, ...] = ()

    @property
    def samples_per_second(self) -> float:
        """Training samples per second of training, including the time to read the data."""
        return self.samples / self.seconds if self.seconds else math.nan


def train(
    config: RunConfig,
    *,
    console: Console | None = None,
    watchers: Sequence[Watcher] = (),
    group: ProcessGroupComms | None = None,
) -> RunResult:
    """Run a recipe.

    Args:
        config: of the complete run.
        console: console for progress; None for no output.
        watchers: additional loggers besides the logs in `config.log_dir`; closed at the end.
        group: the ranks that train together; each must call this function with the same config. None trains in this
            process alone. `config.parallel` defines how tables are sharded over the ranks, and rank 0 writes the logs.
            `console` and `watchers` may differ between ranks; they receive the same events on all.

    Raises:
        InputError: the data cannot be read.
        ConfigError: settings contradict each other or differ between ranks.
        TilerecError: the loss is not finite.
        CommsError: another rank failed.
    """
    world = World(group)
    all_watchers = list(watchers)
    logs: LogFiles | None = None
    try:
        if group is None and config.parallel != ParallelConfig():
            warnings.warn(
                "train: parallel.* has no effect without group=, which defines the ranks to shard over.",
                stacklevel=2,
            )
        world.check(config)
        options = config.train
        if options.threads:
            torch.set_num_threads(options.threads)
        device = _device(options.device, world)
        dataset = config.data.open()
        torch.manual_seed(options.seed)
        model = world.build(config, dataset, device)
        if config.log_dir and not world.rank:
            logs = _logs(config, model)
            all_watchers.append(logs)
        if console is not None:
            all_watchers.append(Terminal(console, options.max_steps or None))
        run = _Run(config, dataset, model, device, world, all_watchers)
        run.learn()
        predictions, labels = world.predict(model, dataset, options.eval_batch_size, device)
        held_out = Scores.of(predictions, labels)
        run.emit("eval", _values(held_out))
    except BaseException as error:
        world.abort(error)
        raise
    finally:
        for watcher in all_watchers:
            watcher.close()
    best, expected = _best(dataset, labels)
    result = RunResult(
        name=config.name,
        steps=run.steps,
        samples=run.samples,
        seconds=run.seconds,
        held_out=held_out,
        best=best,
        best_expected_auc=expected,
        rows=dataset.row_count(),
        model=model,
        log_dir=config.log_dir,
        ranks=world.size,
    )
    if logs is not None:
        # A full disk must not prevent the return of the result.
        logs.attempt(lambda: _write_json(Path(config.log_dir) / "summary.json", summary(result)))
        result = replace(result, log_errors=tuple(logs.errors))
    return result


def summary(result: RunResult) -> dict[str, object]:
    """Return the result as JSON values."""
    return {
        "recipe": result.name,
        "steps": result.steps,
        "samples": result.samples,
        "seconds": result.seconds,
        "samples_per_second": result.samples_per_second,
        "held_out": asdict(result.held_out),
        "best": None if result.best is None else asdict(result.best),
        "best_expected_auc": result.best_expected_auc,
        "rows": asdict(result.rows),
        "torch": torch.__version__,
        "ranks": result.ranks,
        "threads": torch.get_num_threads(),
    }


class _Run:
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
        self._prefetch_batch = DevicePrefetcher(model, device)
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
        for share in self._shares():
            loss = self._step(share)
            self.steps += 1
            self.samples += share.total
            self._loss_sum += loss
            if options.check_replicas_every and self.steps % options.check_replicas_every == 0:
                check_replicas(self._model)
            if self.steps % options.log_every == 0:
                values = self._progress()
                # Reading the values has waited for the device, so the elapsed time includes the device's work.
                self.seconds += time.perf_counter() - since
                self.emit("train", {**values, "samples_per_second": self.samples / self.seconds})
                since = time.perf_counter()
            if (
                options.eval_every
                and self.steps % options.eval_every == 0
                and self.steps != options.max_steps
            ):
                self._wait()
                self.seconds += time.perf_counter() - since
                held_out = self._world.predict(
                    self._model, self._dataset, options.eval_batch_size, self._device
                )
                self.emit("eval", _values(Scores.of(*held_out)))
                since = time.perf_counter()
        if not self.steps:
            raise ConfigError("The training part has no samples. Use more data, or hold out less of it.")
        if self.steps > self._logged_steps:
            values = self._progress()
            self.seconds += time.perf_counter() - since
            self.emit("train", {**values, "samples_per_second": self.samples / self.seconds})

    def emit(self, kind: str, values: dict[str, float]) -> None:
        """Send an event to every watcher."""
        assert kind in ("train", "eval")
        event = Event(kind, self.steps, self.samples, values)  # type: ignore[arg-type]
        for watcher in self._watchers:
            watcher.record(event)

    def _shares(self) -> Iterator[Share]:
        for epoch in range(self._options.epochs):
            for share in self._world.train_shares(self._config, self._dataset, epoch):
                if self._options.max_steps and self.steps == self._options.max_steps:
                    return
                yield share

    def _step(self, share: Share) -> Tensor:
        """Run one update; return this rank's part of the loss, on the device."""
        batch = self._prefetch_batch(share.batch)
        self._optimizers.prepare(self.steps)
        logits = self._step_module(batch.dense_features, batch.sparse_features)
        loss = click_loss(logits, batch.labels, global_batch=share.total, world_size=self._world.size)
        loss.backward()
        self._optimizers.step()
        self._metrics.update(logits.detach().reshape(-1).sigmoid(), batch.labels)
        return loss.detach()

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


def _device(name: str, world: World) -> torch.device:
    device = torch.device(name)
    if name == "cuda" and world.size > 1 and torch.cuda.device_count():
        # One GPU per rank, by torchrun's number of the rank on its host; if there are fewer GPUs, ranks share them.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"train.device: got {name!r}, which this machine or this torch does not support. Use 'cpu'."
        ) from error
    return device


def _values(scores: Scores) -> dict[str, float]:
    return {name: value for name, value in asdict(scores).items() if name != "samples"}


def _best(dataset: Dataset, labels: Tensor) -> tuple[Scores | None, float | None]:
    true = dataset.best_predictions()
    if true is None:
        return None, None
    return Scores.of(true, labels), Scores.of(true, true).auc


def _logs(config: RunConfig, model: nn.Module) -> LogFiles:
    folder = Path(config.log_dir)
    if (folder / "metrics.jsonl").exists():
        raise ConfigError(
            f"log_dir: got {config.log_dir!r}, which contains another run's logs. Use a new folder."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / "config.json", {"name": config.name, **settings(config)})
        plan = getattr(model, "plan", None)
        if isinstance(plan, ShardingPlan):
            # `--plan` accepts this file, to repeat the same sharding.
            plan.save(folder / "plan.json")
        return LogFiles([JsonLines(folder), TensorBoard(folder)])
    except FileError:
        raise
    except OSError as error:
        raise ConfigError(
            f"log_dir: cannot write {config.log_dir!r} ({error.strerror}). Use another folder."
        ) from error


def _write_json(path: Path, values: dict[str, object]) -> None:
    write_file(path, json.dumps(finite(values), indent=2, default=str) + "\n", "Logs")
