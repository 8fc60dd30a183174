"""The folder of a run's logs: config.json, plan.json, metrics.jsonl, TensorBoard's files and summary.json."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

from torch import nn

from tilerec.atomic_file import write_file
from tilerec.data.dataset import Dataset
from tilerec.errors import ConfigError, FileError
from tilerec.file_kind import TRACE, check_kind
from tilerec.output_path import check_output
from tilerec.train.config import RunConfig
from tilerec.train.override import settings
from tilerec.train.run_file import RUN_FILE, path_settings, write_run_file
from tilerec.train.run_logger import JsonLines, Logs, TensorBoard, finite
from tilerec.train.run_plan import plan_in
from tilerec.train.saved_model import MODEL_FILE
from tilerec.train.vocabulary_files import write_vocabularies


def log_files(folder: Path) -> list[Path]:
    """Return the files with fixed names that a run writes into its folder."""
    names = ("config.json", "plan.json", "metrics.jsonl", "summary.json", RUN_FILE, MODEL_FILE)
    return [folder / name for name in names]


def has_logs(folder: Path) -> bool:
    """Return True if the folder has the logs of a run."""
    return (folder / "metrics.jsonl").exists()


def check_outputs(config: RunConfig, source: str) -> None:
    """Raise if the trace or a log would replace the run file, the data, the plan or a file of another kind.

    Args:
        source: the run file, or the name of a recipe.
    """
    own = [source] if source.endswith(".toml") else []
    read = {"RUN": own, "the run's data": path_settings(config.data), "--plan": [config.parallel.plan]}
    if config.trace:
        check_output("trace (--trace)", config.trace, shared=read)
        check_kind("trace (--trace)", config.trace, TRACE)
    folder = Path(config.log_dir)
    # A folder with logs is that of a run to resume, or has an error of its own.
    if config.log_dir and not has_logs(folder):
        for file in log_files(folder):
            check_output("log_dir (--log-dir)", file, shared=read)
        for file in log_files(folder):
            check_kind("log_dir (--log-dir)", file, None)


def open_logs(config: RunConfig, model: nn.Module, resumed_at: int | None = None) -> Logs:
    """Create the folder, write the config and the model's plan, and return the loggers.

    Args:
        resumed_at: the step from which a run goes on: its logs keep the events up to there. None for a new run.

    Raises:
        ConfigError: the folder has another run's logs, or cannot be written.
        FileError: a file cannot be written.
    """
    folder = Path(config.log_dir)
    if resumed_at is None and has_logs(folder):
        raise ConfigError(
            f"log_dir: got {config.log_dir!r}, which contains another run's logs. Use a new folder, "
            "or continue that run with checkpoint.resume."
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lines = JsonLines(folder, resumed_at or 0)  # first: this file makes the folder that of a run
        write_json(folder / "config.json", {"name": config.name, **settings(config)})
        plan = plan_in(model)
        if plan is not None:
            # `--plan` accepts this file, to repeat the same sharding.
            plan.save(folder / "plan.json")
        return Logs([lines, TensorBoard(folder, resumed_at or 0)], OSError, lines.last_steps)
    except FileError:
        raise
    except OSError as error:
        raise ConfigError(
            f"log_dir: cannot write {config.log_dir!r} ({error.strerror}). Use another folder."
        ) from error


def write_json(path: Path, values: dict[str, object]) -> None:
    """Write a JSON file of the folder; numbers that are not finite become null."""
    write_file(path, json.dumps(finite(values), indent=2, default=str) + "\n", "Logs")


def write_run(config: RunConfig, dataset: Dataset) -> None:
    """Write the run and its vocabularies beside its logs, for `tilerec eval` and `tilerec predict`."""
    write_vocabularies(Path(config.log_dir), dataset.vocabularies())
    try:
        # Without the folder, which may move.
        write_run_file(Path(config.log_dir) / RUN_FILE, replace(config, log_dir=""))
    except FileError:
        raise
    except ConfigError as error:
        # A class of a notebook or a function has no name for a file; the run itself does not need one.
        warnings.warn(f"{error} The run continues without {RUN_FILE}.", stacklevel=3)
