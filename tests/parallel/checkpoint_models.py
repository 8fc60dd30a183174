"""Models with all kinds of tilings and optimizers, for tests of checkpoints."""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.spec.optimizer import Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.tile import Tiling, ceil_chunks
from tilerec.testing.batches import random_batch

State = dict[str, dict[str, Any]]

ROWS = {"everywhere": 7, "uneven": 7, "rows": 5, "columns": 7, "two": 7, "one": 7, "some": 7, "rowsteps": 7}
DIM = 6
OPTIMIZERS = {
    "everywhere": RowWiseAdagrad(lr=0.1),
    "uneven": Adam(lr=0.1),
    "rows": RowWiseAdagrad(lr=0.1),
    "columns": PartialRowWiseAdam(lr=0.1),
    "two": RowWiseAdagrad(lr=0.1),
    "one": Adagrad(lr=0.1),
    "some": Adagrad(lr=0.1),
    "rowsteps": Adam(lr=0.1, row_step=True),
}


def tilings(size: int) -> dict[str, Tiling]:
    """Under the name of each table a way to cut it; 7 rows as 5 + 2, 5 rows over all ranks, two tiles on a rank, …"""
    last, rows, columns = size - 1, ceil_chunks(5, size), ceil_chunks(DIM, size)
    tiles: dict[str, list[tuple[Any, ...]]] = {
        "everywhere": [(0, 7, 0, 6, tuple(range(size)))],
        "uneven": [(0, 5, 0, 6, 0), (5, 7, 0, 6, last)],
        "rows": [(a, b, 0, 6, rank) for rank, (a, b) in enumerate(itertools.pairwise(rows))],
        "columns": [(0, 7, a, b, rank) for rank, (a, b) in enumerate(itertools.pairwise(columns))],
        "two": [(0, 7, 0, 2, 0), (0, 7, 2, 4, last), (0, 7, 4, 6, 0)],
        "one": [(0, 7, 0, 6, last)],
        "some": [(0, 3, 0, 6, tuple({0, last})), (3, 7, 0, 3, last), (3, 7, 3, 6, 0)],
        "rowsteps": [(0, 3, 0, 2, 0), (3, 7, 0, 2, last), (0, 4, 2, 6, last), (4, 7, 2, 6, 0)],
    }
    return {name: Tiling.of(name, ROWS[name], DIM, cover) for name, cover in tiles.items()}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(rows, DIM, name, feature_names=[name]) for name, rows in ROWS.items()]
        )
        self.ec = EmbeddingCollection([EmbeddingConfig(7, DIM, "sequence", feature_names=["uneven"])])
        self.over = nn.Linear(DIM * len(ROWS), 1)

    def forward(self, features: Any) -> Tensor:
        rows = torch.cat([jagged.values() for jagged in self.ec(features).values()])
        pooled = self.ebc(features).values()
        return cast(Tensor, self.over(pooled * pooled).sum() + (rows * rows).sum())


def model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    made = Model()
    for name, spec in OPTIMIZERS.items():
        apply_optimizer_in_backward(spec, [made.ebc.embedding_bags[name].weight])
    apply_optimizer_in_backward(Adam(lr=0.1), list(made.ec.parameters()))
    return made


def wrapped(seed: int, turn: int) -> DistributedModelParallel:
    """On all ranks; table k is cut in the way of table k + turn (of those with 7 rows)."""
    cuts = tilings(dist.get_world_size())
    names = [name for name in cuts if ROWS[name] == 7]
    plan = {
        name: cuts[names[(names.index(name) + turn) % len(names)]] if name in names else cuts[name] for name in cuts
    }
    if turn:  # sums over whole rows need columns that are cut at the same rows
        for name in ("everywhere", "columns", "two"):
            if plan[name] in (cuts["rowsteps"], cuts["some"]):
                plan[name] = cuts["uneven"]
    return DistributedModelParallel(model(seed), plan={"ebc": plan, "ec": {"sequence": cuts[names[turn]]}})


def train(dmp: DistributedModelParallel) -> None:
    for step in range(3):
        dmp.zero_grad()
        batch = random_batch(list(ROWS), list(ROWS.values()), 4, seed=10 * step + dist.get_rank())
        dmp(batch).backward()


def whole(dmp: DistributedModelParallel) -> tuple[dict[str, Tensor], State]:
    return full_state_dict(dmp.module), dmp.fused_optimizer.full_state_dict()["state"]


def same(got: tuple[dict[str, Tensor], State], want: tuple[dict[str, Tensor], State]) -> None:
    assert list(got[0]) == list(want[0])
    for name, value in want[0].items():
        assert torch.equal(got[0][name], value), name
    assert set(got[1]) == set(want[1])
    for name, slots in want[1].items():
        for slot, value in slots.items():
            assert torch.equal(got[1][name][slot], value), (name, slot)
