"""The folder of a run's logs: config.json, plan.json, metrics.jsonl, TensorBoard's files and summary.json."""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from tilerec.atomic_file import write_file
from tilerec.errors import ConfigError, FileError
from tilerec.train.config import RunConfig
from tilerec.train.override import settings
from tilerec.train.run_logger import JsonLines, LogFiles, TensorBoard, finite
from tilerec.train.run_plan import plan_in


def open_logs(config: RunConfig, model: nn.Module, resumed_at: int | None = None) -> LogFiles:
    """Create the folder, write the config and the model's plan, and return the loggers.

    Args:
        resumed_at: the step from which a run goes on: its logs keep the events up to there. None for a new run.

    Raises:
        ConfigError: the folder has another run's logs, or cannot be written.
        FileError: a file cannot be written.
    """
    folder = Path(config.log_dir)
    if resumed_at is None and (folder / "metrics.jsonl").exists():
        raise ConfigError(
            f"log_dir: got {config.log_dir!r}, which contains another run's logs. Use a new folder, "
            "or continue that run with checkpoint.resume."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", {"name": config.name, **settings(config)})
        plan = plan_in(model)
        if plan is not None:
            # `--plan` accepts this file, to repeat the same sharding.
            plan.save(folder / "plan.json")
        return LogFiles([JsonLines(folder, resumed_at or 0), TensorBoard(folder, resumed_at or 0)])
    except FileError:
        raise
    except OSError as error:
        raise ConfigError(
            f"log_dir: cannot write {config.log_dir!r} ({error.strerror}). Use another folder."
        ) from error


def write_json(path: Path, values: dict[str, object]) -> None:
    """Write a JSON file of the folder; numbers that are not finite become null."""
    write_file(path, json.dumps(finite(values), indent=2, default=str) + "\n", "Logs")
