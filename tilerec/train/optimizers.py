"""Optimizers of a run: attached to tables, stepped for all other parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.table import Table
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.fused import FusedOptimizer
from tilerec.sharding.fused_optimizer import ShardedFusedOptimizer
from tilerec.sharding.table import ShardedTable
from tilerec.spec.optimizer import SGD, Adagrad, Adam, AdamW, OptimizerSpec
from tilerec.storage.table_rows import rows_of
from tilerec.train.config import TrainConfig

_TORCH: dict[type[OptimizerSpec], Callable[..., torch.optim.Optimizer]] = {
    SGD: torch.optim.SGD,
    Adagrad: torch.optim.Adagrad,
    Adam: torch.optim.Adam,
    AdamW: torch.optim.AdamW,
}


def tables_of(model: nn.Module) -> list[Table]:
    """Return the tables of a model's embedding collections, sharded or not."""
    return [table for part in model.modules() if isinstance(part, TableCollection) for table in part._tables.values()]


def attach(model: nn.Module, spec: OptimizerSpec) -> None:
    """Attach an optimizer to every table that has none."""
    parameters = {id(p): p for table in tables_of(model) for p in table.parameters()}
    bare = [p for p in parameters.values() if (rows := rows_of(p)) is None or rows.spec is None]
    if bare:
        apply_optimizer_in_backward(spec, bare)


class Optimizers:
    """A model's optimizers under one learning-rate schedule.

    parts: the optimizer of the "tables" and of the "dense" parameters, where the model has some.

    Args:
        model: the embedding optimizer is attached to the tables of its embedding collections, unless they have one. The
            dense optimizer steps all other parameters.
        config: the optimizers and the schedule.
    """

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        attach(model, config.embedding_optimizer)
        tables = {id(parameter) for table in tables_of(model) for parameter in table.parameters()}
        dense = [parameter for parameter in model.parameters() if id(parameter) not in tables]
        self.parts: dict[str, torch.optim.Optimizer] = {}
        if tables:
            sharded = any(isinstance(part, ShardedTable) for part in model.modules())
            self.parts["tables"] = ShardedFusedOptimizer(model) if sharded else FusedOptimizer(model)
        if dense:
            self.parts["dense"] = torch_optimizer(config.dense_optimizer, dense)
        self._all = list(self.parts.values())
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
        """Update the parameters that the backward pass has not updated."""
        for optimizer in self._all:
            optimizer.step()


def torch_optimizer(spec: OptimizerSpec, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's optimizer for a spec.

    Raises:
        ConfigError: torch has no optimizer for the spec, or its optimizer lacks one of the spec's settings.
    """
    cls = _TORCH.get(type(spec))
    if cls is None:
        names = ", ".join(known.__name__ for known in _TORCH)
        raise ConfigError(
            f"Dense optimizer: got {type(spec).__name__}, which is for tables only; expected one of {names}."
        )
    given = {item.name: getattr(spec, item.name) for item in fields(spec) if item.init}
    defaults = {item.name: item.default for item in fields(spec) if item.init}
    known = cls([nn.Parameter(torch.zeros(1))]).defaults
    for name, value in given.items():
        if name not in known and value != defaults[name]:
            raise ConfigError(
                f"Dense optimizer {type(spec).__name__}: got {name}={value!r}, which torch's does not support. Leave "
                "it out."
            )
    return cls(parameters, **{name: value for name, value in given.items() if name in known})
