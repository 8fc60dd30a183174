"""Loggers of tracking services, with fake packages: order of calls, failures, and runs that fail."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tilerec.errors import ConfigError, TilerecError
from tilerec.recipes.data import SyntheticData
from tilerec.recipes.model import DLRMConfig
from tilerec.spec.optimizer import SGD
from tilerec.train.config import RunConfig, TrainConfig
from tilerec.train.loop import train
from tilerec.train.run_logger import Event, Watcher
from tilerec.train.tracking import MlflowWatcher, TrackingWatcher, WandbWatcher


def _config(**options: Any) -> RunConfig:
    return RunConfig(
        name="small",
        data=SyntheticData(num_rows=(40, 20), num_dense=3, train_rows=256, held_out_rows=60),
        model=DLRMConfig(embedding_dim=4, dense_arch=(8,), over_arch=(8,)),
        train=TrainConfig(batch_size=64, log_every=2, **options),
    )


class FakeWandb:
    """Records calls; `fail` is the name of a call that raises."""

    def __init__(self, fail: str = "") -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fail = fail

    def _called(self, name: str, value: Any) -> None:
        if name == self.fail:
            raise RuntimeError("network is down")
        self.calls.append((name, value))

    def init(self, **settings: Any) -> FakeWandb:
        self._called("init", settings)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self._called("log", (step, values))

    def finish(self, exit_code: int) -> None:
        self._called("finish", exit_code)


def _fake_mlflow(calls: list[tuple[str, Any]]) -> SimpleNamespace:
    def record(name: str) -> Any:
        return lambda *args, **named: calls.append((name, (*args, *named.values())))

    names = ("set_tracking_uri", "set_experiment", "start_run", "log_params", "log_metrics", "end_run")
    return SimpleNamespace(**{name: record(name) for name in names})


def test_a_run_is_sent_to_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train(_config(), watchers=[WandbWatcher("ctr", mode="offline")])
    (first, settings), *logs, (last, code) = wandb.calls
    assert (first, last, code) == ("init", "finish", 0)
    assert (settings["project"], settings["name"], settings["mode"]) == ("ctr", "small", "offline")
    assert settings["config"]["train.batch_size"] == 64
    assert [(name, step) for name, (step, _) in logs] == [("log", 2), ("log", 4), ("log", 4)]
    assert {"train/loss", "train/auc", "train/samples_per_second", "samples"} <= set(logs[0][1][1])
    assert "eval/auc" in logs[-1][1][1]


def test_a_run_is_sent_to_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    monkeypatch.setitem(sys.modules, "mlflow", _fake_mlflow(calls))
    train(_config(), watchers=[MlflowWatcher("ctr", "folder")])
    assert calls[:3] == [
        ("set_tracking_uri", ("folder",)),
        ("set_experiment", ("ctr",)),
        ("start_run", ("small",)),
    ]
    params = {key: value for name, (part, *_) in calls if name == "log_params" for key, value in part.items()}
    assert params["train.batch_size"] == "64"
    metrics = [(step, set(values)) for name, (values, *rest) in calls if name == "log_metrics" for step in rest]
    assert [step for step, _ in metrics] == [2, 4, 4]
    assert {"train/loss", "samples"} <= metrics[0][1]
    assert calls[-1] == ("end_run", ("FINISHED",))


def test_a_run_that_fails_is_marked_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, calls = FakeWandb(), []
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", _fake_mlflow(calls))
    with pytest.raises(TilerecError):
        train(_config(dense_optimizer=SGD(lr=1e30), epochs=4), watchers=[WandbWatcher(), MlflowWatcher()])
    assert wandb.calls[-1] == ("finish", 1)
    assert calls[-1] == ("end_run", ("FAILED",))


@pytest.mark.parametrize("fail", ["init", "log", "finish"])
def test_a_service_that_fails_does_not_stop_the_run(fail: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb(fail)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    watcher = WandbWatcher()
    with pytest.warns(UserWarning, match="network is down.*The run continues without this log"):
        result = train(_config(), watchers=[watcher])
    assert result.steps == 4
    assert "RuntimeError" in watcher.error


class FailingLog(Watcher):
    """A logger of three methods, one of which raises."""

    def __init__(self, fail: str, error: Exception) -> None:
        self.calls: list[str] = []
        self._fail, self._error = fail, error

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self._fail:
            raise self._error

    def begin(self, name: str, settings: Any) -> None:
        self._called("begin")

    def record(self, event: Event) -> None:
        self._called("record")

    def close(self) -> None:
        self._called("close")


@pytest.mark.parametrize(
    ("fail", "calls"),
    [
        ("begin", ["begin", "close"]),
        ("record", ["begin", "record", "close"]),
        ("close", ["begin", *["record"] * 3, "close"]),
    ],
)
def test_a_logger_that_fails_stops_neither_the_run_nor_other_loggers(fail: str, calls: list[str]) -> None:
    failing, other = FailingLog(fail, KeyError("quota")), FailingLog("", KeyError())
    with pytest.warns(UserWarning, match=r"FailingLog: got KeyError ''quota''. The run continues without this log"):
        result = train(_config(), watchers=[failing, other])
    assert result.steps == 4
    assert failing.calls == calls
    assert other.calls == ["begin", "record", "record", "record", "close"]


def test_a_wrong_setting_of_a_logger_ends_the_run() -> None:
    with pytest.raises(ConfigError, match="no such project"):
        train(_config(), watchers=[FailingLog("begin", ConfigError("no such project"))])


@pytest.mark.parametrize("watcher", [WandbWatcher(), MlflowWatcher()])
def test_a_missing_package_is_named(watcher: TrackingWatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, watcher.package, None)
    with pytest.raises(ConfigError, match=rf"Run pip install {watcher.package}"):
        train(_config(), watchers=[watcher])


def test_events_without_a_beginning_are_ignored() -> None:
    watcher = WandbWatcher()
    watcher.record(Event("train", 1, 1, {"loss": 1.0}))
    watcher.close()
