"""The start of a run: from its initial values, from its newest checkpoint, or from the memory of its ranks."""

from __future__ import annotations

import torch
from torch import nn

from tilerec.data.dataset import Dataset
from tilerec.errors import ConfigError
from tilerec.train.config import RunConfig
from tilerec.train.run_checkpoints import RunCheckpoints
from tilerec.train.run_logger import Watcher
from tilerec.train.run_memory import RunMemory
from tilerec.train.run_saves import RunSaves
from tilerec.train.training_run import Run
from tilerec.train.world import World


def started_run(
    config: RunConfig,
    dataset: Dataset,
    model: nn.Module,
    device: torch.device,
    world: World,
    watchers: list[Watcher],
    checkpoints: RunCheckpoints | None,
) -> Run:
    """Return a run that is ready to learn. Collective.

    Raises:
        ConfigError: a killed rank is replaced, and neither memory nor checkpoints have its tables.
    """
    memory = RunMemory.of(config, world)
    saves = RunSaves(config, world, checkpoints)
    run = Run(config, dataset, model, device, world, watchers, saves, memory)
    if memory is not None and memory.attempt:
        newest = -1 if checkpoints is None else checkpoints.newest()
        if not memory.recover(run, newest) and not (checkpoints is not None and checkpoints.resume(run)):
            raise ConfigError(
                "parallel.replace: got a killed rank whose tables neither the other ranks nor a checkpoint has; "
                "expected a replica of each tile. Set parallel.group_size, or save checkpoints."
            )
    elif checkpoints is not None and config.checkpoint.resume:
        checkpoints.resume(run)
    return run
