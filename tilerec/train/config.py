"""Config of a run: frozen dataclasses that a recipe creates and overrides change before anything is built."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import nn

from tilerec.checkpoint.changes import Changes
from tilerec.data.dataset import Dataset, RowDataset
from tilerec.data.file_list import FilePath
from tilerec.errors import ConfigError
from tilerec.spec.optimizer import Adagrad, Adam, OptimizerSpec
from tilerec.train.device import AUTO

if TYPE_CHECKING:
    from tilerec.train.task import Task
    from tilerec.train.world import World


_D = TypeVar("_D", bound=Dataset)


class DataConfig(ABC):
    """Source of the samples. Subclasses are frozen dataclasses."""

    @abstractmethod
    def open(self) -> Dataset:
        """Open and return the dataset; raise `InputError` if the source cannot be read."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Columns that name the samples in files of predictions; () for the default."""
        return ()

    def with_vocabulary(self, folder: Path) -> DataConfig:
        """Return the config with the vocabularies that a run has kept in a folder or a checkpoint; unchanged if it has
        none.
        """
        return self

    def as_opened(self, dataset: Dataset) -> DataConfig:
        """Return the config with facts of the opened data that a run keeps for further files, such as types of ids."""
        return self

    def open_catalog(self) -> Dataset:
        """Open the source for its features and its catalog, to export an index; samples may be absent."""
        return self.open()

    def open_rows(self, path: tuple[str, ...], *, labels: bool = True) -> RowDataset:
        """Open other files with the same columns, to evaluate or predict all of their rows.

        Args:
            path: files, folders, patterns or URLs.
            labels: False if the source may lack the columns of labels and weights.

        Raises:
            ConfigError: data of this kind have no named columns.
            InputError: the source cannot be read, or a column is missing or has another type.
        """
        given = ", ".join(path)
        raise ConfigError(
            f"{type(self).__name__}: got {given} to evaluate or predict; expected a run with data.kind = 'files' or "
            "'interactions', whose columns have names. Describe the data with `tilerec init`."
        )


class ModelConfig(ABC):
    """Config of a model. Subclasses are frozen dataclasses."""

    @abstractmethod
    def build(self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None) -> nn.Module:
        """Build a module whose `forward(dense_features [B, I], sparse_features)` returns the input of the task's loss.

        That is logits [B] or [B, 1] for clicks.

        Args:
            dataset: the data that the model will read.
            device: of the parameters; initial values are drawn from torch's generator.
            table_device: of the tables, if different. A run on several ranks passes meta: sharding allocates the
                tables and gives them the same values.
        """


class TaskConfig(ABC):
    """Config of a task: the loss, the scores and the predictions of a run. Subclasses are frozen dataclasses."""

    def check(self, dataset: Dataset) -> None:  # noqa: B027 - most tasks find out when they are built
        """Raise `ConfigError` for data that the task cannot use, before the model is built."""

    def with_checks(self, dataset: _D) -> _D:
        """Return labelled data with the checks of its values that the task needs; most tasks need none."""
        return dataset

    @abstractmethod
    def build(self, dataset: Dataset, options: TrainConfig, device: torch.device, world: World) -> Task:
        """Return the task of one run. Collective.

        Args:
            dataset: the run's data; or files with the same columns, to evaluate or predict.
            options: of the training.
            device: of the model.
            world: the ranks.
        """


@dataclass(frozen=True)
class ClickConfig(TaskConfig):
    """Probabilities of clicks, or of other labels from 0 to 1: binary cross entropy, one logit per label column.

    Attributes:
        weights: factor of each task's loss, in the order of the labels; [] for 1 each. The divisor stays the
            number of tasks: factors 1, 0.5 halve the second task's gradients and leave the first one's unchanged.
    """

    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not all(math.isfinite(one) and one >= 0 for one in self.weights) or set(self.weights) == {0.0}:
            raise ConfigError(
                f"task.weights: got {list(self.weights)}; expected numbers of at least 0, not all 0. Leave "
                "it out for equal weights."
            )

    def check(self, dataset: Dataset) -> None:
        if not dataset.tasks:
            raise ConfigError(
                "data.columns.labels: got none; expected at least one with task.kind = 'click', the default. Name the "
                "column to predict, or set task.kind."
            )

    def with_checks(self, dataset: _D) -> _D:
        return dataset.with_label_bounds(0, 1)

    def build(self, dataset: Dataset, options: TrainConfig, device: torch.device, world: World) -> Task:
        from tilerec.train.click_task import ClickTask  # it imports this module

        return ClickTask(dataset.tasks, self.weights, options, device, world)


@dataclass(frozen=True)
class TrainConfig:
    """Config of training.

    Attributes:
        batch_size: samples per step, over all ranks; the loss is their mean.
        epochs: passes over the training part.
        max_steps: number of steps after which training stops; 0 for no limit.
        embedding_optimizer: attached to every table; it updates rows inside the backward pass.
        dense_optimizer: of all other parameters: SGD, Adagrad, Adam or AdamW.
        warmup_steps: steps of a linear rise of both learning rates from 0 to their value.
        decay_steps: steps of the linear decay that follows, to `decay_to` times their value; 0 for no decay.
        decay_to: see `decay_steps`.
        eval_every: steps between evaluations on the held-out part; 0 evaluates after the last step only.
        eval_batch_size: samples per batch of an evaluation.
        log_every: steps between log entries with loss, AUC and samples/s.
        metric_window: number of latest samples in the training AUC.
        seed: of the initial values. The order of the data has its own seed.
        device: "cpu", "cuda", "cuda:1", …; "auto" is "cuda" if this machine has a GPU for each of its ranks, and
            "cpu" otherwise.
        threads: of torch's CPU kernels, per process; 0 keeps torch's default.
        check_replicas_every: on several ranks, steps between comparisons of the copies of replicated tables
            (`tilerec.parallel.check_replicas`); 0 never compares.
    """

    batch_size: int = 1024
    epochs: int = 1
    max_steps: int = 0
    embedding_optimizer: OptimizerSpec = field(default_factory=lambda: Adagrad(lr=0.05))
    dense_optimizer: OptimizerSpec = field(default_factory=lambda: Adam(lr=1e-3))
    warmup_steps: int = 0
    decay_steps: int = 0
    decay_to: float = 0.0
    eval_every: int = 0
    eval_batch_size: int = 4096
    log_every: int = 50
    metric_window: int = 50_000
    seed: int = 0
    device: str = AUTO
    threads: int = 0
    check_replicas_every: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "eval_batch_size", "log_every", "metric_window"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name}: got {getattr(self, name)}; expected at least 1.")
        counts = ("max_steps", "warmup_steps", "decay_steps", "eval_every", "threads", "seed")
        for name in (*counts, "check_replicas_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"train.{name}: got {getattr(self, name)}; expected at least 0.")
        if not 0 <= self.decay_to <= 1:
            raise ConfigError(f"train.decay_to: got {self.decay_to}; expected 0 to 1, a fraction of the learning rate.")
        try:
            torch.device("cpu" if self.device == AUTO else self.device)
        except RuntimeError as error:
            raise ConfigError(f"train.device: got {self.device!r}; expected 'auto', 'cpu' or 'cuda'.") from error

    def lr_factor(self, step: int) -> float:
        """Return the factor of both learning rates at this step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if not self.decay_steps:
            return 1.0
        done = min((step - self.warmup_steps) / self.decay_steps, 1.0)
        return 1.0 + done * (self.decay_to - 1.0)


@dataclass(frozen=True)
class ParallelConfig:
    """Sharding of tables in a run on several ranks.

    Attributes:
        plan: path of a sharding plan, as in the `plan.json` that runs write to their log folder; "" plans a new one.
        sharding: "planned" leaves the choice to the planner; any other value shards every table that way.
        exact: bitwise equal results under every plan, at the cost of more bytes sent.
        group_size: ranks that together hold every table once; the other groups of this size hold replicas (2D
            parallelism). 0: all ranks, no replicas.
        replace: number of killed ranks that `tilerec train --nproc` replaces; 0 ends the run. The others' memory has
            the tables of a killed rank if there are replicas; otherwise the run goes on from its newest checkpoint.
        timeout: seconds that a rank waits for the others; then the run ends, and names the ranks that are missing.
    """

    plan: FilePath = ""
    sharding: Literal[
        "planned",
        "data_parallel",
        "table_wise",
        "column_wise",
        "row_wise",
        "table_row_wise",
        "table_column_wise",
        "grid_shard",
    ] = "planned"
    exact: bool = False
    group_size: int = 0
    replace: int = 0
    timeout: float = 1800.0

    @property
    def shards(self) -> bool:
        """True if a setting shards the tables of one process, too: it then holds all tiles."""
        return bool(self.plan or self.group_size) or self.sharding != "planned" or self.exact

    def __post_init__(self) -> None:
        if not 0 < self.timeout <= 1e7:
            raise ConfigError(f"parallel.timeout: got {self.timeout}; expected seconds above 0, up to 1e7.")
        for name in ("group_size", "replace"):
            if getattr(self, name) < 0:
                raise ConfigError(f"parallel.{name}: got {getattr(self, name)}; expected at least 0.")
        if self.plan and self.sharding != "planned":
            raise ConfigError(
                f"parallel: got plan={self.plan!r} and sharding={self.sharding!r}; expected only one of them, because "
                "a plan already defines how each table is sharded."
            )


_CHANGING = ("model.", "tables.", "dense.")
"""Parts of a run's checkpoint that may differ from the run."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints of a run, in the folder `checkpoints` of its `log_dir`.

    Attributes:
        every: steps between two checkpoints; 0 for none. The last step has one, too.
        seconds: as an alternative, seconds between two checkpoints; 0 for none.
        keep_last: number of newest checkpoints to keep; 0 keeps all.
        keep_every: further checkpoints to keep: those whose step is a multiple of this; 0 for none.
        asynchronous: write while training goes on; a step copies the rows that it is about to change. False: training
            waits for each checkpoint.
        incremental: write only the rows that have changed since the last checkpoint, and everything once these
            checkpoints are as large as the last whole one together.
        resume: continue from the newest whole checkpoint of `log_dir`, if there is one.
        changes: what differs between the run and the checkpoint that it continues: names of tensors, which begin with
            `model.`, `tables.` (the state of the embedding optimizer) or `dense.` (that of the dense one).
    """

    every: int = 0
    seconds: float = 0.0
    keep_last: int = 2
    keep_every: int = 0
    asynchronous: bool = True
    incremental: bool = False
    resume: bool = False
    changes: Changes = field(default_factory=Changes)

    @property
    def saves(self) -> bool:
        """True if the run saves checkpoints; False if it has none, or only resumes."""
        return bool(self.every or self.seconds)

    def __post_init__(self) -> None:
        for name in ("every", "seconds", "keep_last", "keep_every"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"checkpoint.{name}: got {getattr(self, name)}; expected at least 0.")
        changes = self.changes
        for key in ("rename", "drop", "keep", "resize"):
            names = getattr(changes, key)
            for name in (*names, *(names.values() if key == "rename" else ())):
                if not name.startswith(_CHANGING):
                    raise ConfigError(
                        f"checkpoint.changes.{key}: got {name!r}; expected names that begin with "
                        f"{', '.join(map(repr, _CHANGING))}. List them with `tilerec checkpoint inspect`."
                    )


@dataclass(frozen=True)
class DeltaConfig:
    """Published states of a run, in the folder `deltas` of its `log_dir`, for models that serve.

    Attributes:
        every: steps between two published states; 0 for none. The last step has one, too.
        max_bytes: most bytes of rows in one of them; those that have changed most come first. 0 for all changed rows.
        base_every: states between two that hold everything; 0: one once the changes since the last are as large as it.
        keep_bases: number of newest whole states to keep, with the changes since the oldest of them; 0 keeps all.
    """

    every: int = 0
    max_bytes: int = 0
    base_every: int = 0
    keep_bases: int = 2

    def __post_init__(self) -> None:
        for name in ("every", "max_bytes", "base_every", "keep_bases"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"delta.{name}: got {getattr(self, name)}; expected at least 0.")


@dataclass(frozen=True)
class RunConfig:
    """Config of a complete run.

    Attributes:
        name: of the run or recipe, for logs; in a run file, the default is the name of the file.
        data: where the samples come from.
        model: which model to train.
        train: how to train it.
        log_dir: folder for logs and the model, created if it does not exist; "" for none. (The command line takes
            runs/<name>/<date and time> in place of "".)
        parallel: sharding of tables, for runs on several ranks.
        trace: file for the times of all stages, for Perfetto; "" for none.
        task: what the model learns.
        checkpoint: when to save the whole run, and whether to continue one.
        delta: when to publish the model's state.
    """

    name: str
    data: DataConfig
    model: ModelConfig
    train: TrainConfig
    log_dir: FilePath = ""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    trace: str = ""
    task: TaskConfig = field(default_factory=ClickConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    delta: DeltaConfig = field(default_factory=DeltaConfig)
