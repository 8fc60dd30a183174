"""Kinds of tasks in run files: the default, round trips, mistakes, and a task of the user's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from tilerec.data.batch import Batch
from tilerec.data.dataset import Dataset, RowDataset
from tilerec.data.share import Share
from tilerec.errors import ConfigError
from tilerec.recipes.registry import make_run
from tilerec.train.config import ClickConfig, TaskConfig, TrainConfig
from tilerec.train.loop import train
from tilerec.train.override import override_all
from tilerec.train.run_file import run_of_toml, toml_of_run
from tilerec.train.run_logger import Event, Watcher
from tilerec.train.scores import HeldOutScores
from tilerec.train.task import Evaluation, Task
from tilerec.train.world import World


@dataclass(frozen=True)
class Errors(HeldOutScores):
    samples: int
    mse: float = 0.0

    @property
    def numbers(self) -> dict[str, float]:
        return {"mse": self.mse}

    def with_numbers(self, numbers: dict[str, float]) -> Errors:
        return Errors(self.samples, **numbers)


@dataclass(frozen=True)
class SquareConfig(TaskConfig):
    """Squared error of the model's output."""

    scale: float = 1.0

    def build(self, dataset: Dataset, options: TrainConfig, device: torch.device, world: World) -> Task:
        return SquareTask(self.scale)


class SquareTask(Task):
    def __init__(self, scale: float) -> None:
        self._scale = scale

    def loss(self, model: nn.Module, share: Share) -> Tensor:
        batch = share.batch
        output = model(batch.dense_features, batch.sparse_features).reshape(-1)
        return self._scale * (output - batch.labels).square().sum() / share.total

    def progress(self) -> dict[str, float]:
        return {"scale": self._scale}

    @torch.no_grad()
    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Evaluation:
        found = [(model(one.dense_features, one.sparse_features).reshape(-1) - one.labels).square() for one in batches]
        return Evaluation({"square": Errors(sum(map(len, found)), torch.cat(found).mean().item())})

    def prediction_columns(self) -> Sequence[str]:
        return ["value"]

    def predict(
        self, model: nn.Module, dataset: RowDataset, keys: Sequence[str], batch_size: int
    ) -> Iterator[tuple[int, pa.Table]]:
        yield from ()


SMALL = ["data.train_rows=600", "data.held_out_rows=50", "train.batch_size=64", "train.log_every=4"]


def test_clicks_are_the_default() -> None:
    run = make_run("synthetic")
    assert run.task == ClickConfig()
    assert '[task]\nkind = "click"' in toml_of_run(run)


@pytest.mark.parametrize("name", ["two_tower", "sasrec"])
def test_runs_of_every_kind_survive_a_run_file(name: str) -> None:
    run = make_run(name, "data.csv")
    assert run_of_toml(toml_of_run(run)) == run


def test_mistakes_name_the_nearest_kind_and_setting() -> None:
    text = toml_of_run(make_run("two_tower", "data.csv"))
    with pytest.raises(ConfigError, match=r"task.kind: got 'retreival'; .*Did you mean 'retrieval'"):
        run_of_toml(text.replace('kind = "retrieval"', 'kind = "retreival"'))
    with pytest.raises(ConfigError, match=r"task.temprature.*Did you mean 'task.temperature'"):
        run_of_toml(text.replace("temperature =", "temprature ="))
    with pytest.raises(ConfigError, match=r"task.temperature: got -1.0; expected a number above 0"):
        run_of_toml(text.replace("temperature = 0.15", "temperature = -1.0"))


class _Events(Watcher):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def test_a_task_of_ones_own_trains_and_reports_its_scores_by_name(tmp_path: Path) -> None:
    text = toml_of_run(override_all(make_run("synthetic"), SMALL))
    own = f'kind = "{SquareConfig.__module__}:SquareConfig"\nscale = 2.0'
    run = run_of_toml(text.replace('[task]\nkind = "click"\nweights = []', f"[task]\n{own}"))
    watcher = _Events()
    result = train(run, watchers=[watcher])
    assert isinstance(result.held_out, Errors)
    assert result.held_out.samples == 50
    assert (result.best, list(result.tasks)) == (None, ["square"])
    kinds = {event.kind: event.values for event in watcher.events}
    assert kinds["train"]["scale"] == 2.0
    assert kinds["eval"] == {"mse": result.held_out.mse}
