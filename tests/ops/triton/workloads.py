"""Steps of models as people train them: `variants.py` compiles their launches, `launches.py` counts them.

A workload is a collection, a batch and an optimizer. Columns, ids per bag, numbers of tables and types are the real
ones. Tables are short (no kernel is compiled for a number of rows), and batches are as large as they must be to be
served as large ones are, by the same launches of the same variants: nothing changes above 16,384 occurrences.

    given = step(workload)          # forward, then backward with the update
    given[0].launches, given[1].launches
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.ops.triton.launches import Given, counted
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec import optimizer
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig, PoolingType

OPTIMIZERS: dict[str, tuple[type, dict[str, object]]] = {
    "sgd": (optimizer.SGD, {"lr": 0.1}),
    "momentum": (optimizer.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adagrad": (optimizer.Adagrad, {"lr": 0.1}),
    "row-wise adagrad": (optimizer.RowWiseAdagrad, {"lr": 0.1}),
    "row-wise adagrad, bounded": (
        optimizer.RowWiseAdagrad,
        {"lr": 0.1, "weight_decay": 0.1, "max_norm": 1.0},
    ),
    "adam": (optimizer.Adam, {"lr": 0.1}),
    "adam, rows count": (optimizer.Adam, {"lr": 0.1, "row_step": True}),
    "adamw": (optimizer.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
    "partial adam": (optimizer.PartialRowWiseAdam, {"lr": 0.1}),
    "lamb": (optimizer.LAMB, {"lr": 0.1, "weight_decay": 0.01}),
    "partial lamb": (optimizer.PartialRowWiseLAMB, {"lr": 0.1, "weight_decay": 0.01}),
    "lars": (optimizer.LarsSGD, {"lr": 0.1, "weight_decay": 0.01}),
}
FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn

# Ids per sample of the 26 features of Criteo's terabyte set made multi-hot, as MLPerf's DLRM-DCNv2 uses it.
MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)


@dataclass(frozen=True)
class Workload:
    dims: tuple[int, ...]  # per table
    lengths: tuple[int, ...]  # of every bag of a table's feature
    batch: int
    dtype: torch.dtype = FP32
    optimizer: str | None = "sgd"
    pooled: bool = True
    rows: int = 2000
    output: torch.dtype | None = None
    weighted: bool = False
    mean: bool = False
    ids: torch.dtype = torch.int64
    variable: bool = False  # features have batches of different sizes


def same(tables: int, dim: int, batch: int, length: int, **rest: object) -> Workload:
    return Workload((dim,) * tables, (length,) * tables, batch, **rest)  # type: ignore[arg-type]


POINTS = {
    "P1": same(32, 128, 64, 20),
    "P1 bf16": same(32, 128, 64, 20, dtype=BF16),
    "P2": same(26, 128, 1024, 1),
    "P2 bf16": same(26, 128, 1024, 1, dtype=BF16),
    "P3 bf16": same(64, 32, 128, 10, dtype=BF16),
    "small": same(4, 64, 1024, 10, rows=1000),
    "multi-hot": Workload((128,) * 26, MULTI_HOT, 128),
    "mixed dims": Workload((16, 32, 64, 128, 4, 256) * 4, (10,) * 24, 128),
    "unpooled": same(10, 128, 2048, 1, pooled=False),
    "unpooled bf16": same(10, 128, 2048, 1, pooled=False, dtype=BF16),
}
"""The points of `benchmarks/gpu_lookup.py`, with smaller batches."""


class Model:
    """A workload's collection, and batches of it."""

    def __init__(self, workload: Workload) -> None:
        self.workload = w = workload
        names = [f"f{t}" for t in range(len(w.dims))]
        self.module: EmbeddingBagCollection | EmbeddingCollection
        if w.pooled:
            kind = PoolingType.MEAN if w.mean else PoolingType.SUM
            bags = [
                EmbeddingBagConfig(w.rows, d, f"t_{f}", feature_names=[f], dtype=w.dtype, pooling=kind)
                for f, d in zip(names, w.dims, strict=True)
            ]
            self.module = EmbeddingBagCollection(bags, is_weighted=w.weighted, output_dtype=w.output)
        else:
            rows = [
                EmbeddingConfig(w.rows, d, f"t_{f}", feature_names=[f], dtype=w.dtype)
                for f, d in zip(names, w.dims, strict=True)
            ]
            self.module = EmbeddingCollection(rows, output_dtype=w.output)
        self.names = names
        if w.optimizer is not None:
            cls, kwargs = OPTIMIZERS[w.optimizer]
            apply_optimizer_in_backward(cls, self.module.parameters(), kwargs)

    def batch(self, size: int | None = None, lengths: tuple[int, ...] | None = None) -> KeyedJaggedTensor:
        """A batch of so many samples (the workload's), with bags of so many ids."""
        w = self.workload
        size, lengths = w.batch if size is None else size, lengths or w.lengths
        sizes = [size + (f % 2 if w.variable else 0) for f in range(len(lengths))]
        each = torch.tensor(lengths).repeat_interleave(torch.tensor(sizes))
        count = int(each.sum())
        ids = torch.randint(0, w.rows, (count,), dtype=w.ids)
        weights = torch.rand(count, requires_grad=True) if w.weighted else None
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), each.cumsum(0)])
        rest: dict[str, object] = {"stride_per_key_per_rank": [[n] for n in sizes]} if w.variable else {}
        return KeyedJaggedTensor(self.names, ids, weights, lengths=each, offsets=offsets, **rest)  # type: ignore[arg-type]

    def step(self, batch: KeyedJaggedTensor) -> tuple[Given, Given]:
        """What forward gives to the device, and what backward and update do."""
        if not self.workload.pooled:
            batch.length_per_key()  # known to the host: or else a sequence lookup's features are asked for
        with counted() as forward:
            out = self.module(batch)
        outputs: list[Tensor] = (
            [jagged.values() for jagged in out.values()] if isinstance(out, dict) else [out.values()]
        )
        grads = [torch.ones_like(o) for o in outputs]
        with counted() as backward:
            torch.autograd.backward(outputs, grads)
        return forward, backward


def step(workload: Workload) -> tuple[Given, Given]:
    """The second step of a workload: what a step is given once training runs."""
    model = Model(workload)
    batch = model.batch()
    model.step(batch)
    return model.step(batch)


def everything() -> Iterator[Workload]:
    """Types, widths, kinds of batches and optimizers, as models combine them."""
    for point in POINTS.values():
        yield point
        yield replace(point, optimizer="row-wise adagrad")
        yield replace(point, optimizer="adam")
    base = same(3, 128, 256, 7)
    for dtype in (FP32, BF16, FP16, FP8):
        for name in OPTIMIZERS:
            yield replace(base, dtype=dtype, optimizer=name)
            yield replace(base, dtype=dtype, optimizer=name, dims=(64,) * 3)
            yield replace(base, dtype=dtype, optimizer=name, pooled=False, dims=(256,) * 3)
        for output in (FP32, BF16, FP16):
            yield replace(base, dtype=dtype, output=output, optimizer="row-wise adagrad")
            yield replace(base, dtype=dtype, output=output, pooled=False)
        for dim in (
            1,
            2,
            3,
            4,
            8,
            12,
            16,
            24,
            32,
            48,
            64,
            80,
            96,
            100,
            192,
            256,
            300,
            384,
            512,
            768,
            1024,
            2048,
        ):
            yield replace(base, dims=(dim,) * 3, dtype=dtype, optimizer="row-wise adagrad")
            yield replace(base, dims=(dim,) * 3, dtype=dtype, optimizer="adam", pooled=False)
        for dim in (16, 64, 128, 300):
            some = replace(base, dims=(dim,) * 3, dtype=dtype)
            yield replace(some, batch=20)  # up to 512 ids
            yield replace(some, lengths=(1,) * 3)  # few ids
            yield replace(some, lengths=(1,) * 3, batch=20)
            yield replace(some, ids=torch.int32)
            yield replace(some, weighted=True)
            yield replace(some, weighted=True, batch=20, mean=True)
            yield replace(some, weighted=True, lengths=(1,) * 3)
            yield replace(some, mean=True)
            yield replace(some, variable=True)
            yield replace(some, variable=True, weighted=True)
            yield replace(some, optimizer=None)
            yield replace(some, optimizer=None, pooled=False)
            yield replace(some, pooled=False, ids=torch.int32)
