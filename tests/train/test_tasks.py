"""Several tasks, sample weights, checks of labels, and the position of a run in its data."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from tilerec.data.columns import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.data.dataset import Dataset
from tilerec.data.table_dataset import TableDataset
from tilerec.errors import ConfigError, InputError
from tilerec.recipes.model import ConcatModel, DLRMConfig, DotConfig, MLPConfig, SharedBottomConfig
from tilerec.spec.optimizer import SGD
from tilerec.train.config import ClickConfig, DataConfig, RunConfig, TrainConfig
from tilerec.train.loop import train
from tilerec.train.loss import click_loss
from tilerec.train.run_saves import RunSaves
from tilerec.train.training_run import Run
from tilerec.train.world import World

CPU = torch.device("cpu")


class TableData(DataConfig):
    """60 samples of two tasks and a weight, in memory."""

    def __init__(self, columns: Columns | None = None) -> None:
        self._columns = columns or COLUMNS

    def open(self) -> Dataset:
        rows = range(60)
        table = pa.table(
            {
                "user": [i % 7 for i in rows],
                "price": [i / 60 for i in rows],
                "weight": [1.0 + (i % 3) for i in rows],
                "click": [i % 2 for i in rows],
                "buy": [int(i % 5 == 0) for i in rows],
                "stars": [float(i % 6) for i in rows],
            }
        )
        return TableDataset(table, self._columns, shuffle_rows=8)


COLUMNS = Columns(
    labels=(LabelColumn("click"), LabelColumn("buy")),
    dense=(DenseColumn("price"),),
    ids=(IdColumn("user"),),
    tables=(TableRows("user", 20),),
    weight="weight",
)


def test_the_loss_is_the_weighted_mean_over_samples_and_tasks() -> None:
    logits, labels = torch.randn(6, 2), torch.rand(6, 2)
    weights = torch.rand(6)
    expected = binary_cross_entropy_with_logits(logits, labels, weights[:, None])
    assert click_loss(logits, labels, weights).item() == pytest.approx(expected.item(), rel=1e-6)
    halves = [
        click_loss(logits[part], labels[part], weights[part], global_batch=6, world_size=2)
        for part in (slice(0, 2), slice(2, 6))
    ]
    assert (sum(halves) / 2).item() == pytest.approx(expected.item(), rel=1e-6)  # type: ignore[union-attr]
    one = binary_cross_entropy_with_logits(logits[:, 0], labels[:, 0], weights)
    assert click_loss(logits[:, :1], labels[:, 0], weights).item() == pytest.approx(one.item(), rel=1e-6)
    with pytest.raises(ConfigError, match=r"logits of shape \(6, 1\) for labels of shape \(6, 2\)"):
        click_loss(logits[:, :1], labels)


def test_weights_of_tasks_scale_their_losses() -> None:
    logits, labels, weights = torch.randn(6, 2), torch.rand(6, 2), torch.rand(6)
    each = [binary_cross_entropy_with_logits(logits[:, t], labels[:, t], weights).item() for t in (0, 1)]
    found = click_loss(logits, labels, weights, task_weights=(3.0, 0.5)).item()
    assert found == pytest.approx((3 * each[0] + 0.5 * each[1]) / 2, rel=1e-6)
    bare = click_loss(logits, labels, task_weights=(0.0, 2.0)).item()
    assert bare == pytest.approx(binary_cross_entropy_with_logits(logits[:, 1], labels[:, 1]).item(), rel=1e-6)
    one = click_loss(logits[:, 0], labels[:, 0], weights, task_weights=(3.0,)).item()
    assert one == pytest.approx(3 * each[0], rel=1e-6)
    with pytest.raises(ConfigError, match=r"task\.weights: got 1 weights; expected one for each of the 2 tasks"):
        click_loss(logits, labels, task_weights=(1.0,))


def test_a_task_without_weight_does_not_train_its_tower() -> None:
    options = TrainConfig(batch_size=16, dense_optimizer=SGD(lr=0.5))
    model = SharedBottomConfig(embedding_dim=4, bottom=(4,), tower=())
    torch.manual_seed(options.seed)
    before = model.build(TableData().open(), CPU).state_dict()
    after = train(
        RunConfig("one", TableData(), model, options, task=ClickConfig(weights=(1.0, 0.0)))
    ).model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {"task_towers.towers.0.1.weight", "bottom._mlp.0._linear.weight"} <= changed
    assert not any("towers.1" in name for name in changed)


@pytest.mark.parametrize("weights", [(-1.0, 1.0), (0.0, 0.0), (float("nan"), 1.0)])
def test_weights_of_tasks_that_do_not_fit_are_named(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match=r"task\.weights: got .*expected numbers of at least 0, not all 0"):
        ClickConfig(weights=weights)


@pytest.mark.parametrize("model", [DLRMConfig(embedding_dim=4, dense_arch=(), over_arch=(4,)), MLPConfig(layers=(4,))])
def test_a_run_scores_each_task(model: DLRMConfig | MLPConfig) -> None:
    data = TableData()
    run = RunConfig("two", data, model, TrainConfig(batch_size=16, log_every=2))
    result = train(run)
    assert list(result.tasks) == ["click", "buy"]
    assert result.samples == 60


def test_dot_and_empty_models_are_refused_for_data_that_they_cannot_read() -> None:
    columns = replace(COLUMNS, ids=(IdColumn("user"), IdColumn("click", table="user")), labels=COLUMNS.labels)
    with pytest.raises(ConfigError, match=r"DotModel: got a dataset with tasks \['click', 'buy'\]; expected one"):
        DotConfig().build(TableData(columns).open(), CPU)
    with pytest.raises(ConfigError, match="got no features"):
        ConcatModel(None, 0, (), 1, CPU)


def test_labels_that_are_no_probabilities_are_refused_by_name() -> None:
    columns = replace(COLUMNS, labels=(LabelColumn("click"), LabelColumn("stars")))
    run = RunConfig("stars", TableData(columns), MLPConfig(layers=()), TrainConfig(batch_size=60))
    with pytest.raises(InputError, match=r"table, rows 0 to 59: label column 'stars': got 2 in row 2; .* Set at_least"):
        train(run)


def test_labels_of_a_data_set_without_checks_are_refused_before_their_step() -> None:
    task = ClickConfig().build(TableData().open(), TrainConfig(), CPU, World(None))
    labels = torch.tensor([[0.0, 1.0], [1.0, -2.0]])
    batch = replace(next(iter(TableData().open().train(2))), labels=labels)
    with pytest.raises(InputError, match=r"label 'buy': got -2; expected 0 to 1\. Set at_least"):
        task.check(batch)


def test_a_run_continues_at_its_position_with_the_same_batches() -> None:
    seen: list[list[float]] = []

    def run_from(state: dict[str, float] | None, max_steps: int) -> Run:
        config = RunConfig(
            "a", TableData(), MLPConfig(layers=()), TrainConfig(batch_size=16, epochs=2, max_steps=max_steps)
        )
        dataset = config.data.open()
        world = World(None)
        saves = RunSaves(config, world, None)
        run = Run(config, dataset, config.model.build(dataset, CPU), CPU, world, [], saves)
        if state is not None:
            run.load_state_dict(state)
        run._step_module.register_forward_pre_hook(lambda _, batch: seen[-1].append(float(batch[0].sum())))
        seen.append([])
        run.learn()
        return run

    run_from(None, 0)
    state = run_from(None, 5).state_dict()
    assert (state["epoch"], state["position"], state["steps"], state["samples"]) == (1, 16, 5, 76)
    run_from(state, 0)
    whole, first, rest = seen
    assert first + rest == whole
    assert len(whole) == 8
