"""Built-in recipes: functions that return the config of a complete run.

To add your own recipe, write such a function in your own module. `tilerec train my_module:my_recipe` runs it.
"""

from __future__ import annotations

from tilerec.recipes.data import CriteoData, MovieLensData, SyntheticData
from tilerec.recipes.model.dlrm import DLRMConfig
from tilerec.recipes.model.dot import DotConfig
from tilerec.spec.optimizer import Adagrad, Adam, RowWiseAdagrad
from tilerec.train.config import RunConfig, TrainConfig


def synthetic() -> RunConfig:
    """Train DLRM on a planted click stream with a known best AUC; about a minute on two cores."""
    return RunConfig(
        name="synthetic",
        data=SyntheticData(
            num_rows=(10_000, 4_000, 1_000, 500, 200, 100),
            exponents=(1.2,),
            min_lengths=(0, 1, 1, 1, 1, 1),
            max_lengths=(3, 2, 1, 1, 1, 1),
            main_scale=1.2,
            pair_scale=0.3,
            train_rows=4_000_000,
        ),
        model=DLRMConfig(embedding_dim=16, dense_arch=(32,), over_arch=(64, 32), mean_pooling=True, init_bound=0.1),
        train=TrainConfig(
            batch_size=2048,
            embedding_optimizer=Adam(lr=0.01),
            dense_optimizer=Adam(lr=3e-3),
            warmup_steps=20,
            decay_steps=1_930,
            decay_to=0.05,
            log_every=100,
        ),
    )


def movielens(data: str) -> RunConfig:
    """Predict whether a user likes a movie: two tables, a dot product and a small MLP on MovieLens ratings."""
    return RunConfig(
        name="movielens",
        data=MovieLensData(path=data),
        model=DotConfig(embedding_dim=16, layers=(32,)),
        train=TrainConfig(
            batch_size=512,
            epochs=2,
            embedding_optimizer=Adagrad(lr=0.1),
            dense_optimizer=Adagrad(lr=0.02),
            log_every=50,
        ),
    )


def criteo(data: str) -> RunConfig:
    """Train DLRM with 26 tables and 13 dense features on a file in the Criteo format, in one pass."""
    return RunConfig(
        name="criteo",
        data=CriteoData(path=data),
        model=DLRMConfig(embedding_dim=16, dense_arch=(128, 64), over_arch=(128, 64)),
        train=TrainConfig(
            batch_size=512,
            embedding_optimizer=RowWiseAdagrad(lr=0.05),
            dense_optimizer=Adam(lr=1e-3),
            log_every=50,
        ),
    )
