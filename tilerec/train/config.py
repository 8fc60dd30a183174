"""What one run is: frozen records, made by a recipe and changed by overrides before anything is built."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import nn

from tilerec.data.dataset import Dataset
from tilerec.errors import ConfigError
from tilerec.spec.optimizer import Adagrad, Adam, OptimizerSpec


class DataConfig(ABC):
    """Where the samples come from. Subclasses are frozen dataclasses."""

    @abstractmethod
    def open(self) -> Dataset:
        """The dataset; `InputError` if the source cannot be read."""


class ModelConfig(ABC):
    """What learns. Subclasses are frozen dataclasses."""

    @abstractmethod
    def build(self, dataset: Dataset, device: torch.device) -> nn.Module:
        """A module whose `forward(dense_features [B, I], sparse_features)` gives one logit per sample, [B] or [B, 1].

        Its parameters on `device`, initial values from torch's generator.
        """


@dataclass(frozen=True)
class TrainConfig:
    """How it learns.

    Attributes:
        batch_size: samples per step; the loss is their mean.
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
        threads: of torch's CPU kernels; 0 leaves torch's choice.
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

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "eval_batch_size", "log_every", "metric_window"):
            if getattr(self, name) < 1:
                raise ConfigError(f"train.{name} is {getattr(self, name)}; it must be at least 1.")
        for name in ("max_steps", "warmup_steps", "decay_steps", "eval_every", "threads", "seed"):
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
class RunConfig:
    """A whole run.

    Attributes:
        name: of the recipe, for logs.
        data, model, train: the three parts.
        log_dir: folder for logs, made if need be; "" for no logs.
    """

    name: str
    data: DataConfig
    model: ModelConfig
    train: TrainConfig
    log_dir: str = ""
