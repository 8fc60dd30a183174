"""What one run is: frozen records, made by a recipe and changed by overrides before anything is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from tilerec.data.dataset import Dataset
from tilerec.errors import ConfigError
from tilerec.spec.optimizer import Adagrad, Adam, OptimizerSpec
from tilerec.train.share import Share, shares


class DataConfig(ABC):
    """Where the samples come from. Subclasses are frozen dataclasses."""

    @abstractmethod
    def open(self) -> Dataset:
        """The dataset; `InputError` if the source cannot be read."""

    def train_shares(
        self, dataset: Dataset, batch_size: int, epoch: int, rank: int, world_size: int
    ) -> Iterator[Share]:
        """A rank's share of each global batch of a pass.

        Reads all of it and keeps the share. Sources that can read a share alone do better to.

        Args:
            dataset: what `open` returned.
            batch_size: of the global batches.
        """
        return shares(dataset.train(batch_size, epoch), rank, world_size)


class ModelConfig(ABC):
    """What learns. Subclasses are frozen dataclasses."""

    @abstractmethod
    def build(
        self, dataset: Dataset, device: torch.device, table_device: torch.device | None = None
    ) -> nn.Module:
        """A module whose `forward(dense_features [B, I], sparse_features)` gives one logit per sample, [B] or [B, 1].

        Args:
            dataset: what it will read.
            device: of the parameters; initial values are drawn from torch's generator.
            table_device: of the tables, if another. A run on several ranks passes meta: tables get memory, and the
                same values, when they are sharded.
        """


@dataclass(frozen=True)
class TrainConfig:
    """How it learns.

    Attributes:
        batch_size: samples per step, of all ranks together; the loss is their mean.
        epochs: passes over the training part.
        max_steps: stop after so many steps; 0 for no limit.
        embedding_optimizer: attached to every table; it updates rows inside the backward pass.
        dense_optimizer: of all other parameters: SGD, Adagrad, Adam or AdamW.
        warmup_steps: both learning rates rise linearly from 0 to their value over so many steps.
        decay_steps: from then on they fall linearly, for so many steps, to `decay_to` times their value; 0: they stay.
        decay_to: see `decay_steps`.
        eval_every: evaluate on the held-out part every so many steps; 0: after the last step only.
        eval_batch_size: samples per batch there.
        log_every: write loss, AUC and samples/s every so many steps.
        metric_window: samples over which the training AUC is taken.
        seed: of the initial values. The order of the data has a seed of its own.
        device: "cpu", "cuda", "cuda:1", …
        threads: of torch's CPU kernels, per process; 0 leaves torch's choice.
        check_replicas_every: on several ranks, compare the copies of replicated tables every so many steps
            (`tilerec.parallel.check_replicas`); 0: never.
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
    device: str = "cpu"
    threads: int = 0
    check_replicas_every: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "eval_batch_size", "log_every", "metric_window"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} is {getattr(self, name)}; it must be at least 1.")
        counts = ("max_steps", "warmup_steps", "decay_steps", "eval_every", "threads", "seed")
        for name in (*counts, "check_replicas_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"train.{name} is {getattr(self, name)}; it must be at least 0.")
        if not 0 <= self.decay_to <= 1:
            raise ConfigError(
                f"train.decay_to is {self.decay_to}; it is a share of the learning rate, 0 to 1."
            )
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise ConfigError(f"train.device is {self.device!r}; use 'cpu' or 'cuda'.") from error

    def lr_factor(self, step: int) -> float:
        """What both learning rates are multiplied by at this step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if not self.decay_steps:
            return 1.0
        done = min((step - self.warmup_steps) / self.decay_steps, 1.0)
        return 1.0 + done * (self.decay_to - 1.0)


@dataclass(frozen=True)
class ParallelConfig:
    """How tables are cut where a run has several ranks.

    Attributes:
        plan: path of a sharding plan, as runs write it to `plan.json` in their log folder; "" to have one made.
        sharding: "planned" leaves the choice to the planner; another word cuts every table that way.
        exact: the same bits under every plan, for more bytes on the wire.
    """

    plan: str = ""
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

    def __post_init__(self) -> None:
        if self.plan and self.sharding != "planned":
            raise ConfigError(
                f"parallel.plan is {self.plan!r} and parallel.sharding {self.sharding!r}; give one of them: a plan "
                "says how each table is cut."
            )


@dataclass(frozen=True)
class RunConfig:
    """A whole run.

    Attributes:
        name: of the recipe, for logs.
        data, model, train: the three parts.
        log_dir: folder for logs, made if need be; "" for no logs.
        parallel: how tables are cut, for runs on ranks.
    """

    name: str
    data: DataConfig
    model: ModelConfig
    train: TrainConfig
    log_dir: str = ""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
