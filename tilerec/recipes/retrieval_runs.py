"""Recipes of retrieval and next-item models."""

from __future__ import annotations

from pathlib import Path

from tilerec.data.interactions import LogSplit
from tilerec.recipes.interactions import InteractionsData
from tilerec.recipes.retrieval_model import SASRecConfig, TwoTowerConfig
from tilerec.retrieval.next_item_task import NextItemConfig
from tilerec.retrieval.two_tower_task import RetrievalConfig
from tilerec.spec.optimizer import Adam
from tilerec.train.config import RunConfig, TrainConfig


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
