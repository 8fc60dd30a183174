"""Built-in recipes: functions that return the config of a complete run.

To add your own recipe, write such a function in your own module. `tilerec train my_module:my_recipe` runs it.
"""

from __future__ import annotations

from pathlib import Path

from tilerec.data.interactions import LogSplit
from tilerec.recipes.data import CriteoData, MovieLensData, SyntheticData
from tilerec.recipes.interactions import InteractionsData
from tilerec.recipes.model import DLRMConfig, DotConfig
from tilerec.recipes.retrieval_model import SASRecConfig, TwoTowerConfig
from tilerec.retrieval.next_item_task import NextItemConfig
from tilerec.retrieval.two_tower_task import RetrievalConfig
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


def two_tower(data: str) -> RunConfig:
    """Retrieve movies that a user will like: two towers with in-batch softmax on MovieLens ratings."""
    file = Path(data) / "ratings.csv" if Path(data).is_dir() else Path(data)
    return RunConfig(
        name="two_tower",
        data=InteractionsData(
            path=(str(file),),
            user="userId",
            item="movieId",
            time="timestamp",
            rating="rating",
            at_least=4.0,
            max_length=20,
            hold_out=LogSplit(per_user=10),
        ),
        # The history alone, so that users without training interactions have vectors, too.
        model=TwoTowerConfig(
            query_features=("history",), embedding_dim=64, layers=(64,), normalize=True, init_bound=0.02
        ),
        train=TrainConfig(
            batch_size=128,
            epochs=8,
            embedding_optimizer=Adam(lr=5e-3),
            dense_optimizer=Adam(lr=1e-3),
            log_every=500,
        ),
        task=RetrievalConfig(seen="seen", temperature=0.15),
    )


def sasrec(data: str) -> RunConfig:
    """Predict the next item of a sequence: SASRec with 3,000 negatives on lines "user item" in order of time."""
    return RunConfig(
        name="sasrec",
        data=InteractionsData(path=(data,), names=("user", "item"), delimiter="space", samples="users", max_length=50),
        model=SASRecConfig(embedding_dim=64, max_length=50, num_blocks=2, num_heads=1, dropout=0.1),
        train=TrainConfig(
            batch_size=128,
            epochs=8,
            embedding_optimizer=Adam(lr=1e-3),
            dense_optimizer=Adam(lr=1e-3),
            log_every=100,
        ),
        task=NextItemConfig(loss="sampled", negatives=3000, seen="seen"),
    )
