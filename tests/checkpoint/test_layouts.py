"""One state has one digest in every layout: unsharded, on ranks, in 2D exact or averaged, with caches or without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from tests.parallel.two_d.test_dmp_collection import PLAN, batch, model, wrapped
from tilerec.checkpoint import load, save
from tilerec.checkpoint.contents import SavedContents
from tilerec.modules.cached_tables import cache_tables
from tilerec.optim.fused import FusedOptimizer
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.planner.helpers import row_wise
from tilerec.testing.ranks import Ranks

Pool = Callable[[int], Ranks]
NIGHTLY = os.environ.get("TILEREC_NIGHTLY") == "1"
ROWS_ONLY: dict[str, Any] = {"ebc": {"a": row_wise(), "b": row_wise()}, "ec": row_wise()}
LAYOUTS: dict[str, tuple[int, Callable[[int], nn.Module]]] = {
    "unsharded": (1, model),
    "unsharded, cached": (1, lambda seed: cache_tables(model(seed), 0.3)),
    "2 ranks": (2, lambda seed: DistributedModelParallel(model(seed), plan=PLAN)),
    "2 ranks, cached": (2, lambda seed: DistributedModelParallel(cache_tables(model(seed), 0.3), plan=PLAN)),
    "4 ranks by rows": (4, lambda seed: DistributedModelParallel(model(seed), plan=ROWS_ONLY)),
    "2D exact": (4, lambda seed: wrapped(2, seed)),
    "2D averaged": (4, lambda seed: wrapped(2, seed, sync="average")),
    "2D averaged, 4 replicas": (4, lambda seed: wrapped(1, seed, sync="average")),
}  # fmt: skip


def parts_of(made: nn.Module) -> dict[str, Any]:
    optimizer = made.fused_optimizer if isinstance(made, DistributedModelParallel) else FusedOptimizer(made)
    return {"model": made, "optimizer": optimizer}


def train(made: nn.Module, steps: range) -> None:
    for step in steps:
        made(*batch(dist.get_rank(), step)).backward()


def save_trained(layout: str, path: str) -> None:
    made = LAYOUTS[layout][1](0)
    train(made, range(3))
    save(path, parts_of(made))


def save_again(layout: str, path: str, again: str) -> None:
    """Load a checkpoint into a model that has been trained with other values, and save it."""
    made = LAYOUTS[layout][1](5)
    train(made, range(7, 9))
    parts = parts_of(made)
    load(path, parts)
    save(again, parts)
    train(made, range(3, 4))


ALL = list(LAYOUTS)
PAIRS = [
    *(("2D averaged", layout) for layout in ALL),
    *(("2 ranks, cached", layout) for layout in ("unsharded", "2D exact")),
    *(("2D exact", layout) for layout in ("unsharded, cached", "2D averaged, 4 replicas")),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [(a, b) for a in ALL for b in ALL] if NIGHTLY else [PAIRS[i] for i in (5, 8, 10)],
)
def test_the_digest_of_a_state_does_not_depend_on_the_layout(
    pool: Pool, tmp_path: Path, before: str, after: str
) -> None:
    paths = [str(tmp_path / name) for name in ("before", "after")]
    pool(LAYOUTS[before][0]).run(save_trained, before, paths[0])
    pool(LAYOUTS[after][0]).run(save_again, after, *paths)
    first, second = (SavedContents(path) for path in paths)
    assert first.digest() == second.digest()
    assert {name for name in first.manifest.tensors if "weight" in name} > {"model.ebc.embedding_bags.a.weight"}
