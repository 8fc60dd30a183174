"""An optimizer of your own that runs in the backward pass: RMSprop with one second moment per row.

torchrun --nproc-per-node 2 examples/extending/optimizer.py

    v = beta v + (1 - beta) mean(g^2)        one number per row: slot "v"
    w -= lr g / (sqrt(v) + eps)

The mean over a row is a sum over all of its columns. So the rule has one phase: if several ranks hold columns of a row,
tilerec adds their sums before `apply` runs. Source: Hinton, Neural Networks for Machine Learning, lecture 6e (2012).
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, shard
from tilerec.optim import (
    FusedOptimizer,
    OptimizerSpec,
    Rule,
    Slot,
    UpdateCount,
    apply_optimizer_in_backward,
    register_optimizer,
)
from tilerec.parallel import full_state_dict
from tilerec.planner import column_wise, row_wise


@dataclass(frozen=True)
class RowWiseRMSprop(OptimizerSpec):
    """Settings: what users pass, and what plans and param groups hold."""

    rule = "rowwise_rmsprop"

    lr: float = 1e-2
    _: KW_ONLY
    beta: float = 0.99
    eps: float = 1e-8

    @property
    def slots(self) -> tuple[Slot, ...]:
        return (Slot("v", "row"),)

    @property
    def partials(self) -> tuple[int, ...]:
        return (1,)  # one phase, with one sum per row

    def _tail(self) -> list[float]:
        return [self.beta, self.eps]  # what `Rule.names` names, in that order

    def _check(self) -> None:
        self._number("beta", low=0.0, high=1.0, open_high=True)
        self._number("eps", low=0.0)


class RowWiseRMSpropRule(Rule):
    """Arithmetic: U distinct rows of a step at once, W columns of the part of the rows that is here."""

    names = ("beta", "eps")
    slot_kinds = ("row",)
    phases = 1

    def terms(self, phase: int, step: UpdateCount) -> list[Tensor]:
        return [step.g_UW * step.g_UW]  # summed over the whole row

    def apply(self, step: UpdateCount) -> tuple[Tensor, list[Tensor]]:
        v_U = self.h["beta"] * step.slots[0] + (1 - self.h["beta"]) * step.scalars_PU[0] / step.dim
        w_UW = step.w_UW * (1 - self.lr * self.wd)  # shared settings of every optimizer: lr, weight_decay, …
        return w_UW - self.lr * step.g_UW / (torch.sqrt(v_U) + self.h["eps"])[:, None], [v_U]


register_optimizer(RowWiseRMSprop, RowWiseRMSpropRule)


def collection() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name="item", num_embeddings=500, embedding_dim=16, feature_names=["seen"]),
        EmbeddingBagConfig(name="user", num_embeddings=200, embedding_dim=8, feature_names=["user"]),
    ]
    ebc = EmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(RowWiseRMSprop(lr=0.05, weight_decay=0.01), ebc.parameters())
    return ebc


def batch(seed: int, samples: int = 32) -> KeyedJaggedTensor:
    ids = torch.randint(0, 200, (2 * samples,), generator=torch.Generator().manual_seed(seed))
    return KeyedJaggedTensor(["seen", "user"], ids, lengths=torch.ones(2 * samples, dtype=torch.int64))


def main(steps: int = 5) -> float:
    """Return the largest difference, after some steps, between sharded tables and whole ones, state included."""
    world, rank = dist.get_world_size(), dist.get_rank()
    whole, sharded = collection(), collection()
    shard(sharded, {"item": column_wise(range(world)), "user": row_wise()})
    for step in range(steps):
        seeds = [step * world + each for each in range(world)]
        sum(whole(batch(seed)).values().square().sum() / world for seed in seeds).backward()
        sharded(batch(seeds[rank])).values().square().sum().backward()

    # Learning rates, state dicts and checkpoints work as for every attached optimizer.
    optimizer = FusedOptimizer(whole)
    names = [name for state in optimizer.state_dict()["state"].values() for name in state]
    assert any("v" in name for name in names), names
    found, expected = full_state_dict(sharded), whole.state_dict()
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(f"largest difference from whole tables: {main():g}")
    dist.destroy_process_group()
