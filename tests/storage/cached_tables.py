"""Collections with a cache, and steps of training, for tests of caches."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from tilerec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PoolingType,
    apply_optimizer_in_backward,
)
from tilerec.spec.optimizer import (
    OptimizerSpec,
)

KEYS = ["f", "g", "h"]


def ebc(spec: OptimizerSpec | None, *, weighted: bool = False, **config: Any) -> EmbeddingBagCollection:
    """Three tables; one key reads two of them, one table is read by two keys."""
    torch.manual_seed(3)
    tables = [
        EmbeddingBagConfig(300, 8, "a", feature_names=["f", "g"], **config),
        EmbeddingBagConfig(200, 12, "b", feature_names=["g"], pooling=PoolingType.MEAN, **config),
        EmbeddingBagConfig(77, 3, "c", feature_names=["h"], **config),
    ]
    module = EmbeddingBagCollection(tables, is_weighted=weighted)
    if spec is not None:
        apply_optimizer_in_backward(spec, module.parameters())
    return module


def batch(rng: random.Random, samples: int = 7, most: int = 6, weighted: bool = False) -> KeyedJaggedTensor:
    """Skewed ids: many of a few rows, and some of all."""
    sizes = {"f": 300, "g": 200, "h": 77}
    lengths, ids = [], []
    for key in KEYS:
        for _ in range(samples):
            own = rng.randrange(most)
            lengths.append(own)
            ids += [min(int(rng.paretovariate(0.4)), sizes[key]) - 1 for _ in range(own)]
    weights = torch.tensor([rng.random() for _ in ids]) if weighted else None
    return KeyedJaggedTensor.from_lengths_sync(
        KEYS, torch.tensor(ids, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64), weights
    )


def output(module: nn.Module, kjt: Any) -> Tensor:
    out = module(kjt)
    if isinstance(out, dict):
        return torch.cat([part.values().reshape(-1) for part in out.values()])
    return out.values()


def step(module: nn.Module, kjt: Any) -> Tensor:
    out = output(module, kjt)
    (out * out).sum().backward()
    return out.detach()


def everything(module: Any) -> list[Tensor]:
    """Weights and optimizer state."""
    own = [value.clone() for value in module.state_dict().values()]
    for state in module.fused_optimizer.state_dict()["state"].values():
        own += [value.clone() for value in state.values() if isinstance(value, Tensor)]
    return own
