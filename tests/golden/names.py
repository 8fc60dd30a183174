"""Names of state: of modules and optimizers, sharded and not. Checkpoints are found again by them.

`names.txt` has a section for each module: the keys of its state dict with their shapes, and of its optimizer's. A
sharded module is looked at on four ranks; a line that is not every rank's ends with the ranks whose it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.golden import managed
from tests.golden.processes import names_of_ranks, optimizer_lines
from tests.golden.training import TABLES, Run, build, features, step_of
from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, cache_tables
from tilerec.models import DLRM, DLRM_DCN, DLRM_Projection, SimpleDeepFMNN
from tilerec.modules import (
    CrossNet,
    FeatureProcessedEmbeddingBagCollection,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    PositionWeightedModuleCollection,
    SwishLayerNorm,
    VectorCrossNet,
)
from tilerec.optim import (
    CombinedOptimizer,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    RowWiseAdagrad,
    WarmupOptimizer,
    WarmupStage,
)

FILE = Path(__file__).with_name("names.txt")


def _lines(module: nn.Module, optimizer: Any = None) -> list[str]:
    lines = [f"state_dict {name} {list(value.shape)}" for name, value in module.state_dict().items()]
    lines += [f"parameter {name}" for name, _ in module.named_parameters()]
    lines += [f"buffer {name}" for name, _ in module.named_buffers()]
    return lines if optimizer is None else lines + optimizer_lines(optimizer.state_dict())


def _unsharded(optimizer: str, form: str, cached: bool = False) -> list[str]:
    run = Run("table_wise", optimizer, form, "1")
    module = build(run)
    if cached:
        cache_tables(module, 0.5)
    step_of(module, features(run, 0, 0), 1.0)
    return _lines(module, None if optimizer == "none" else module.fused_optimizer)


def _managed(policy: str, pooled: bool) -> list[str]:
    module = managed.build(policy, pooled, "rowwise_adagrad")
    return _lines(module, module.embedding_module.fused_optimizer)


def _by_position() -> list[str]:
    tables = [EmbeddingBagConfig(t.rows, t.dim, t.name, feature_names=[t.name]) for t in TABLES]
    weights = PositionWeightedModuleCollection({t.name: 4 for t in TABLES})
    return _lines(FeatureProcessedEmbeddingBagCollection(EmbeddingBagCollection(tables, is_weighted=True), weights))


def _bags() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(8, 4, name, feature_names=[f"f_{name}"]) for name in ("x", "y")])


def _models() -> list[str]:
    models = {
        "dlrm": DLRM(_bags(), 3, [5, 4], [6, 1]),
        "dcn": DLRM_DCN(_bags(), 3, [5, 4], [6, 1], 2, 3),
        "projection": DLRM_Projection(_bags(), 3, [5, 4], [6, 1], [8], [8]),
        "deepfm": SimpleDeepFMNN(3, _bags(), 5, 6),
        "cross": nn.ModuleList(
            [
                CrossNet(4, 2),
                LowRankCrossNet(4, 2, 3),
                LowRankMixtureCrossNet(4, 2, 2, 3),
                VectorCrossNet(4, 2),
            ]
        ),
        "swish": SwishLayerNorm(4),
    }
    return _lines(nn.ModuleDict(models))


def _stepped() -> list[str]:
    weights = {"rows": nn.Parameter(torch.ones(3, 2)), "bias": nn.Parameter(torch.ones(2))}
    parts: list[Any] = []
    for name, weight in weights.items():
        own: Tensor = weight
        weight.grad = torch.ones_like(own)
        parts.append((name, KeyedOptimizerWrapper({name: weight}, lambda params: RowWiseAdagrad(params, lr=0.1))))
    first = GradientClippingOptimizer(WarmupOptimizer(parts[0][1], [WarmupStage(max_iters=3)], lr=0.1))
    optimizer = CombinedOptimizer([("warm", first), parts[1]])
    optimizer.step()
    return optimizer_lines(optimizer.state_dict())


SECTIONS: dict[str, Callable[[], list[str]]] = {
    "pooled, no optimizer": partial(_unsharded, "none", "sum"),
    "pooled, row-wise Adagrad": partial(_unsharded, "rowwise_adagrad", "sum"),
    "pooled, Adam by row, cached": partial(_unsharded, "adam_row_step", "sum", True),
    "sequence, partial row-wise LAMB": partial(_unsharded, "partial_rowwise_lamb", "sequence"),
    "sequence, SGD with momentum": partial(_unsharded, "sgd_momentum", "sequence"),
    "managed collision, pooled": partial(_managed, "lru_and_lfu", True),
    "managed collision, late admission": partial(_managed, "rejected_and_admitted_late", False),
    "managed collision, times to live": partial(_managed, "times_to_live", True),
    "weights by position": _by_position,
    "models": _models,
    "optimizers of dense parameters": _stepped,
    "sharded, rows, row-wise Adagrad": partial(names_of_ranks, "row_wise", "rowwise_adagrad", "sum"),
    "sharded, columns, SGD": partial(names_of_ranks, "column_wise", "sgd", "sequence"),
    "sharded, mixed, Adam by row": partial(names_of_ranks, "mixed", "adam_row_step", "sum"),
    "sharded, two tiles on a rank, LARS": partial(names_of_ranks, "checkerboard", "lars_sgd", "mean"),
    "sharded, some copies, Adagrad": partial(names_of_ranks, "copies", "adagrad", "weighted"),
    "sharded, grid, partial row-wise Adam": partial(names_of_ranks, "grid_shard", "partial_rowwise_adam", "sum"),
    "sharded, columns, no optimizer": partial(names_of_ranks, "column_wise", "none", "sum"),
}


def text() -> str:
    """Return all sections as they are written to the file."""
    return "\n".join("\n".join([f"[{title}]", *make(), ""]) for title, make in SECTIONS.items())
