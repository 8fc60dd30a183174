"""The train loop: schedule, loss scale, ranks, launching, logs, and the report of a run."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

from tilerec.comms.process import ProcessGroupComms
from tilerec.data.batch import Batch
from tilerec.data.dataset import Dataset, SparseFeature
from tilerec.data.delimited import RowCount
from tilerec.data.share import Share
from tilerec.data.synthetic import SyntheticClicks
from tilerec.errors import ConfigError, InputError, TilerecError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.parallel.check_replicas import check_replicas
from tilerec.parallel.full_state import full_state_dict
from tilerec.recipes.data import SyntheticData
from tilerec.recipes.model import DLRMConfig
from tilerec.sharding.table import ShardedTable
from tilerec.spec.optimizer import SGD, Adagrad, Adam, AdamW, RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing import Ranks
from tilerec.train import training_run as run_module
from tilerec.train.config import DataConfig, ParallelConfig, RunConfig, TrainConfig
from tilerec.train.evaluate import Scores, evaluate, predict
from tilerec.train.launch import RankFailed, _local_store, cores, launch
from tilerec.train.loop import train
from tilerec.train.loss import click_loss
from tilerec.train.optimizers import Optimizers, torch_optimizer
from tilerec.train.override import override
from tilerec.train.report import report
from tilerec.train.run_logger import Event, Terminal, Watcher, finite

CPU = torch.device("cpu")


def _run(**train_options: object) -> RunConfig:
    options: dict[str, object] = {"batch_size": 64, "eval_batch_size": 50, "log_every": 2}
    return RunConfig(
        name="small",
        data=SyntheticData(num_rows=(40, 20), num_dense=3, train_rows=512, held_out_rows=120),
        model=DLRMConfig(embedding_dim=4, dense_arch=(8,), over_arch=(8,)),
        train=TrainConfig(**{**options, **train_options}),  # type: ignore[arg-type]
    )


class Ear(Watcher):
    """Remembers what it hears."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def record(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


class Turned:
    """A clock that calls turn."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def turning(self, call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """The same call, which takes so long."""

        def turned(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return call(*args, **kwargs)

        return turned


# Loss ---------------------------------------------------------------------------------------------------------


def test_loss_is_the_mean_over_the_batch() -> None:
    logits, labels = torch.randn(7, 1), torch.rand(7).round()
    p = logits.double().squeeze(1).sigmoid()
    mean = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean()
    assert click_loss(logits, labels).item() == pytest.approx(mean.item(), rel=1e-6)


@pytest.mark.parametrize("cuts", [(5, 2), (7, 0), (3, 4)])
def test_averaged_rank_gradients_equal_those_of_the_global_mean(cuts: tuple[int, int]) -> None:
    """As the design's gradient scale has it: sum over ranks, divided by the number of ranks."""
    inputs, labels = torch.randn(7, 3), torch.rand(7).round()
    weight = torch.randn(3, requires_grad=True)
    click_loss(inputs @ weight, labels).backward()
    whole = weight.grad
    parts = []
    for x, y in zip(inputs.split(list(cuts)), labels.split(list(cuts)), strict=True):
        rank = weight.detach().clone().requires_grad_()
        click_loss(x @ rank, y, global_batch=7, world_size=2).backward()
        parts.append(rank.grad)
    torch.testing.assert_close((parts[0] + parts[1]) / 2, whole)  # type: ignore[operator]


def test_a_batch_without_samples_contributes_zero_not_nan() -> None:
    logits = torch.zeros(0, 1, requires_grad=True)
    loss = click_loss(logits, torch.zeros(0))
    loss.backward()
    assert loss.item() == 0.0


# Schedule and optimizers --------------------------------------------------------------------------------------


def test_learning_rates_warm_up_and_then_decay() -> None:
    config = TrainConfig(warmup_steps=4, decay_steps=10, decay_to=0.2)
    factors = [config.lr_factor(step) for step in (0, 1, 3, 4, 9, 14, 1000)]
    assert factors == pytest.approx([0.25, 0.5, 1.0, 1.0, 0.6, 0.2, 0.2])
    assert [TrainConfig().lr_factor(step) for step in (0, 10**6)] == [1.0, 1.0]


class TwoTables(nn.Module):
    """A sum over two pooled tables and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(10, 2, name, feature_names=[name]) for name in ("feature_0", "feature_1")]
        self.ebc = EmbeddingBagCollection(tables)
        self.dense = nn.Linear(3, 1)

    def forward(self, dense: torch.Tensor, sparse: object) -> torch.Tensor:
        out: torch.Tensor = self.dense(dense).squeeze(1) + self.ebc(sparse).values().sum(1)
        return out


def test_tables_update_in_the_backward_pass_and_the_rest_in_step_at_the_scheduled_rate() -> None:
    model = TwoTables()
    config = TrainConfig(embedding_optimizer=SGD(lr=1.0), dense_optimizer=SGD(lr=2.0), warmup_steps=4)
    optimizers = Optimizers(model, config)
    batch = SyntheticData(num_rows=(10, 10), num_dense=3).open().batch(0, 16)
    table = model.ebc.embedding_bags["feature_0"].weight
    for step, factor in enumerate((0.25, 0.5, 0.75, 1.0, 1.0)):
        rows, dense = table.detach().clone(), model.dense.weight.detach().clone()
        optimizers.prepare(step)
        logits = model(batch.dense_features, batch.sparse_features)
        error = logits.detach().sigmoid() - batch.labels
        click_loss(logits, batch.labels).backward()
        assert table.grad is None
        ids = batch.sparse_features["feature_0"].values()
        gradient = torch.zeros(10).index_add_(0, ids, error / 16)
        torch.testing.assert_close(table.detach(), rows - factor * gradient[:, None])
        assert torch.equal(model.dense.weight, dense)
        optimizers.step()
        expected = dense - 2 * factor * (error[None, :] @ batch.dense_features) / 16
        torch.testing.assert_close(model.dense.weight.detach(), expected)


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (SGD(lr=0.5, momentum=0.9, nesterov=True), torch.optim.SGD),
        (Adagrad(lr=0.5, eps=1e-3, initial_accumulator_value=0.1), torch.optim.Adagrad),
        (Adam(lr=0.5, betas=(0.8, 0.9)), torch.optim.Adam),
        (AdamW(lr=0.5, weight_decay=0.3), torch.optim.AdamW),
    ],
)
def test_dense_optimizer_takes_every_number_of_its_spec(spec: object, kind: type) -> None:
    optimizer = torch_optimizer(spec, [nn.Parameter(torch.zeros(2))])  # type: ignore[arg-type]
    assert type(optimizer) is kind
    group = optimizer.param_groups[0]
    for name in ("lr", "momentum", "nesterov", "eps", "betas", "weight_decay", "initial_accumulator_value"):
        if hasattr(spec, name):
            assert group[name] == getattr(spec, name)


@pytest.mark.parametrize("spec", [RowWiseAdagrad(lr=0.1), Adam(lr=0.1, row_step=True), SGD(lr=0.1, grad_scale=2.0)])
def test_a_rule_that_torch_has_not_is_refused_for_dense_parameters(spec: object) -> None:
    with pytest.raises(ConfigError, match="Dense optimizer"):
        torch_optimizer(spec, [nn.Parameter(torch.zeros(2))])  # type: ignore[arg-type]


# Evaluation ---------------------------------------------------------------------------------------------------


def test_evaluation_scores_all_batches_together_and_restores_the_mode() -> None:
    data = _run().data.open()
    model = _run().model.build(data, CPU).train()
    predictions, labels, _ = predict(model, data.held_out(50), CPU)
    whole, labels_again, _ = predict(model, data.held_out(120), CPU)
    assert labels.shape == (120,)
    assert torch.equal(labels, labels_again)
    torch.testing.assert_close(predictions, whole, rtol=1e-5, atol=1e-7)
    assert evaluate(model, data.held_out(50), CPU) == Scores.of(predictions, labels)
    assert model.training
    assert not predictions.requires_grad


# The run ------------------------------------------------------------------------------------------------------


def test_a_run_learns_and_reports_what_it_did() -> None:
    ear = Ear()
    run = dataclasses.replace(
        _run(epochs=3, embedding_optimizer=Adagrad(lr=0.1), dense_optimizer=Adam(lr=0.01)),
        data=SyntheticData(num_rows=(20, 10), num_dense=3, train_rows=8192, held_out_rows=2048, pair_scale=0.0),
        model=DLRMConfig(embedding_dim=8, dense_arch=(32,), over_arch=(32,)),  # wide enough not to die at the start
    )
    run = override(run, "train.batch_size=128")
    result = train(run, watchers=[ear])
    assert (result.steps, result.samples) == (192, 3 * 8192)
    assert result.samples_per_second == pytest.approx(result.samples / result.seconds)
    assert result.held_out.samples == 2048
    assert result.best is not None
    assert result.best.auc - 0.03 < result.held_out.auc < result.best.auc + 0.01
    assert result.best_expected_auc == pytest.approx(result.best.auc, abs=0.04)
    trains = [event for event in ear.events if event.kind == "train"]
    assert [event.step for event in trains] == list(range(2, 193, 2))
    assert trains[-1].samples == result.samples
    assert trains[0].values["loss"] > trains[-1].values["loss"]
    assert [event.step for event in ear.events if event.kind == "eval"] == [192]
    assert ear.closed == 1


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    one, same, other = (train(_run(seed=seed)).held_out for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_logged_losses_cover_every_step_once() -> None:
    """Means over log intervals, weighted by their steps, are the mean over all steps, however long the intervals."""
    means = []
    for log_every in (1, 3, 100):
        ear = Ear()
        train(_run(log_every=log_every), watchers=[ear])
        last, total = 0, 0.0
        for event in ear.events:
            if event.kind == "train":
                total += event.values["loss"] * (event.step - last)
                last = event.step
        assert last == 8
        means.append(total / last)
    assert means == pytest.approx([means[0]] * 3, rel=1e-6)


@pytest.mark.parametrize(("max_steps", "evaluations"), [(0, [3, 6, 8]), (5, [3, 5]), (6, [3, 6])])
def test_steps_and_evaluations_end_where_they_are_told(max_steps: int, evaluations: list[int]) -> None:
    ear = Ear()
    result = train(_run(max_steps=max_steps, eval_every=3), watchers=[ear])
    assert result.steps == (max_steps or 8)
    assert [event.step for event in ear.events if event.kind == "eval"] == evaluations


@pytest.mark.parametrize("log_every", [2, 3, 100])
def test_seconds_of_a_run_are_those_of_its_steps_without_the_evaluations(
    log_every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that a step turns by 1 s and an evaluation by 100 s; 8 steps of 64 samples."""
    clock = Turned()
    monkeypatch.setattr(run_module, "time", clock)
    monkeypatch.setattr(run_module.Run, "_forward", clock.turning(run_module.Run._forward, 1.0))
    monkeypatch.setattr(run_module.World, "predict", clock.turning(run_module.World.predict, 100.0))
    ear = Ear()
    result = train(_run(eval_every=3, log_every=log_every), watchers=[ear])
    assert (result.seconds, result.samples_per_second) == (8.0, 64.0)
    rates = [event.values["samples_per_second"] for event in ear.events if event.kind == "train"]
    assert rates == [64.0] * len(rates)


def test_evaluating_in_between_does_not_change_the_training() -> None:
    assert train(_run(eval_every=2)).held_out == train(_run()).held_out


def test_logs_are_complete_and_say_the_same(tmp_path: Path) -> None:
    ear = Ear()
    folder = tmp_path / "runs" / "one"
    run = dataclasses.replace(_run(eval_every=4), log_dir=str(folder))
    result = train(run, watchers=[ear])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["step"]) for line in lines] == [(event.kind, event.step) for event in ear.events]
    assert lines[-1]["auc"] == result.held_out.auc
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["held_out"]["auc"] == result.held_out.auc
    assert summary["best"]["log_loss"] == result.best.log_loss  # type: ignore[union-attr]
    config = json.loads((folder / "config.json").read_text())
    assert config["train.batch_size"] == 64
    assert config["train.embedding_optimizer"] == "Adagrad"
    scalars = _scalars(folder)
    assert scalars["eval/auc"][-1] == pytest.approx(result.held_out.auc)
    assert len(scalars["train/loss"]) == 4
    with pytest.raises(ConfigError, match="contains another run's logs"):
        train(run)
    assert not list(folder.glob("*.part"))


def test_a_log_folder_that_disappears_ends_the_run_with_errors_and_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, failed = tmp_path / "logs", list[object]()
    monkeypatch.setattr(threading, "excepthook", failed.append)

    class Remover(Ear):
        def record(self, event: Event) -> None:
            shutil.rmtree(folder, ignore_errors=True)

    with pytest.warns(UserWarning, match="cannot be written"):
        result = train(dataclasses.replace(_run(), log_dir=str(folder)), watchers=[Remover()])
    assert result.log_errors
    assert not failed


def _scalars(folder: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [item.value for item in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_loss_that_is_not_finite_stops_the_run_with_advice_and_closes_the_logs() -> None:
    ear = Ear()
    run = _run(dense_optimizer=SGD(lr=1e30), epochs=4)
    with pytest.raises(TilerecError, match=r"Lower train\.embedding_optimizer\.lr|not finite"):
        train(run, watchers=[ear])
    assert ear.closed == 1


class NoSamples(Dataset):
    """Nothing to learn from."""

    @property
    def sparse_features(self) -> tuple[SparseFeature, ...]:
        return (SparseFeature("a", 3),)

    @property
    def dense_features(self) -> tuple[str, ...]:
        return ("x",)

    def train(self, batch_size: int, epoch: int = 0) -> Iterator[Batch]:
        return iter(())

    def held_out(self, batch_size: int) -> Iterator[Batch]:
        return iter(())

    def best_predictions(self) -> torch.Tensor | None:
        return None

    def row_count(self) -> RowCount:
        return RowCount()


@dataclasses.dataclass(frozen=True)
class NoData(DataConfig):
    def open(self) -> Dataset:
        return NoSamples()


def test_a_training_part_without_samples_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no samples"):
        train(dataclasses.replace(_run(), data=NoData()))


def test_a_device_that_is_not_there_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    run = dataclasses.replace(_run(device="cuda:63"), log_dir=str(tmp_path / "log"))
    with pytest.raises(ConfigError, match="'cuda:63'"):
        train(run)
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, r"train\.batch_size: got 0"),
        ({"warmup_steps": -1}, r"train\.warmup_steps: got -1"),
        ({"check_replicas_every": -1}, r"train\.check_replicas_every: got -1"),
        ({"decay_to": 1.5}, r"train\.decay_to: got 1\.5"),
        ({"device": "gpu"}, r"train\.device: got 'gpu'"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**options)  # type: ignore[arg-type]


# Ranks --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Heard:
    """What a rank tells of its run."""

    events: list[Event]
    steps: int
    samples: int
    held_out: Scores
    best: Scores | None
    weights: dict[str, torch.Tensor]
    tiles: int


def _heard(config: RunConfig, group: ProcessGroupComms | None) -> Heard:
    ear = Ear()
    result = train(config, watchers=[ear], group=group)
    state = result.model.state_dict() if group is None else full_state_dict(result.model)
    held = sum(p.numel() for name, p in result.model.named_parameters() if "_table" in name)
    weights = {name: value.detach().clone() for name, value in state.items()}
    return Heard(ear.events, result.steps, result.samples, result.held_out, result.best, weights, held)


def _train_on_rank(config: RunConfig) -> Heard:
    return _heard(config, ProcessGroupComms())


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def _uneven(**parallel: Any) -> RunConfig:
    """Batches of 61 and a last one of 36 samples, or of 1: shares are never equal, and the last may be empty."""
    run = _run(
        batch_size=61,
        eval_every=4,
        warmup_steps=3,
        epochs=2,
        embedding_optimizer=RowWiseAdagrad(lr=0.1),
        dense_optimizer=Adam(lr=0.01),
    )
    return dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, train_rows=306, held_out_rows=1000),  # type: ignore[type-var]
        # Wide enough not to die at the start: rounding splits the ties of a dead model and moves its AUC.
        model=DLRMConfig(embedding_dim=4, dense_arch=(32,), over_arch=(32,)),
        parallel=ParallelConfig(**parallel),
    )


@pytest.fixture(scope="module")
def alone() -> Heard:
    torch.manual_seed(0)
    return _heard(_uneven(), None)


# Dead units make ties among predictions, which the last digits break either way.
_FAR = {"auc": 2e-4, "log_loss": 1e-5, "ne": 1e-5, "calibration": 1e-5}


_OF_TIME_AND_TABLES = {"samples_per_second", "imbalance", "wire_bytes_per_step", "max_wire_bytes_per_step"}


def _assert_same_run(ranks: list[Heard], alone: Heard) -> None:
    for heard in ranks:
        assert (heard.steps, heard.samples) == (alone.steps, alone.samples)
        assert heard.best == alone.best
        assert set(heard.weights) == set(alone.weights)
        for name, value in alone.weights.items():
            torch.testing.assert_close(heard.weights[name], value, rtol=1e-4, atol=1e-5)
        assert heard.held_out.samples == alone.held_out.samples
        for name in ("auc", "log_loss", "ne", "calibration"):
            assert getattr(heard.held_out, name) == pytest.approx(getattr(alone.held_out, name), abs=_FAR[name])
        assert [(e.kind, e.step, e.samples) for e in heard.events] == [
            (e.kind, e.step, e.samples) for e in alone.events
        ]
        for own, other in zip(heard.events, alone.events, strict=True):
            # Use of tables and times: see tests/train/test_table_stats.py.
            logged = {name for name in other.values if "/" not in name} - _OF_TIME_AND_TABLES
            assert logged <= {name for name in own.values if "/" not in name} <= logged | _OF_TIME_AND_TABLES
            for name in logged:
                expected = pytest.approx(other.values[name], abs=_FAR.get(name, 1e-5), nan_ok=True)
                assert own.values[name] == expected, (name, own.step)


@pytest.mark.parametrize("sharding", ["planned", "row_wise", "table_wise", "column_wise", "data_parallel"])
def test_two_ranks_learn_and_report_what_one_process_does(sharding: str, two_ranks: Ranks, alone: Heard) -> None:
    ranks = two_ranks.run(_train_on_rank, _uneven(sharding=sharding))
    _assert_same_run(ranks, alone)
    held = [heard.tiles for heard in ranks]
    assert held == [240, 240] if sharding == "data_parallel" else sum(held) == 240
    if sharding != "data_parallel":
        assert max(held) < 240, "each rank holds a part of the tables"


def test_exact_runs_hold_the_same_bits_under_every_plan(two_ranks: Ranks) -> None:
    """But for the dense part: its sums over a batch are cut by rank, whatever the plan."""
    runs = [two_ranks.run(_train_on_rank, _uneven(sharding=kind, exact=True))[0] for kind in ("row_wise", "table_wise")]
    for name, value in runs[0].weights.items():
        assert torch.equal(value, runs[1].weights[name]), name


def test_more_ranks_than_samples_train_too(two_ranks: Ranks) -> None:
    """Rank 0 never has any."""
    run = dataclasses.replace(_uneven(sharding="row_wise"), train=TrainConfig(batch_size=1, max_steps=5))
    single = _heard(dataclasses.replace(run, parallel=ParallelConfig()), None)
    _assert_same_run(two_ranks.run(_train_on_rank, run), single)


def test_rank_0_alone_writes_the_logs_and_its_plan_can_be_given_again(
    two_ranks: Ranks, tmp_path: Path, alone: Heard
) -> None:
    folder = tmp_path / "log"
    run = dataclasses.replace(_uneven(sharding="column_wise"), log_dir=str(folder))
    two_ranks.run(_train_on_rank, run)
    assert json.loads((folder / "summary.json").read_text())["ranks"] == 2
    kinds = [json.loads(line)["kind"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert kinds == [event.kind for event in alone.events]
    plan = folder / "plan.json"
    assert "column_wise" in plan.read_text()
    _assert_same_run(two_ranks.run(_train_on_rank, _uneven(plan=str(plan))), alone)
    with (
        pytest.raises(ConfigError, match="got a plan for 2 ranks; expected one for the 3 ranks"),
        Ranks(3) as ranks,
    ):
        ranks.run(_train_on_rank, _uneven(plan=str(plan)))


def _train_with_rate_of_rank() -> None:
    group = ProcessGroupComms()
    train(_run(embedding_optimizer=SGD(lr=0.1 + group.rank)), group=group)


def test_ranks_with_different_settings_are_told_which() -> None:
    message = r"train\.embedding_optimizer\.lr'\] is 0.1 on rank 0 and 1.1 on rank 1"
    with pytest.raises(ConfigError, match=message), Ranks(2) as ranks:
        ranks.run(_train_with_rate_of_rank)


def _train_while_rank_1_writes_a_copy() -> tuple[list[int], str]:
    """The steps after which copies were compared, and the error that ended the run."""
    group = ProcessGroupComms()
    compared: list[int] = []
    ear = Ear()

    def compare_then_drift(model: nn.Module) -> None:
        compared.append(len(ear.events) + 1)
        check_replicas(model)
        if group.rank == 1:
            table = next(part for part in model.modules() if isinstance(part, ShardedTable))
            with torch.no_grad():
                table.tile_rows[0].leaf.view(-1)[0] += 1.0

    run = dataclasses.replace(
        _run(log_every=1, check_replicas_every=3), parallel=ParallelConfig(sharding="data_parallel")
    )
    with (
        mock.patch.object(run_module, "check_replicas", compare_then_drift),
        pytest.raises(ConfigError) as raised,
    ):
        train(run, watchers=[ear], group=group)
    return compared, str(raised.value)


def test_copies_that_drift_end_the_run_at_the_next_comparison() -> None:
    with Ranks(2) as ranks:  # whose group ends with the run
        for compared, error in ranks.run(_train_while_rank_1_writes_a_copy):
            assert compared == [3, 6]
            assert "weight of the tile at row 0, column 0 differs between rank 0 and rank 1" in error


@dataclasses.dataclass(frozen=True)
class BrokenOnRank1(SyntheticData):
    """Rank 1 finds a malformed line in its third batch."""

    def open(self) -> SyntheticClicks:
        dataset = super().open()
        complete = dataset.train_shares

        def train_shares(*args: Any, rank: int = 0, **kwargs: Any) -> Iterator[Share]:
            for step, share in enumerate(complete(*args, rank=rank, **kwargs)):
                if rank == 1 and step == 2:
                    raise InputError("line 3 is malformed")
                yield share

        dataset.train_shares = train_shares  # type: ignore[method-assign]
        return dataset


def test_a_rank_that_fails_is_heard_by_the_others_and_logs_hold_no_summary(two_ranks: Ranks, tmp_path: Path) -> None:
    run = dataclasses.replace(
        _run(log_every=1),
        data=BrokenOnRank1(num_rows=(40, 20), train_rows=512),
        log_dir=str(tmp_path / "log"),
    )
    first, second = two_ranks.run(_train_on_rank, run, return_exceptions=True)
    assert isinstance(second, InputError)
    assert isinstance(first, InputError)
    assert "Rank 1 refused its batch (its own error gives the reason)" in str(first)
    assert "line 3 is malformed" in str(second)
    lines = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert not (tmp_path / "log" / "summary.json").exists()


def test_a_plan_without_ranks_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="no effect without group="):
        train(dataclasses.replace(_run(max_steps=1), parallel=ParallelConfig(sharding="row_wise")))


# Launching ----------------------------------------------------------------------------------------------------


def _check_place(group: ProcessGroupComms, threads: int) -> None:
    """As torchrun numbers ranks, with the cores shared out."""
    place = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")]
    if place != [str(group.rank), str(group.rank), "2", "2"] or torch.get_num_threads() != threads:
        raise ConfigError(f"{place}, {torch.get_num_threads()} threads")
    assert group.all_gather_object(group.rank) == [0, 1]


def test_launched_ranks_are_numbered_as_torchrun_does_and_share_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launch(2, _check_place, max(1, cores() // 2))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(RankFailed, match=r"^rank (\d) of 2: \['\1', '\1', '2', '2'\], 1 threads$"):
        launch(2, _check_place, 7)


def _busy_while_rank_1_fails(group: ProcessGroupComms) -> None:
    if group.rank == 1:
        raise InputError("line 3 is malformed")
    threading.Event().wait(300)


def test_a_rank_that_does_not_notice_a_failure_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilerec.train.launch.GRACE_S", 0.2)
    with pytest.raises(RankFailed, match=r"^rank 1 of 2: line 3 is malformed$"):
        launch(2, _busy_while_rank_1_fails)


def _exit_quietly(group: ProcessGroupComms) -> None:
    if group.rank == 1:
        os._exit(7)
    group.barrier()


def test_a_rank_that_ends_without_a_word_is_told_before_those_that_missed_it() -> None:
    with pytest.raises(RankFailed, match=r"^rank 1 of 2 ended with exit code 7$"):
        launch(2, _exit_quietly)


def test_a_launch_of_no_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 ranks"):
        launch(0, _exit_quietly)


# Showing ------------------------------------------------------------------------------------------------------


def _printed(thing: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(thing)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_report_stands_the_best_reachable_beside_the_model() -> None:
    result = train(_run())
    text = _printed(report(result))
    assert result.best is not None
    for value in (result.held_out.auc, result.best.auc, result.held_out.log_loss, result.held_out.ne):
        assert f"{value:.4f}" in text
    assert "best reachable" in text
    assert "512 samples in 8 steps" in text
    without = dataclasses.replace(result, best=None, best_expected_auc=None, rows=RowCount(9, 2, ["f:3: bad"]))
    text = _printed(report(without))
    assert "best reachable" not in text
    assert "2 bad rows skipped, 9 good rows read" in text
    assert "f:3: bad" in text


def test_scores_that_are_not_defined_are_said_to_be_so() -> None:
    result = train(_run())
    nothing = Scores(0, math.nan, math.nan, math.nan, math.nan)
    assert "undefined" in _printed(report(dataclasses.replace(result, held_out=nothing, tasks={})))


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_shows_loss_auc_and_speed_on_a_terminal_and_elsewhere(terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=160, force_terminal=terminal)
    train(_run(log_every=1, eval_every=4), console=console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("AUC", "loss", "samples/s", "log loss"):
        assert word in text


def test_a_terminal_can_be_closed_without_an_event() -> None:
    Terminal(Console(file=io.StringIO(), force_terminal=True), None).close()


def test_json_has_null_where_a_number_is_not_finite() -> None:
    assert finite({"a": math.nan, "b": {"c": math.inf, "d": 1.5}}) == {"a": None, "b": {"c": None, "d": 1.5}}
    assert np.isnan(Scores.of(torch.zeros(0), torch.zeros(0)).auc)


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads the kernel's table of sockets")
def test_the_launchers_store_listens_on_the_loopback_only() -> None:
    store = _local_store()
    tables = [Path("/proc/net", name) for name in ("tcp", "tcp6")]
    sockets = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    listening = "0A"
    places = [local for _, local, _, state, *_ in sockets if state == listening]
    assert [place for place in places if place.endswith(f":{store.port:04X}")] == [f"0100007F:{store.port:04X}"]


def test_a_run_writes_its_trace(tmp_path: Path) -> None:
    run = dataclasses.replace(_run(), trace=str(tmp_path / "trace.json"))
    steps = train(run).steps
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"] == "update" and event["ph"] == "X" for event in events) == steps


def test_a_trace_that_cannot_be_written_warns_and_loses_nothing(tmp_path: Path) -> None:
    run = dataclasses.replace(_run(), trace=str(tmp_path / "missing" / "trace.json"))
    with pytest.warns(UserWarning, match=r"Trace: .* cannot be written: .* The run continues without a trace"):
        assert train(run).steps
