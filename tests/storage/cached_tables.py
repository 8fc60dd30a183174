"""Collections with a cache, and steps of training, for tests of caches."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tilerec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    apply_optimizer_in_backward,
    cache_tables,
)
from tilerec.modules.cached_tables import iter_table_rows, set_cache
from tilerec.spec.optimizer import Adam, OptimizerSpec

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


def parameter_name(value: object) -> str:
    return type(value).__name__ if isinstance(value, OptimizerSpec) else str(getattr(value, "value", value))


def ec(spec: OptimizerSpec | None) -> EmbeddingCollection:
    torch.manual_seed(3)
    tables = [
        EmbeddingConfig(300, 8, "a", feature_names=["f", "g"]),
        EmbeddingConfig(200, 8, "b", feature_names=["g"]),
        EmbeddingConfig(77, 4, "c", feature_names=["h"]),
    ]
    module = EmbeddingCollection(tables)
    if spec is not None:
        apply_optimizer_in_backward(spec, module.parameters())
    return module


def assert_same(first: Any, second: Any) -> None:
    for a, b in zip(everything(first), everything(second), strict=True):
        assert torch.equal(a, b)


def spare_only(module: Any) -> Any:
    """Tables whose rows are in lines only as long as their batch is in flight."""
    for table, rows in list(iter_table_rows(module)):
        set_cache(table, rows, None, None)
    return module


def trained(spec: OptimizerSpec | None = None, steps: int = 6) -> tuple[Any, Any, random.Random]:
    spec = spec or Adam(0.1)
    plain, other = ebc(spec), cache_tables(ebc(spec), 0.15)
    rng = random.Random(12)
    for _ in range(steps):
        kjt = batch(rng)
        step(plain, kjt)
        step(other, kjt)
    return plain, other, rng


def goes_on_alike(plain: Any, other: Any, rng: random.Random) -> None:
    for _ in range(3):
        kjt = batch(rng)
        assert torch.equal(step(plain, kjt), step(other, kjt))
    assert_same(plain, other)


class RaisesAfter(TorchDispatchMode):
    """Ctrl-C after so many of torch's calls."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return out
