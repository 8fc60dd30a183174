"""The two halves of an optimizer: attached to tables, stepped for everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.fused import FusedOptimizer
from tilerec.spec.optimizer import SGD, Adagrad, Adam, AdamW, OptimizerSpec
from tilerec.train.config import TrainConfig

_TORCH: dict[type[OptimizerSpec], Callable[..., torch.optim.Optimizer]] = {
    SGD: torch.optim.SGD,
    Adagrad: torch.optim.Adagrad,
    Adam: torch.optim.Adam,
    AdamW: torch.optim.AdamW,
}


class Optimizers:
    """A model's optimizers under one learning-rate schedule.

    Args:
        model: tables of its `EmbeddingBagCollection`s and `EmbeddingCollection`s get the embedding optimizer attached;
            all other parameters are stepped by the dense one.
        config: the optimizers and the schedule.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        tables: dict[int, nn.Parameter] = {}
        for module in model.modules():
            if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
                tables.update((id(parameter), parameter) for parameter in module.parameters())
        dense = [parameter for parameter in model.parameters() if id(parameter) not in tables]
        self._all: list[torch.optim.Optimizer] = []
        if tables:
            apply_optimizer_in_backward(config.embedding_optimizer, list(tables.values()))
            self._all.append(FusedOptimizer(model))
        if dense:
            self._all.append(torch_optimizer(config.dense_optimizer, dense))
        self._config = config
        self._base = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._all]

    def prepare(self, step: int) -> None:
        """Clear gradients and set the learning rates of a step, counted from 0, before its backward pass."""
        factor = self._config.lr_factor(step)
        for optimizer, rates in zip(self._all, self._base, strict=True):
            optimizer.zero_grad()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def step(self) -> None:
        """Update what the backward pass has not updated itself."""
        for optimizer in self._all:
            optimizer.step()


def torch_optimizer(spec: OptimizerSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's optimizer for a spec.

    Raises:
        ConfigError: a spec that torch has no optimizer for.
    """
    cls = _TORCH.get(type(spec))
    if cls is None:
        names = ", ".join(known.__name__ for known in _TORCH)
        raise ConfigError(
            f"The dense optimizer is {type(spec).__name__}, which is a rule for tables; use one of {names}."
        )
    given = {item.name: getattr(spec, item.name) for item in fields(spec) if item.init}
    defaults = {item.name: item.default for item in fields(spec) if item.init}
    known = cls([nn.Parameter(torch.zeros(1))]).defaults
    for name, value in given.items():
        if name not in known and value != defaults[name]:
            raise ConfigError(
                f"The dense optimizer {type(spec).__name__} has {name}={value!r}, which torch's has not; leave it out."
            )
    return cls(parameters, **{name: value for name, value in given.items() if name in known})
