"""Small interaction logs and runs for tests of retrieval and next-item tasks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tilerec.data.interactions import LogSplit
from tilerec.recipes.interactions import InteractionsData
from tilerec.recipes.retrieval_model import SASRecConfig, TwoTowerConfig
from tilerec.retrieval.next_item_task import NextItemConfig
from tilerec.retrieval.two_tower_task import RetrievalConfig
from tilerec.spec.optimizer import SGD, Adam
from tilerec.train.config import RunConfig, TrainConfig


def write_log(path: Path, users: int = 40, items: int = 24) -> Path:
    """Write lines "user item" in order of time; the next item of a user is often the last one plus 3."""
    draw = random.Random(0)
    lines = []
    for user in range(users):
        item = draw.randrange(items)
        for _ in range(draw.randint(2, 9)):
            lines.append(f"u{user} {item}\n")
            item = (item + 3) % items if draw.random() < 0.9 else draw.randrange(items)
    path.write_text("".join(lines))
    return path


def log_data(path: Path, **settings: Any) -> InteractionsData:
    return InteractionsData((str(path),), names=("user", "item"), delimiter="space", **settings)


def retrieval_run(path: Path, *, train: dict[str, Any] | None = None, **task: Any) -> RunConfig:
    options = {"batch_size": 16, "eval_batch_size": 7, "dense_optimizer": SGD(0.1), "embedding_optimizer": SGD(0.5)}
    return RunConfig(
        "small",
        log_data(path, max_length=4, hold_out=LogSplit(per_user=2)),
        TwoTowerConfig(query_features=("user", "history"), embedding_dim=8, layers=(8, 4)),
        TrainConfig(**{**options, **(train or {})}),
        task=RetrievalConfig(seen="seen", cutoffs=(3, 10), **task),
    )


def next_item_run(path: Path, *, train: dict[str, Any] | None = None, **task: Any) -> RunConfig:
    options = {"batch_size": 7, "eval_batch_size": 9, "dense_optimizer": Adam(0.01), "embedding_optimizer": Adam(0.01)}
    return RunConfig(
        "small",
        log_data(path, samples="users", max_length=5),
        SASRecConfig(embedding_dim=8, max_length=5, num_blocks=2, num_heads=2, dropout=0.0),
        TrainConfig(**{**options, **(train or {})}),
        task=NextItemConfig(seen="seen", cutoffs=(3, 10), **task),
    )
