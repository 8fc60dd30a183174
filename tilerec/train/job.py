"""`run`: a run that is the same function under every launcher, and continues from storage.

    from tilerec.train import run

    result = run(config)        # plain Python, torchrun, srun, Kubernetes, Ray Train

Every start is alike: there is no flag for a restart. The ranks are those of the environment. A run that saves
checkpoints loads the newest whole one of its `log_dir` and goes on, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from tilerec.comms.process import ProcessGroupComms
from tilerec.train.config import RunConfig
from tilerec.train.loop import train
from tilerec.train.ranks import on_ranks
from tilerec.train.result import RunResult
from tilerec.train.run_logger import Watcher


def run(config: RunConfig, *, console: Console | None = None, watchers: Sequence[Watcher] = ()) -> RunResult:
    """Run a config on the ranks that the environment describes; begin, or go on where storage ends.

    In a process that a launcher started, a failure is printed and ends the process with exit code 1, and a signal with
    143 after a save; see docs/checkpoints.md.

    Args:
        config: of the complete run. If it saves checkpoints (`checkpoint.every` or `seconds`), it resumes, too.
        console: console for rank 0's progress; None for no output.
        watchers: see `train`.

    Raises: as `train`, and `ConfigError` for a malformed environment.
    """
    if config.checkpoint.saves:
        config = replace(config, checkpoint=replace(config.checkpoint, resume=True))
    result: RunResult = on_ranks(
        _train, config, console, watchers,
        device=config.train.device, grouped=config.parallel.shards, timeout_s=config.parallel.timeout,
    )  # fmt: skip
    return result


def _train(
    group: ProcessGroupComms | None, config: RunConfig, console: Console | None, watchers: Sequence[Watcher]
) -> RunResult:
    first = group is None or not group.rank
    return train(config, console=console if first else None, watchers=watchers, group=group)
