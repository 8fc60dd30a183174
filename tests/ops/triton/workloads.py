"""Steps of models as people train them: `variants.py` compiles their launches, `launches.py` counts them.

A workload is a collection, a batch and an optimizer. Columns, ids per bag, numbers of tables and types are the real
ones. Tables are short (no kernel is compiled for a number of rows), and batches are as large as they must be to be
served as large ones are, by the same launches of the same variants: nothing changes above 65,536 occurrences.

    given = step(workload)          # forward, then backward with the update
    given[0].launches, given[1].launches
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.ops.triton.launches import Given, counted
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.ops.hash.definition import zch_assign_each_, zch_find
from tilerec.ops.hash.state import AssignOptions, HashRange, empty_state
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
    "P1": same(32, 128, 128, 20),
    "P1 bf16": same(32, 128, 128, 20, dtype=BF16),
    "P2": same(26, 128, 2600, 1),
    "P2 bf16": same(26, 128, 2600, 1, dtype=BF16),
    "P3 bf16": same(64, 32, 128, 10, dtype=BF16),
    "small": same(4, 64, 1024, 10, rows=1000),
    "multi-hot": Workload((128,) * 26, MULTI_HOT, 512),
    "mixed dims": Workload((16, 32, 64, 128, 4, 256) * 4, (10,) * 24, 300),
    "unpooled": same(10, 128, 6800, 1, pooled=False),
    "unpooled bf16": same(10, 128, 6800, 1, pooled=False, dtype=BF16),
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
        rest: dict[str, object] = {}
        if w.variable:
            inverse = torch.zeros(len(sizes), size, dtype=torch.int64)
            rest = {"stride_per_key_per_rank": [[n] for n in sizes], "inverse_indices": (self.names, inverse)}
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
    if workload.dtype == FP8:
        model.module.zero_grad(set_to_none=True)  # torch does not add gradients of fp8
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


# ------------------------------------------------------------------------------------------------ single ops

OPS = torch.ops.tilerec


class Segments:
    """Rows of 64 numbers and ids, in segments of 0 to 4 items; the ids are a view that begins anywhere."""

    def __init__(self, segments: int) -> None:
        self.lengths = torch.arange(segments) % 5
        self.offsets, self.total = _offsets(self.lengths), int(self.lengths.sum())
        self.rows, self.each = torch.zeros(self.total, 64), torch.zeros(segments, 64)
        self.ids = torch.arange(self.total + segments % 3)[segments % 3 :] % 100
        self.order = torch.arange(segments - 1, -1, -1)
        self.chosen = (self.offsets, self.order, _offsets(self.lengths[self.order]), self.total)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


Call = Callable[[], object]


def _on_segments(call: Callable[[Segments], object]) -> Callable[[int], Call]:
    def prepare(segments: int) -> Call:
        made = Segments(segments)
        return lambda: call(made)

    return prepare


def _bucketize(segments: int) -> Call:
    made, cuts = Segments(segments), torch.tensor([0, 10, 100])
    return lambda: OPS.bucketize_by_cuts(made.ids, made.lengths, cuts)


def _unpad(segments: int) -> Call:
    made, padded = Segments(segments), torch.zeros(segments, 4, 64)
    return lambda: OPS.padded_to_jagged(padded, made.offsets, made.total)


def _route(bags: int) -> Call:
    made, cuts = Segments(2 * bags), [0, 50, 100] * 2
    return lambda: OPS.route_ids(
        made.ids, made.offsets, [0, 1], [bags], cuts, [2, 2], [0, 1, 2, 3], False, torch.int64, "f@t,g@u"
    )


def _blocks(rows: int) -> tuple[list[int], ...]:
    """Two segments of rows of 64 numbers, side by side in a table of 128 columns."""
    return [rows, rows + 1], [64, 64], [0, 0], [0, 64], [128, 128]


def _pick(rows: int) -> Call:
    table, slots = torch.zeros(rows + 1, 128), torch.arange(rows + 1, dtype=torch.int32)
    return lambda: OPS.pick_rows(table, slots, *_blocks(rows))


def _place(rows: int) -> Call:
    table, slots = torch.zeros(rows + 1, 128), torch.arange(rows + 1, dtype=torch.int32)
    flat = torch.zeros((2 * rows + 1) * 64)
    return lambda: OPS.place_rows_(table, flat, slots, *_blocks(rows), [0, 0])


def _pack(form: str) -> Callable[[int], Call]:
    def prepare(rows: int) -> Call:
        numbers = torch.zeros(rows * 96)
        return lambda: OPS.pack_segments(numbers, [rows, rows], [64, 32], form)

    return prepare


def _unpack(form: str) -> Callable[[int], Call]:
    def prepare(rows: int) -> Call:
        packed = torch.zeros(rows * (96 + 8), dtype=torch.int8 if form == "int8" else torch.uint8)
        return lambda: OPS.unpack_segments(packed, [rows, rows], [64, 32], form, torch.float32)

    return prepare


def _hash(assign: bool) -> Callable[[int], Call]:
    def prepare(ids: int) -> Call:
        state, table, some = empty_state(4, 8), HashRange(4, 8, 8), torch.arange(ids)
        return lambda: (
            zch_assign_each_(some, state, table, AssignOptions(step=ids)) if assign else zch_find(some, state, table)
        )

    return prepare


CALLS: dict[str, Callable[[int], Call]] = {
    "segment_ids": _on_segments(lambda s: OPS.segment_ids(s.offsets, s.total)),
    "select_segments": _on_segments(lambda s: OPS.select_segments(s.rows, *s.chosen)),
    "select_segments_backward": _on_segments(lambda s: OPS.select_segments_backward(s.rows, *s.chosen)),
    "bucketize_by_cuts": _bucketize,
    "jagged_to_padded": _on_segments(lambda s: OPS.jagged_to_padded(s.rows, s.offsets, 3, 0.0)),
    "padded_to_jagged": _unpad,
    "segment_sum": _on_segments(lambda s: OPS.segment_sum(s.rows, s.offsets)),
    "repeat_segments": _on_segments(lambda s: OPS.repeat_segments(s.each, s.offsets, s.total)),
    "route_ids": _route,
    "pick_rows": _pick,
    "place_rows_": _place,
    "pack_segments int8": _pack("int8"),
    "pack_segments fp8": _pack("fp8"),
    "unpack_segments int8": _unpack("int8"),
    "unpack_segments fp8": _unpack("fp8"),
    "zch_find": _hash(False),
    "zch_assign_each_": _hash(True),
}
"""A call of an op, prepared for so many segments, bags, rows or ids."""

READS = ("zch_assign_each_",)
"""Of these a later kernel's loop reads what a kernel has written: it must run."""
