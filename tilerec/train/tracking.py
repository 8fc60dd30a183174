"""Loggers that send a run's events to a tracking service: Weights & Biases, MLflow.

    train(config, watchers=[WandbWatcher(project="ctr")])

Each needs its package only when a run begins (`pip install wandb`, `pip install mlflow`). A service that fails ends the
log with a warning, and the run continues.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from tilerec.errors import ConfigError
from tilerec.train.run_logger import Event, Watcher


class TrackingWatcher(Watcher):
    """A logger over a package that is imported when the run begins (abstract).

    Attributes:
        package: name of the package.
        error: the message of the failure that ended the log; "" if there was none.
    """

    package: str

    def __init__(self) -> None:
        self.error = ""
        self._begun = False

    def begin(self, name: str, settings: Mapping[str, object]) -> None:
        try:
            service = importlib.import_module(self.package)
        except ImportError as error:
            raise ConfigError(
                f"{type(self).__name__}: got no package {self.package!r} ({error}); expected it to be installed. Run "
                f"pip install {self.package}."
            ) from error
        self._begun = self._attempt(lambda: self._begin(service, name, settings))

    def record(self, event: Event) -> None:
        if self._begun:
            values = {f"{event.kind}/{name}": value for name, value in event.values.items()}
            self._begun = self._attempt(lambda: self._log(values, event))

    def close(self) -> None:
        if self._begun:
            self._begun = False
            # A run closes its loggers while its error, if there is one, is on the way to the caller.
            self._attempt(lambda: self._end(failed=sys.exc_info()[0] is not None))

    def _attempt(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:  # packages have errors of their own for networks, quotas and credentials
            self.error = f"{self.package}: got {type(error).__name__} '{error}'."
            warnings.warn(f"{self.error} The run continues without this log.", stacklevel=3)
            return False
        return True

    @abstractmethod
    def _begin(self, service: Any, name: str, settings: Mapping[str, object]) -> None: ...

    @abstractmethod
    def _log(self, values: Mapping[str, float], event: Event) -> None: ...

    @abstractmethod
    def _end(self, *, failed: bool) -> None: ...


class WandbWatcher(TrackingWatcher):
    """Events as a run of Weights & Biases, over training steps.

    Args:
        project: its name there; None for wandb's default.
        **settings: further arguments of `wandb.init`, such as entity, group, tags or mode="offline".
    """

    package = "wandb"

    def __init__(self, project: str | None = None, **settings: Any) -> None:
        super().__init__()
        self._settings = {"project": project, **settings}

    def _begin(self, service: Any, name: str, settings: Mapping[str, object]) -> None:
        self._run = service.init(**{"name": name, "config": dict(settings), **self._settings})

    def _log(self, values: Mapping[str, float], event: Event) -> None:
        self._run.log({**values, "samples": event.samples}, step=event.step)

    def _end(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MlflowWatcher(TrackingWatcher):
    """Events as a run of MLflow, over training steps.

    Args:
        experiment: its name there; None for MLflow's default.
        tracking_uri: address of the server or a folder; None for MLflow's default.
    """

    package = "mlflow"

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        super().__init__()
        self._experiment = experiment
        self._uri = tracking_uri

    def _begin(self, service: Any, name: str, settings: Mapping[str, object]) -> None:
        if self._uri is not None:
            service.set_tracking_uri(self._uri)
        if self._experiment is not None:
            service.set_experiment(self._experiment)
        self._service = service
        service.start_run(run_name=name)
        # A server takes at most 100 parameters a call, of at most 500 characters each.
        items = [(key, str(value)[:500]) for key, value in settings.items()]
        for first in range(0, len(items), 100):
            service.log_params(dict(items[first : first + 100]))

    def _log(self, values: Mapping[str, float], event: Event) -> None:
        # MLflow's names cannot have the @ of recall@10.
        named = {name.replace("@", "_at_"): value for name, value in values.items()}
        self._service.log_metrics({**named, "samples": float(event.samples)}, step=event.step)

    def _end(self, *, failed: bool) -> None:
        self._service.end_run(status="FAILED" if failed else "FINISHED")
