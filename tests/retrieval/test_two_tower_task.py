"""In-batch softmax against a naive loop; several ranks equal one process; samples that are no positives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from torch import Tensor, nn

from tests.retrieval.retrieval_data import retrieval_run, write_log
from tilerec.comms.process import ProcessGroupComms
from tilerec.data.batch import Batch
from tilerec.data.columns import Columns, IdColumn, LabelColumn, TableRows
from tilerec.data.share import Share, cut
from tilerec.errors import ConfigError, InputError
from tilerec.recipes.files import FilesData
from tilerec.recipes.retrieval_model import TwoTowerConfig
from tilerec.retrieval.two_tower_task import RetrievalConfig, RetrievalTask
from tilerec.spec.optimizer import SGD, Adam
from tilerec.testing import run_ranks
from tilerec.train.config import RunConfig, TrainConfig
from tilerec.train.loop import train
from tilerec.train.override import override_all
from tilerec.train.saved_model import load_model
from tilerec.train.world import World

CPU = torch.device("cpu")


class _Vectors(nn.Module):
    """Query and item vectors as parameters, by the sample's number (its first dense feature)."""

    def __init__(self, samples: int, dim: int = 3) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.query = nn.Parameter(torch.randn(samples, dim, generator=draw))
        self.item = nn.Parameter(torch.randn(samples, dim, generator=draw))

    def forward(self, dense_features: Tensor, sparse_features: Any) -> tuple[Tensor, Tensor]:
        number = dense_features[:, 0].long()
        return self.query[number], self.item[number]


def _task(run: RunConfig, world: World) -> tuple[RetrievalTask, Batch]:
    """Return the task of a run and a batch of 16 samples with labels, weights and numbers."""
    dataset = run.data.open()
    task = run.task.build(dataset, run.train, CPU, world)
    assert isinstance(task, RetrievalTask)
    batch = next(dataset.train(16))
    draw = torch.Generator().manual_seed(1)
    labels = (torch.rand(16, generator=draw) < 0.7).float()
    return task, replace(
        batch, dense_features=torch.arange(16.0)[:, None], labels=labels, weights=torch.rand(16, generator=draw)
    )


def _naive(run: RunConfig, task: RetrievalTask, batch: Batch, model: _Vectors) -> Tensor:
    items = batch.sparse_features["item"].values().tolist()
    counts = dict(zip(task.catalog.ids.tolist(), task.catalog.counts.tolist(), strict=True))
    total_count = sum(counts.values()) + 1  # row 0, of unknown items, counts as one
    temperature = run.task.temperature  # type: ignore[attr-defined]
    correct = run.task.log_q == "counted"  # type: ignore[attr-defined]
    assert batch.weights is not None

    def score(b: int, c: int) -> Tensor:
        value = (model.query[b] * model.item[c]).sum() / temperature
        return value - torch.tensor(counts[items[c]] / total_count).log() if correct else value

    total = torch.zeros(())
    for b in range(16):
        others = [c for c in range(16) if c == b or (items[c] != items[b] and batch.labels[c] > 0)]
        lse = torch.stack([score(b, c) for c in others]).logsumexp(0)
        total = total + batch.weights[b] * batch.labels[b] * (lse - score(b, b))
    return total / 16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.txt")


@pytest.mark.parametrize("log_q", ["counted", "none"])
def test_the_loss_and_its_gradients_are_those_of_a_loop(path: Path, log_q: str) -> None:
    run = retrieval_run(path, log_q=log_q, temperature=0.7)
    task, batch = _task(run, World(None))
    items = batch.sparse_features["item"].values()
    assert items.unique().numel() < 16  # some items occur twice: accidental hits
    ours, theirs = _Vectors(16), _Vectors(16)
    loss = task.loss(ours, Share(batch, 0, 16, 16))
    expected = _naive(run, task, batch, theirs)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


def _loss_of_rank(run: RunConfig, parts: list[int]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    world = World(ProcessGroupComms())
    task, batch = _task(run, world)
    low, high = parts[world.rank], parts[world.rank + 1]
    model = _Vectors(16)
    loss = task.loss(model, Share(cut(batch, low, high), low, 16, 16))
    loss.backward()
    return loss.detach(), model.query.grad, model.item.grad


@pytest.mark.parametrize("log_q", ["counted", "streaming", "none"])
@pytest.mark.parametrize("parts", [[0, 8, 16], [0, 3, 16], [0, 16, 16], [0, 5, 6, 16]])
def test_the_mean_over_ranks_is_the_loss_of_the_global_batch(path: Path, log_q: str, parts: list[int]) -> None:
    """Each rank's queries have the items of all ranks as negatives, whatever the sizes of the shares."""
    run = retrieval_run(path, log_q=log_q)
    task, batch = _task(run, World(None))
    model = _Vectors(16)
    loss = task.loss(model, Share(batch, 0, 16, 16))
    loss.backward()
    ranks = len(parts) - 1
    found = run_ranks(ranks, _loss_of_rank, run, parts)
    torch.testing.assert_close(sum(one[0] for one in found) / ranks, loss.detach(), rtol=1e-5, atol=1e-6)
    for index, parameter in ((1, model.query), (2, model.item)):
        mean = sum(torch.zeros_like(parameter) if one[index] is None else one[index] for one in found) / ranks
        torch.testing.assert_close(mean, parameter.grad, rtol=1e-5, atol=1e-6)


def test_a_batch_without_positives_has_no_loss(path: Path) -> None:
    task, batch = _task(retrieval_run(path), World(None))
    model = _Vectors(16)
    loss = task.loss(model, Share(replace(batch, labels=torch.zeros(16)), 0, 16, 16))
    loss.backward()
    assert loss == 0
    assert model.query.grad is not None
    assert not model.query.grad.any()
    empty = task.loss(model, Share(cut(batch, 0, 0), 0, 0, 0))
    assert empty == 0


def _train_on_ranks(run: RunConfig, folder: str) -> tuple[dict[str, float], int]:
    result = train(replace(run, log_dir=folder), group=ProcessGroupComms())
    return dict(result.held_out.numbers), result.held_out.samples


@pytest.mark.parametrize("sharding", ["row_wise", "planned"])
def test_a_run_on_two_ranks_has_the_scores_of_one(path: Path, tmp_path: Path, sharding: str) -> None:
    run = retrieval_run(path, train={"epochs": 2})
    single = train(replace(run, log_dir=str(tmp_path / "one")))
    assert single.held_out.samples == 40
    sharded = override_all(run, [f"parallel.sharding={sharding}"])
    for numbers, samples in run_ranks(2, _train_on_ranks, sharded, str(tmp_path / "two")):
        assert samples == single.held_out.samples
        assert numbers == pytest.approx(single.held_out.numbers, abs=1e-6)
    weights = []
    for name in ("one", "two"):
        model = run.model.build(run.data.open(), CPU)
        load_model(tmp_path / name / "model.safetensors", model)
        weights.append(model.state_dict())
    for name, ours in weights[0].items():
        torch.testing.assert_close(ours, weights[1][name], rtol=1e-4, atol=1e-5, msg=name)


def _write_clicks(path: Path) -> RunConfig:
    """Write clicks and impressions in row groups of 30 rows; return a run over two lanes of them."""
    draw = np.random.default_rng(0)
    columns = {"user": draw.integers(0, 9, 100), "item": draw.integers(0, 12, 100), "click": draw.integers(0, 2, 100)}
    parquet.write_table(pa.table(columns), path, row_group_size=30)
    roles = Columns(
        labels=(LabelColumn("click"),),
        ids=(IdColumn("user"), IdColumn("item")),
        tables=(TableRows("user", 50), TableRows("item", 50)),
    )
    return RunConfig(
        "clicks",
        FilesData((str(path),), roles, lanes=2, shuffle_rows=30),
        TwoTowerConfig(embedding_dim=4, layers=()),
        TrainConfig(batch_size=13, epochs=2, embedding_optimizer=SGD(0.5)),
        task=RetrievalConfig(),
    )


def test_ranks_that_read_lanes_have_shares_of_other_sizes_and_the_same_scores(tmp_path: Path) -> None:
    run = _write_clicks(tmp_path / "clicks.parquet")
    single = train(run).held_out
    held = [batch.labels.squeeze() for batch in run.data.open().held_out(50)]
    assert single.samples == int(torch.cat(held).sum())  # only clicks are queries
    for numbers, samples in run_ranks(2, _train_on_ranks, override_all(run, ["parallel.sharding=row_wise"]), ""):
        assert samples == single.samples
        assert numbers == pytest.approx(single.numbers, abs=1e-6)


def test_training_learns_the_pattern(path: Path) -> None:
    options = {"epochs": 30, "dense_optimizer": Adam(0.01), "embedding_optimizer": Adam(0.01)}
    before = train(retrieval_run(path, train={"max_steps": 1})).held_out.numbers
    after = train(retrieval_run(path, train=options)).held_out.numbers
    assert after["ndcg@3"] > before["ndcg@3"] + 0.2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"item": "movie"}, r"task.item: got 'movie'; expected a feature of the data: user, item, history, seen"),
        ({"item_features": ("user",)}, r"got items with features \['item', 'user'\].*data.kind = 'files'"),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(replace(retrieval_run(path), task=replace(retrieval_run(path).task, **settings)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, "task.temperature: got 0.0"),
        ({"log_q": "exact"}, "task.log_q: got 'exact'"),
        ({"log_q_rate": 0.0}, "task.log_q_rate: got 0.0"),
        ({"top_k": 0}, "task.top_k: got 0"),
    ],
)
def test_settings_out_of_range_are_refused(path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        retrieval_run(path, **settings)


def test_a_training_sample_needs_one_item(path: Path) -> None:
    run = retrieval_run(path)
    dataset = run.data.open()
    task = run.task.build(dataset, run.train, CPU, World(None))
    with pytest.raises(InputError, match=r"feature 'item': got 1 to 2 ids per sample; expected one item"):
        task.check(next(dataset.held_out(40)))
