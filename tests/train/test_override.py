"""Overrides of a config: one field by its dotted name, from text."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tilerec.errors import ConfigError
from tilerec.recipes.data import SyntheticData
from tilerec.recipes.model import DLRMConfig
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.train.config import RunConfig, TrainConfig
from tilerec.train.override import override, override_all, settings

CPU = torch.device("cpu")


def _run(**train_options: object) -> RunConfig:
    options: dict[str, object] = {"batch_size": 64, "eval_batch_size": 50, "log_every": 2}
    return RunConfig(
        name="small",
        data=SyntheticData(num_rows=(40, 20), num_dense=3, train_rows=512, held_out_rows=120),
        model=DLRMConfig(embedding_dim=4, dense_arch=(8,), over_arch=(8,)),
        train=TrainConfig(**{**options, **train_options}),  # type: ignore[arg-type]
    )


def test_an_override_changes_one_field_of_a_copy() -> None:
    run = _run()
    changed = override(run, "train.batch_size=4096")
    assert changed.train.batch_size == 4096
    assert run.train.batch_size == 64
    assert dataclasses.replace(changed, train=run.train) == run


@pytest.mark.parametrize(
    ("assignment", "name", "value"),
    [
        ("train.decay_to=0.5", "train.decay_to", 0.5),
        ("train.decay_to=1", "train.decay_to", 1.0),
        ("train.device = cpu ", "train.device", "cpu"),
        ("model.mean_pooling=true", "model.mean_pooling", True),
        ("model.over_arch=64,32", "model.over_arch", (64, 32)),
        ("model.over_arch=(7,)", "model.over_arch", (7,)),
        ("data.exponents=1.5, 0", "data.exponents", (1.5, 0.0)),
        ("train.embedding_optimizer=SGD", "train.embedding_optimizer", "SGD"),
        ("train.embedding_optimizer.eps=1e-3", "train.embedding_optimizer.eps", 1e-3),
        ("train.embedding_optimizer.non_finite=skip", "train.embedding_optimizer.non_finite", "skip"),
        ("train.dense_optimizer.betas=0.5,0.6", "train.dense_optimizer.betas", (0.5, 0.6)),
        ("log_dir=a=b", "log_dir", "a=b"),
    ],
)
def test_values_are_read_by_the_type_of_their_field(assignment: str, name: str, value: object) -> None:
    found = settings(override(_run(), assignment))[name]
    assert found == value
    assert type(found) is type(value)


def test_an_optimizer_keeps_its_learning_rate_when_its_class_changes() -> None:
    run = override_all(_run(), ["train.embedding_optimizer.lr=0.25", "train.embedding_optimizer=RowWiseAdagrad"])
    assert run.train.embedding_optimizer == RowWiseAdagrad(lr=0.25)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("train.batchsize=3", r"no setting 'train\.batchsize'\. Did you mean 'train\.batch_size'\?"),
        ("batch_size=3", r"no setting 'batch_size'\. Did you mean 'train\.batch_size'\?"),
        ("tran.batch_size=3", r"no setting 'tran'\. Did you mean 'train'\?"),
        ("zzz=3", r"no setting 'zzz'\. Expected one of name, data, model, train, log_dir"),
        ("train.batch_size=many", r"train\.batch_size: got 'many'; expected a whole number"),
        ("train.batch_size=1.5", r"train\.batch_size: got '1\.5'; expected a whole number"),
        ("train.batch_size=0", r"train\.batch_size: got 0; expected at least 1"),
        ("model.mean_pooling=yes", r"expected true or false"),
        ("model.over_arch=a,b", r"expected a list of whole numbers, such as 64,32"),
        ("train.dense_optimizer.betas=0.5", r"expected a list of a number, a number"),
        ("train.embedding_optimizer=Ada", r"train\.embedding_optimizer: got 'Ada'"),
        ("train.embedding_optimizer.non_finite=maybe", r"expected one of error, skip"),
        ("train.embedding_optimizer.lr=-1", r"got lr=-1"),
        ("train=3", r"'train' is a group of settings\. Set one of train\.batch_size"),
        ("train.seed.more=3", r"'train\.seed' is a value and has no setting 'more'"),
        ("train.batch_size", r"--set: got .train\.batch_size.; expected name=value"),
        ("=3", r"--set: got .=3.; expected name=value"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_nearest_named(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(_run(), assignment)
