"""Triton kernels of the lookup ops on GPUs: `pooled_lookup`, `sequence_lookup` and `sample_weight_grad`.

`definition.py` defines the ops, with worked examples; this file describes their layout on the GPU.

Nouns
  tile, group, vec   of rows that are read: see `runtime/triton/rows.py`
  part     a tile of one feature: columns [column, column + TILE) of its rows and of its place in the output
  family   the parts whose tables have one data type and whose tiles one width; a family is one launch, whatever its
           tables and features
  chunk    CHUNK consecutive ids of a bag longer than LONG, counted from the bag's first id; the ids behind its last
           whole chunk are its rest
  slot     the number of a chunk: its first position divided by CHUNK, rounded up. Whole chunks do not overlap, so no
           two have the same slot, and every bag computes its own slots
  plane    the slots of one part of one reader of a key: parts that read the same ids have different planes
  reader   features that read the same key are its readers 0, 1, 2 …

A program of the pooled forward has GROUP bags of one part. It loads the ids of the next STEPS positions of each bag,
then the tiles of all of these rows, and adds only then, so that many loads are in flight. The sums run in fp32 in the
order of the occurrences, as on the CPU, and so have the CPU's bits (multiplications and additions are not fused).

A bag of a million ids would keep one program busy long after the others are done. So a launch of its own sums the
chunks first, one program per slot. Then the bag's program adds the sums of its chunks, in their order, and its rest.
The host knows no lengths, so there is a program for every slot that N ids can have. It searches for the bag that its
slot lies in; nearly always its slot has no chunk.

  CHUNK 4, LONG 8, bag [7, 20): chunks [7, 11) [11, 15) [15, 19) in slots 2, 3, 4; the rest is [19, 20)

With few ids (one per bag on average, or fewer), a program has four groups of bags. If none of these bags has two ids,
it copies the rows of all at once; else it processes one group after the other.

Kernels: `pooled.py`, `sample_weights.py`, `sequence.py`, and their common reads in `parts.py`. `layout.py` computes the
launches, and this file runs them.

Legend: F features, T tables, N ids, S parts of a family, G rows of a group, C columns of a tile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops.gradient.definition import bag_starts, new_ticket, pooled_blocks
from tilerec.ops.lookup.calls import PooledCall, PooledLayout, SequenceCall, WeightGradCall
from tilerec.ops.lookup.checks import (
    INDEX_TYPES,
    check_batch,
    check_gradient,
    check_layout,
    check_starts,
    pooled_shape,
    raise_bad_offsets,
    raise_other_dim,
    raise_uncovered,
)
from tilerec.ops.lookup.definition import (
    pooled_lookup_reference,
    raise_bad_id,
    sample_weight_grad_reference,
    sequence_lookup_reference,
)
from tilerec.ops.lookup.triton.layout import (
    Family,
    LookupConstants,
    check_memory,
    check_tables,
    launches_of,
    layout_of,
    types_of,
)
from tilerec.ops.lookup.triton.parts import CHUNK, LONG, OFFSET
from tilerec.ops.lookup.triton.pooled import chunk_kernel, pooled_kernel
from tilerec.ops.lookup.triton.sample_weights import sample_weight_chunk_kernel, sample_weight_kernel
from tilerec.ops.lookup.triton.sequence import sequence_kernel
from tilerec.ops.runtime.readback import runs_synchronously
from tilerec.ops.runtime.triton.addresses import (
    base_and_distances,
    cached_per_stream,
    ceil_div,
    constants,
    power_of_two,
    upload,
)
from tilerec.ops.runtime.triton.launch import GRID_Y, launch
from tilerec.ops.runtime.triton.reports import new_report, post, raise_due
from tilerec.ops.runtime.triton.rows import group_rows, reads, tile_width

OUTPUTS = (torch.float32, torch.bfloat16, torch.float16)
_STEPS = 8  # positions of each bag per iteration


def _bound(wide: int) -> dict[str, int]:
    """Return the option that limits registers to more than the kernels need.

    wide: how many of these there are: 16 columns a lane, weights, products.

    Without a limit the assembler saves some registers, and waits for one row of a turn before it loads the next
    (docs/gpu.md). AMD's compiler has no such option.
    """
    return {} if torch.version.hip else {"maxnreg": 80 + 16 * wide}


_WIDE_BOUND = _bound(1)

_WAVES = 4  # groups of a program if ids are few


@functools.lru_cache(maxsize=256)
def _serves(rows: tuple[torch.dtype, ...], dtype: torch.dtype, device: torch.device) -> bool:
    return dtype in OUTPUTS and all(reads(own, device) for own in rows)


def flat(values: Tensor, dtypes: Sequence[torch.dtype] = INDEX_TYPES) -> Tensor:
    """Return the values contiguous and in one of these dtypes (else in the first)."""
    return (values if values.dtype in dtypes else values.to(dtypes[0])).contiguous()


@dataclass(slots=True)
class RaiseReport:
    """Function that raises the error of a taken report."""

    names: str
    tables: tuple[int, ...]
    rows: tuple[int, ...]  # per feature
    ids: int
    pooled: bool = True

    def __call__(self, what: int, position: int, value: int) -> None:
        feature, kind = divmod(what, 2)
        if kind == OFFSET.value:
            raise_bad_offsets(self.names, self.tables, feature, position, value, self.ids, self.pooled)
        raise_bad_id(self.names, feature, position, value, self.rows[feature])


class PooledBatch(NamedTuple):
    """A pooled batch as kernel arguments; `runs` of variable batches: first bag, bags, place per feature."""

    ids: Tensor
    offsets: Tensor
    id_count: int
    bags: int  # of every feature; 0 for variable batches
    most_bags: int
    runs: Tensor | None
    slots: int
    few: bool  # ids: at most one per bag, on average
    split: bool  # the batch may have a long bag


def batch_of(dims: Sequence[int], ids: Tensor, offsets: Tensor, layout: PooledLayout) -> PooledBatch:
    """Return a checked batch as kernel arguments; `dims` are per feature."""
    batches = layout.batches
    ids, offsets = flat(ids), flat(offsets, (torch.int64,))
    bags = most = batches[0] if batches else 0
    runs = None
    if not layout.uniform:
        starts, bags_F = bag_starts(layout.keys, batches)
        places, _ = pooled_blocks(dims, bags_F, False)
        numbers = [number for run in zip(starts, bags_F, places, strict=True) for number in run]
        bags, most, runs = 0, max(bags_F, default=0), upload(numbers, ids.device)
    count = ids.shape[0]
    slots = -(-count // CHUNK.value)
    return PooledBatch(ids, offsets, count, bags, most, runs, slots, count < offsets.shape[0], count > LONG.value)


def _shape_of(shared: LookupConstants, layout: PooledLayout, offsets: Tensor, names: str) -> tuple[int, ...]:
    """Return the shape of the output; `pooled_shape` raises the errors of a bad batch."""
    _, keys, _, batches = layout
    if layout.uniform and 0 <= batches[0] * (shared.last_key + 1) < offsets.shape[0]:
        return (batches[0], shared.width)
    return pooled_shape(shared.dims, shared.last_key, keys, batches, offsets, names)


def pooled_lookup(call: PooledCall) -> tuple[Tensor, Tensor]:
    """Run `tilerec::pooled_lookup`."""
    weights, _, ids, offsets, sample_weights, layout, dtype, names = call
    check_batch(ids, offsets, sample_weights)
    device, types = ids.device, types_of(weights)
    if not _serves(types, dtype, device):
        return pooled_lookup_reference(call)
    raise_due(device)
    shared = layout_of(weights, ids, layout, types, dtype.itemsize, True, names)
    out = torch.empty(_shape_of(shared, layout, offsets, names), dtype=dtype, device=device)
    if out.numel() == 0:
        if offsets.shape[0] == 1 and ids.shape[0] and layout.tables:
            raise_uncovered(1, 0, ids.shape[0])
        return out, new_ticket()
    batch = batch_of(shared.dims, ids, offsets, layout)
    if sample_weights is not None:
        sample_weights = flat(sample_weights, (torch.float32,))
    report = new_report(device)
    for family in shared.families:
        last = offsets.shape[0] - 1 if family is shared.families[-1] else -1
        _sum_family(family, weights[family.table], out, batch, sample_weights, report, last)
    post(report, RaiseReport(names, shared.tables, shared.rows, batch.id_count))
    return out, new_ticket()


def _chunk_steps(family: Family) -> int:
    """Return the positions per iteration over a chunk: its one team reads as much as a program's teams elsewhere."""
    return _STEPS * min(family.group, 4)


def _sum_family(
    family: Family, base: Tensor, out: Tensor, batch: PooledBatch, sample_weights: Tensor | None, report: Tensor,
    last: int,
) -> None:  # fmt: skip
    """Sum a family's rows; `last` as in `pooled_kernel`."""
    ids, offsets, count, bags, most_bags, runs, slots, few, split = batch
    weighted, variable = sample_weights is not None, runs is not None
    # Arguments that a kernel does not read must be pointers, too.
    sample = ids if sample_weights is None else sample_weights
    own_runs = family.parts if runs is None else runs
    chunk_sums: Tensor = ids
    if split:
        places = family.planes * slots
        chunk_sums = torch.empty(places * family.tile, dtype=torch.float32, device=ids.device)
        launch(chunk_kernel, (places,),
            base, ids, offsets, sample, family.parts, own_runs, chunk_sums, report, count, bags, slots, family.count,
            TILE=family.tile, VEC=family.vec, STEPS=_chunk_steps(family), WEIGHTED=weighted, VARIABLE=variable,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    group, waves = family.group, _WAVES if few else 1
    for parts, part_count in launches_of(family):
        launch(pooled_kernel, (-(-most_bags // (group * waves)), part_count),
            base, out, ids, offsets, sample, parts, own_runs, chunk_sums, report, count, bags, slots, last,
            GROUP=group, TILE=family.tile, VEC=family.vec, OUT_VEC=family.out_vec, STEPS=_STEPS, WEIGHTED=weighted,
            VARIABLE=variable, SPLIT=split, WAVES=waves, num_warps=1, enable_fp_fusion=False,
            **_bound(weighted + (base.element_size() == 1)),
        )  # fmt: skip


def sample_weight_grad(call: WeightGradCall) -> Tensor:
    """Run `tilerec::sample_weight_grad`."""
    weights, ids, offsets, grad, layout = call
    check_batch(ids, offsets, None)
    device, types = ids.device, types_of(weights)
    if not _serves(types, grad.dtype, device):
        return sample_weight_grad_reference(call)
    raise_due(device)
    shared = layout_of(weights, ids, layout, types, grad.dtype.itemsize, False, "")
    wanted = _shape_of(shared, layout, offsets, "")
    check_gradient(grad, wanted, math.prod(wanted))
    out = torch.zeros(ids.shape[0], dtype=torch.float32, device=device)
    batch = batch_of(shared.dims, ids, offsets, layout)
    if not batch.most_bags:
        return out
    grad = grad.contiguous()
    report = new_report(device)
    for family in shared.families:
        _multiply_family(family, weights[family.table], out, batch, grad, report)
    names = ",".join(f"{f}@{t}" for f, t in enumerate(layout.tables))
    # On a GPU the lookup of the same batch reports bad ids, with names; here only interpreted kernels raise.
    raise_report = (
        RaiseReport(names, shared.tables, shared.rows, batch.id_count) if runs_synchronously(device) else _ignore_report
    )
    post(report, raise_report)
    return out


def _ignore_report(*_: int) -> None: ...


def _multiply_family(
    family: Family, base: Tensor, out: Tensor, batch: PooledBatch, grad: Tensor, report: Tensor
) -> None:
    ids, offsets, variable = batch.ids, batch.offsets, batch.runs is not None
    runs = family.parts if batch.runs is None else batch.runs
    if batch.split:
        launch(sample_weight_chunk_kernel, (batch.slots,),
            base, out, ids, offsets, grad, family.parts, runs, report, batch.id_count, batch.bags, family.count,
            GROUP=family.group, TILE=family.tile, VEC=family.vec, GRAD_VEC=family.out_vec, STEPS=_STEPS, ONE=family.one,
            ADD=family.reader > 0, VARIABLE=variable, num_warps=1, enable_fp_fusion=False, **_WIDE_BOUND,
        )  # fmt: skip
    for parts, part_count in launches_of(family):
        launch(sample_weight_kernel, (ceil_div(batch.most_bags, family.group), part_count),
            base, out, ids, offsets, grad, parts, runs, report, batch.id_count, batch.bags, GROUP=family.group,
            TILE=family.tile, VEC=family.vec, GRAD_VEC=family.out_vec, STEPS=_STEPS, ONE=family.one,
            ADD=family.reader > 0, VARIABLE=variable, SPLIT=batch.split, num_warps=1, enable_fp_fusion=False,
            **_WIDE_BOUND,
        )  # fmt: skip


class _Rows(NamedTuple):
    """Features of one data type in a sequence lookup."""

    features: Tensor  # int64 [F, 3], on the device
    table: int
    tile: int
    vec: int
    out_vec: int
    tiles: int  # of a row


class _Sequence(NamedTuple):
    """Constants shared by consecutive sequence lookups."""

    rows: tuple[int, ...]  # per feature
    dim: int
    families: tuple[_Rows, ...]

    @property
    def fits(self) -> bool:
        """Return True if one launch has enough programs for a row's tiles (up to 8 million columns)."""
        return all([family.tiles <= GRID_Y for family in self.families])  # noqa: C419 - faster for few items


@cached_per_stream(128)
def _sequence_layout(
    tables: tuple[int, ...], shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...],
    pointers: tuple[int, ...], names: str, out_size: int, device: torch.device,
) -> _Sequence:  # fmt: skip
    check_layout(shapes, tables, (), (), False)
    check_memory(pointers, shapes, tables, names)
    dim = shapes[tables[0]][1]
    for f, t in enumerate(tables):
        if shapes[t][1] != dim:
            raise_other_dim(names, tables, f, shapes[t][1], dim)
    families, sizes = [], list(map(math.prod, shapes))
    for dtype in dict.fromkeys(dtypes[t] for t in tables):
        own = [t for t in dict.fromkeys(tables) if dtypes[t] == dtype]
        start, distances = base_and_distances(pointers, sizes, own, dtype.itemsize)
        distance = dict(zip(own, distances, strict=True))
        numbers = [n for t in tables for n in (distance.get(t, 0), shapes[t][0] if t in distance else -1, dim)]
        places = [pointers[t] // dtype.itemsize for t in own if sizes[t]]
        tile = tile_width(dim, dtype.itemsize)
        vec, out_vec = power_of_two([*places, dim], 16 // dtype.itemsize), power_of_two([dim], 16 // out_size)
        sent = constants(tuple(numbers), device)
        families.append(_Rows(sent, start, tile, vec, out_vec, ceil_div(dim, tile)))
    return _Sequence(tuple([shapes[t][0] for t in tables]), dim, tuple(families))


def sequence_lookup(call: SequenceCall) -> tuple[Tensor, Tensor]:
    """Run `tilerec::sequence_lookup`; starts may be on the ids' device or on the CPU."""
    weights, _, ids, starts, tables, dtype, names = call
    check_batch(ids, starts, None)
    check_starts(starts, len(tables))
    device, types = ids.device, types_of(weights)
    if not tables or not _serves(types, dtype, device):
        return sequence_lookup_reference(call)
    raise_due(device)
    pointers, own = tuple(map(Tensor.data_ptr, weights)), tuple(tables)
    layout = _sequence_layout(own, tuple(map(Tensor.size, weights)), types, pointers, names, dtype.itemsize, device)
    check_tables(weights, ids, tables, names, 0 in pointers)
    if not layout.fits:
        return sequence_lookup_reference(call)
    raise_report = RaiseReport(names, own, layout.rows, ids.shape[0], pooled=False)
    known = starts.device != device
    starts = known_starts(starts, raise_report, device) if known else flat(starts, (torch.int64,))
    count = ids.shape[0]
    out = torch.empty((count, layout.dim), dtype=dtype, device=device)
    ids = flat(ids)
    report = new_report(device)
    for number, family in enumerate(layout.families):
        group = group_rows(family.tile, family.vec) * _STEPS
        # One program at least: it checks the starts of an empty batch, too.
        launch(sequence_kernel, (max(ceil_div(count, group), 1), family.tiles),
            weights[family.table], out, ids, starts, family.features, report, count, len(own), GROUP=group,
            TILE=family.tile, VEC=family.vec, OUT_VEC=family.out_vec, CHECK=number == 0 and not known, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    post(report, raise_report)
    return out, new_ticket()


def known_starts(starts: Tensor, raise_report: RaiseReport, device: torch.device) -> Tensor:
    """Check starts that the host has and upload them; raise an `InputError` for wrong ones."""
    if starts.device.type != "cpu":
        raise InputError(f"A lookup's starts are on {starts.device}, the ids on {device}; move one of them with .to().")
    bounds = starts.tolist()
    for i, bound in enumerate(bounds):
        before = bounds[i - 1] if i else 0
        if (
            not before <= bound <= raise_report.ids
            or (i == 0 and bound)
            or (i == len(bounds) - 1 and bound != raise_report.ids)
        ):
            raise_report(max(i - 1, 0) * 2 + OFFSET.value, i, bound)
    return upload(bounds, device)


KERNELS: dict[str, Callable[..., Any]] = {
    "pooled_lookup": pooled_lookup,
    "sequence_lookup": sequence_lookup,
    "sample_weight_grad": sample_weight_grad,
}
"""Kernels by op name."""
