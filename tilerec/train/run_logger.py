"""Loggers of a run: JSONL, TensorBoard, the terminal.

Glossary
    event     one record of a run's progress: "train" every few steps, "eval" after an evaluation
    watcher   a logger that receives every event; a run has several
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from tilerec.atomic_file import write_file
from tilerec.errors import ConfigError, FileError


@dataclass(frozen=True)
class Event:
    """One record of a run's progress.

    Attributes:
        kind: "train" or "eval".
        step: number of steps so far.
        samples: number of training samples so far.
        values: numbers by name, such as "loss"; samples_per_second counts training time only.
    """

    kind: Literal["train", "eval"]
    step: int
    samples: int
    values: Mapping[str, float]


class Watcher(ABC):
    """Receiver of a run's events (abstract): `begin`, then `record` for each event, then `close`.

    An exception other than a `ConfigError` ends the log with a warning, and the run continues.
    """

    def begin(self, name: str, settings: Mapping[str, object]) -> None:  # noqa: B027 - most logs need no beginning
        """Open the log, before the first event.

        Args:
            name: of the recipe.
            settings: the run's config, flat: "train.batch_size" and so on.
        """

    @abstractmethod
    def record(self, event: Event) -> None:
        """Record an event. Called in order, from one thread."""

    @abstractmethod
    def close(self) -> None:
        """Close the log, after the run has finished or failed."""


class JsonLines(Watcher):
    """Log file `metrics.jsonl`: one JSON object per event; values that are not finite are null.

    Args:
        resumed_at: the step from which a run goes on: events up to there stay, later ones are removed.

    Attributes:
        last_steps: step of the newest event that stayed, by kind.
    """

    def __init__(self, folder: Path, resumed_at: int = 0) -> None:
        path = folder / "metrics.jsonl"
        kept = _events_until(path, resumed_at) if resumed_at else []
        write_file(path, "".join(line for line, _ in kept), "Logs")
        self.last_steps: dict[Any, int] = {event.get("kind"): event["step"] for _, event in kept}
        self._file = path.open("a", encoding="utf-8")

    def record(self, event: Event) -> None:
        line = {"kind": event.kind, "step": event.step, "samples": event.samples, **event.values}
        self._file.write(json.dumps(finite(line)) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard(Watcher):
    """Scalars `train/…` and `eval/…` over steps, for `tensorboard --logdir`.

    Args:
        resumed_at: the step from which a run goes on: TensorBoard hides what was logged after it before.
    """

    def __init__(self, folder: Path, resumed_at: int = 0) -> None:
        # Imported here, as the import takes 0.1 s and only runs with logs need it.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        # `SummaryWriter` opens its file by path for each record, in a thread that dies with a traceback if it cannot.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("xb")
        self._records: Any = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if resumed_at:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=resumed_at + 1, session_log=start)

    def record(self, event: Event) -> None:
        values = [
            self._summary.Value(tag=f"{event.kind}/{name}", simple_value=value) for name, value in event.values.items()
        ]
        self._write(step=event.step, summary=self._summary(value=values))

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Logs(Watcher):
    """Several logs. A log that fails is closed and dropped with a warning, and the run continues.

    Args:
        logs: which receive every event.
        failures: errors of a log that fails. A `ConfigError` is not one of them, unless it is a `FileError`: its cause
            is a wrong setting.
        last_steps: steps of the newest events that the logs have, by kind. These events are left out: a finished run
            that is resumed evaluates again.

    Attributes:
        errors: one message per dropped log.
    """

    def __init__(
        self, logs: Iterable[Watcher], failures: type[Exception] = Exception,
        last_steps: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._logs = list(logs)
        self._failures = failures
        self._last_steps = dict(last_steps or {})
        self.errors: list[str] = []

    def begin(self, name: str, settings: Mapping[str, object]) -> None:
        for log in tuple(self._logs):
            self._send(log, partial(log.begin, name, settings))

    def record(self, event: Event) -> None:
        if self._last_steps.get(event.kind) == event.step:
            return
        for log in tuple(self._logs):
            self._send(log, partial(log.record, event))

    def close(self) -> None:
        while self._logs:
            log = self._logs.pop()
            self.attempt(log.close, type(log).__name__)

    def _send(self, log: Watcher, call: Callable[[], object]) -> None:
        if not self.attempt(call, type(log).__name__):
            self._logs.remove(log)
            with contextlib.suppress(self._failures):
                log.close()

    def attempt(self, call: Callable[[], object], who: str = "Logs") -> bool:
        """Call `call`; if it fails, store the message, which begins with `who`, warn, and return False."""
        try:
            call()
        except self._failures as error:
            if isinstance(error, FileError):
                text = str(error)
            elif isinstance(error, ConfigError):
                raise
            else:
                strerror = error.strerror if isinstance(error, OSError) else None
                text = f"{who}: got {type(error).__name__} '{strerror or error}'."
            self.errors.append(text)
            warnings.warn(f"{text} The run continues without this log.", stacklevel=2)
            return False
        return True


class Terminal(Watcher):
    """A progress bar on a terminal; one line per event on other consoles.

    Args:
        console: the console to write to.
        total_steps: for the bar; None if unknown.
        resumed_at: the step from which a run goes on.
    """

    def __init__(self, console: Console, total_steps: int | None, resumed_at: int = 0) -> None:
        self._console = console
        if resumed_at:
            console.print(f"resumed after step {resumed_at:,}", highlight=False)
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                _Steps(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )
            self._task = self._progress.add_task("training", total=total_steps, numbers="")
            self._progress.start()

    def record(self, event: Event) -> None:
        if event.kind == "train":
            names = [name for name in _SHOWN if name in event.values]
        else:
            names = [name for name in event.values if name not in _HIDDEN]
        numbers = "  ".join(_shown(name, event.values[name]) for name in names)
        if self._progress is None:
            self._console.print(f"{event.kind:5s} step {event.step:>6,}  {numbers}", highlight=False)
        elif event.kind == "train":
            self._progress.update(self._task, completed=event.step, numbers=numbers)
        else:
            self._progress.console.print(f"held out, step {event.step:,}:  {numbers}", highlight=False)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


_LABELS = {"auc": "AUC", "log_loss": "log loss", "ne": "NE"}
_SHOWN = ("loss", "auc", "samples_per_second")
"""Values of training that the terminal shows, if they are there."""
_HIDDEN = ("calibration",)
"""Scores that only the final report shows, to keep lines short."""


def _shown(name: str, value: float) -> str:
    return f"{value:,.0f} samples/s" if name == "samples_per_second" else f"{_LABELS.get(name, name)} {value:.4f}"


class _Steps(ProgressColumn):
    """Column `120/1,024`, or `120` if the total is unknown."""

    def render(self, task: Task) -> Text:
        done = f"{task.completed:,.0f}"
        return Text(done if task.total is None else f"{done}/{task.total:,.0f}", style="progress.download")


def _events_until(path: Path, step: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the lines and events of a log file up to a step, without a line that a stopped process began."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("step", step + 1) <= step:
            kept.append((line + "\n", event))
    return kept


def finite(value: Any) -> Any:
    """Return the value with every number that JSON cannot represent replaced by None."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
