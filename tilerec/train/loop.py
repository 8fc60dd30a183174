"""The training loop: trains a model on batches and returns its scores.

On several ranks (`world.py`) each rank takes its share of every batch, and rank 0 writes the logs. All reported numbers
cover all samples, and equal those of one process except for the last digits.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from tilerec.comms.process import ProcessGroupComms
from tilerec.phase import phase
from tilerec.train.config import RunConfig
from tilerec.train.device import run_device
from tilerec.train.log_folder import open_logs, write_json, write_run
from tilerec.train.override import settings
from tilerec.train.result import RunResult, run_result, summary
from tilerec.train.run_checkpoints import RunCheckpoints
from tilerec.train.run_logger import Logs, Terminal, Watcher
from tilerec.train.saved_model import MODEL_FILE, save_model
from tilerec.train.started_run import started_run
from tilerec.train.training_run import Run
from tilerec.train.world import World


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
        watchers: additional loggers besides the logs in `config.log_dir`; closed at the end. One that fails is dropped
            with a warning.
        group: the ranks that train together; each must call this function with the same config. None trains in this
            process alone. `config.parallel` defines how tables are sharded over the ranks, and rank 0 writes the logs.
            `console` and `watchers` may differ between ranks; they receive the same events on all.

    Raises:
        InputError: the data cannot be read.
        ConfigError: settings contradict each other or differ between ranks.
        TilerecError: the loss is not finite.
        CommsError: another rank failed.
        RunStopped: a signal has stopped a run with checkpoints, and it is saved.
    """
    world, all_watchers = World(group), list[Watcher]([Logs(watchers)])
    logs: Logs | None = None
    run: Run | None = None
    try:
        if group is None and config.parallel.shards:
            warnings.warn("train: parallel.* has no effect without group=, the ranks to shard over.", stacklevel=2)
        world.check(config)
        options = config.train
        if options.threads:
            torch.set_num_threads(options.threads)
        device = run_device(options.device, world.size)
        with phase("open the data", console):
            dataset = config.task.with_checks(config.data.open())
            config = replace(config, data=config.data.as_opened(dataset))
            config.task.check(dataset)
            world.check_data(dataset)
        torch.manual_seed(options.seed)
        checkpoints = RunCheckpoints.of(config, world)
        with phase("build the model", console):
            model = world.build(config, dataset, device, checkpoints.saved_plan(device.type) if checkpoints else None)
        with phase("prepare the run", console):
            run = started_run(config, dataset, model, device, world, all_watchers, checkpoints)
        if config.log_dir and not world.rank:
            logs = open_logs(config, model, run.steps if run.continues else None)
            write_run(config, dataset)
            all_watchers.append(logs)
        if console is not None:
            all_watchers.append(Terminal(console, options.max_steps or None, run.steps))
        for watcher in all_watchers:
            watcher.begin(config.name, settings(config))
        run.learn()
        held_out = run.evaluate()
        if config.log_dir:
            _save(config, model, run, world, logs)
        run.finish()
    except BaseException as error:
        if run is not None:
            run.hand_over(error)
        world.abort(error)
        raise
    finally:
        for watcher in all_watchers:
            watcher.close()
    result = run_result(config, dataset, model, run, held_out, world)
    if logs is not None:
        # A full disk must not prevent the return of the result.
        logs.attempt(lambda: write_json(Path(config.log_dir) / "summary.json", summary(result)))
        result = replace(result, log_errors=tuple(logs.errors))
    return result


def _save(config: RunConfig, model: nn.Module, run: Run, world: World, logs: Logs | None) -> None:
    """Write the model to the log folder. Collective. A full disk must not prevent the return of the result."""
    metadata = {name: str(value) for name, value in run.state_dict().items() if isinstance(value, int | float)}
    path = Path(config.log_dir) / MODEL_FILE

    def write() -> None:
        save_model(path, model, metadata, rank=world.rank)

    if logs is None:
        write()
    else:
        logs.attempt(write)
