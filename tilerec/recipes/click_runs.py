"""Recipes of click models and multi-task models on MovieLens with features, and of DCN on Criteo.

`scripts/results.py --search` chose the settings on the validation part of MovieLens latest-small, and docs/results.md
has the scores on its held-out part.
"""

from __future__ import annotations

from tilerec.recipes.data import CriteoData
from tilerec.recipes.model.dcn import DCNConfig
from tilerec.recipes.model.dlrm import DLRMDCNConfig
from tilerec.recipes.model.linear import LinearConfig
from tilerec.recipes.model.mlp import MLPConfig
from tilerec.recipes.model.multi_task import MMoEConfig, PLEConfig, SharedBottomConfig
from tilerec.recipes.movielens import MovieLensTableData
from tilerec.spec.optimizer import Adagrad, Adam, RowWiseAdagrad
from tilerec.train.config import ModelConfig, RunConfig, TrainConfig

_TWO_TASKS = (4.0, 5.0)


def movielens_linear(data: str) -> RunConfig:
    """Predict whether a user likes a movie by logistic regression on user, movie, genres, year and age."""
    return _movielens("movielens_linear", data, LinearConfig(), epochs=8, tables=Adagrad(lr=0.1), dense_lr=0.01)


def movielens_mlp(data: str) -> RunConfig:
    """Predict whether a user likes a movie by an MLP on user, movie, genres, year and age."""
    tables = Adagrad(lr=0.05, weight_decay=1e-5)
    return _movielens("movielens_mlp", data, MLPConfig(), epochs=1, tables=tables, dense_lr=0.003)


def movielens_dcn(data: str) -> RunConfig:
    """Predict whether a user likes a movie by DCN-V2 on user, movie, genres, year and age."""
    model = DCNConfig(embedding_dim=8, cross_layers=3, layers=(64, 32))
    tables = Adagrad(lr=0.2, weight_decay=1e-4)
    return _movielens("movielens_dcn", data, model, epochs=1, tables=tables, dense_lr=0.003)


def movielens_shared_bottom(data: str) -> RunConfig:
    """Predict ratings of at least 4 and of 5 by a shared bottom."""
    model = SharedBottomConfig(embedding_dim=16, bottom=(32,), tower=())
    tables = Adagrad(lr=0.2, weight_decay=1e-5)
    return _movielens("movielens_shared_bottom", data, model, epochs=1, tables=tables, dense_lr=0.003, likes=_TWO_TASKS)


def movielens_mmoe(data: str) -> RunConfig:
    """Predict ratings of at least 4 and of 5 by MMoE with eight experts."""
    model = MMoEConfig(embedding_dim=16, experts=8, expert=(32,), tower=())
    tables = Adagrad(lr=0.1, weight_decay=1e-5)
    return _movielens("movielens_mmoe", data, model, epochs=2, tables=tables, dense_lr=0.003, likes=_TWO_TASKS)


def movielens_ple(data: str) -> RunConfig:
    """Predict ratings of at least 4 and of 5 by PLE with one level."""
    model = PLEConfig(embedding_dim=8, task_experts=2, shared_experts=1, expert=(64,), tower=())
    tables = Adagrad(lr=0.2, weight_decay=1e-5)
    return _movielens("movielens_ple", data, model, epochs=1, tables=tables, likes=_TWO_TASKS)


def criteo_dcn(data: str) -> RunConfig:
    """Train DLRM with a low-rank cross network, as in MLPerf, on a file in the Criteo format, in one pass."""
    return RunConfig(
        name="criteo_dcn",
        data=CriteoData(path=data),
        model=DLRMDCNConfig(embedding_dim=16, dense_arch=(128, 64), over_arch=(128, 64), cross_layers=3, low_rank=64),
        train=TrainConfig(
            batch_size=512,
            embedding_optimizer=RowWiseAdagrad(lr=0.05),
            dense_optimizer=Adam(lr=1e-3),
            log_every=50,
        ),
    )


def _movielens(
    name: str,
    data: str,
    model: ModelConfig,
    *,
    epochs: int,
    tables: Adagrad,
    dense_lr: float = 1e-3,
    likes: tuple[float, ...] = (4.0,),
) -> RunConfig:
    return RunConfig(
        name=name,
        data=MovieLensTableData(path=data, likes=likes),
        model=model,
        train=TrainConfig(
            batch_size=512,
            epochs=epochs,
            embedding_optimizer=tables,
            dense_optimizer=Adam(lr=dense_lr),
            log_every=50,
        ),
    )
