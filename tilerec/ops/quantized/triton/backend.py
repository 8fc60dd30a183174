"""Lookups in quantized rows on GPUs: `quantized_pooled_lookup` and `quantized_sequence_lookup`.

The kernels are in `kernels.py`; this file computes their launches. Tables whose memory does not begin at a multiple of
4 bytes, and outputs of other dtypes, use the reference.

Legend: F features, S parts of a family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.ops.gradient.definition import pooled_blocks
from tilerec.ops.lookup.checks import check_batch, check_layout, check_starts, pooled_shape, raise_uncovered
from tilerec.ops.lookup.triton.backend import OUTPUTS, RaiseReport, batch_of, flat, known_starts
from tilerec.ops.lookup.triton.layout import check_memory, check_tables, types_of
from tilerec.ops.quantized.calls import QuantizedPooledCall, QuantizedSequenceCall
from tilerec.ops.quantized.checks import check_one_dim, check_rows
from tilerec.ops.quantized.definition import quantized_pooled_reference, quantized_sequence_reference
from tilerec.ops.quantized.triton.kernels import quantized_pooled_kernel, quantized_sequence_kernel
from tilerec.ops.runtime.triton.addresses import base_and_distances, cached_per_stream, ceil_div, constants
from tilerec.ops.runtime.triton.launch import GRID_Y, launch
from tilerec.ops.runtime.triton.reports import new_report, post, raise_due
from tilerec.ops.runtime.triton.rows import reads
from tilerec.spec.quantized_row import row_bytes

_TILE = 128  # most columns of a tile
_GROUP_NUMBERS = 512  # columns of all rows of a group: 16 per lane
_STEPS = 4  # positions of each bag per iteration


class _Family(NamedTuple):
    """Parts, or features, of one launch."""

    numbers: Tensor  # int64 [S, FIELDS] or [F, 3], on the device
    parts: int  # or tiles of a row: programs on the grid's second axis
    table: int  # distances count from its memory
    bits: int
    tile: int

    @property
    def group(self) -> int:
        return _GROUP_NUMBERS // self.tile


class _Constants(NamedTuple):
    """Constants shared by consecutive lookups; `rows` and `dims` are per feature."""

    rows: tuple[int, ...]
    dims: tuple[int, ...]
    last_key: int
    families: tuple[_Family, ...]


class _Tables(NamedTuple):
    """Facts about the tables of a call, per table."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    pointers: tuple[int, ...]
    dims: tuple[int, ...]
    bits: tuple[int, ...]

    @staticmethod
    def of(call: QuantizedPooledCall | QuantizedSequenceCall) -> _Tables:
        weights = call.weights
        return _Tables(
            tuple(map(Tensor.size, weights)), types_of(weights), tuple(map(Tensor.data_ptr, weights)),
            tuple(call.dims), tuple(call.bits),
        )  # fmt: skip

    def served(self, device: torch.device) -> bool:
        """Return True if the kernels read all tables."""
        each = zip(self.dtypes, self.pointers, self.bits, strict=True)
        return all(pointer % 4 == 0 if bits else reads(dtype, device) for dtype, pointer, bits in each)

    def by_kind(self, tables: Sequence[int]) -> dict[tuple[int, torch.dtype], list[int]]:
        """Return the features of each kind of rows: bits and dtype."""
        kinds: dict[tuple[int, torch.dtype], list[int]] = {}
        for feature, t in enumerate(tables):
            kinds.setdefault((self.bits[t], self.dtypes[t]), []).append(feature)
        return kinds

    def places(self, own: Sequence[int], dtype: torch.dtype) -> tuple[int, list[int]]:
        """Return the base among these tables, and the distance to each in elements."""
        return base_and_distances(self.pointers, list(map(math.prod, self.shapes)), own, dtype.itemsize)

    def stride(self, t: int) -> int:
        return row_bytes(self.dims[t], self.bits[t]) if self.bits[t] else self.dims[t]


def _tile(dim: int) -> int:
    return min(1 << max(dim - 1, 0).bit_length(), _TILE)


@cached_per_stream(128)
def _pooled_layout(
    tables: tuple[int, ...], keys: tuple[int, ...], means: tuple[int, ...], facts: _Tables, uniform: bool,
    device: torch.device, names: str,
) -> _Constants:  # fmt: skip
    check_rows(*facts[:2], *facts[3:])
    check_layout(facts.shapes, tables, keys, means, True)
    check_memory(facts.pointers, facts.shapes, tables, names)
    dims = tuple([facts.dims[t] for t in tables])
    outputs, _ = pooled_blocks(dims, [0] * len(dims), True)
    families = []
    for (bits, dtype), members in facts.by_kind(tables).items():
        for tile in sorted({_tile(dims[f]) for f in members}):
            own = [f for f in members if _tile(dims[f]) == tile]
            start, distances = facts.places([tables[f] for f in own], dtype)
            numbers = [
                number
                for f, distance in zip(own, distances, strict=True)
                for column in range(0, dims[f], tile)
                for number in (
                    distance, facts.shapes[tables[f]][0], dims[f], column, keys[f], outputs[f],
                    sum(dims) if uniform else dims[f], means[f], f, facts.stride(tables[f]),
                )
            ]  # fmt: skip
            families.append(_Family(constants(tuple(numbers), device), len(numbers) // 10, start, bits, tile))
    rows = tuple([facts.shapes[t][0] for t in tables])
    return _Constants(rows, dims, max(keys, default=-1), tuple(families))


def _heads(weight: Tensor, bits: int) -> Tensor:
    """Return a table's memory as int32, for the scales; of floats any tensor."""
    return weight.view(torch.int32) if bits else weight


def quantized_pooled_lookup(call: QuantizedPooledCall) -> Tensor:
    """Run `tilerec::quantized_pooled_lookup`."""
    weights, _, _, ids, offsets, sample_weights, layout, dtype, names = call
    check_batch(ids, offsets, sample_weights)
    device, facts, tables = ids.device, _Tables.of(call), tuple(layout.tables)
    if dtype not in OUTPUTS or not facts.served(device):
        return quantized_pooled_reference(call)
    raise_due(device)
    shared = _pooled_layout(tables, tuple(layout.keys), tuple(layout.means), facts, layout.uniform, device, names)
    check_tables(weights, ids, tables, names, 0 in facts.pointers)
    if any([family.parts > GRID_Y for family in shared.families]):  # noqa: C419 - faster for few items
        return quantized_pooled_reference(call)
    shape = pooled_shape(shared.dims, shared.last_key, layout.keys, layout.batches, offsets, names)
    out = torch.empty(shape, dtype=dtype, device=device)
    if out.numel() == 0:
        if offsets.shape[0] == 1 and ids.shape[0] and tables:
            raise_uncovered(1, 0, ids.shape[0])
        return out
    batch = batch_of(shared.dims, ids, offsets, layout)
    weighted, variable = sample_weights is not None, batch.runs is not None
    sample = batch.ids if sample_weights is None else flat(sample_weights, (torch.float32,))
    report = new_report(device)
    for family in shared.families:
        base, group = weights[family.table], family.group
        last = offsets.shape[0] - 1 if family is shared.families[-1] else -1
        launch(quantized_pooled_kernel, (ceil_div(batch.most_bags, group), family.parts),
            base, _heads(base, family.bits), out, batch.ids, batch.offsets, sample, family.numbers,
            family.numbers if batch.runs is None else batch.runs, report, batch.id_count, batch.bags, last,
            BITS=family.bits, GROUP=group, TILE=family.tile, STEPS=_STEPS, WEIGHTED=weighted, VARIABLE=variable,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    post(report, RaiseReport(names, tables, shared.rows, batch.id_count))
    return out


@cached_per_stream(128)
def _sequence_layout(tables: tuple[int, ...], facts: _Tables, device: torch.device, names: str) -> _Constants:
    check_rows(*facts[:2], *facts[3:])
    check_layout(facts.shapes, tables, (), (), False)
    check_one_dim(facts.dims, tables, names)
    check_memory(facts.pointers, facts.shapes, tables, names)
    dim = facts.dims[tables[0]]
    families = []
    for (bits, dtype), members in facts.by_kind(tables).items():
        start, distances = facts.places([tables[f] for f in members], dtype)
        distance = dict(zip(members, distances, strict=True))
        numbers = [
            number
            for f, t in enumerate(tables)
            for number in (distance.get(f, 0), facts.shapes[t][0] if f in distance else -1, facts.stride(t))
        ]
        families.append(_Family(constants(tuple(numbers), device), ceil_div(dim, _tile(dim)), start, bits, _tile(dim)))
    rows = tuple([facts.shapes[t][0] for t in tables])
    return _Constants(rows, (dim,) * len(tables), -1, tuple(families))


def quantized_sequence_lookup(call: QuantizedSequenceCall) -> Tensor:
    """Run `tilerec::quantized_sequence_lookup`; starts may be on the ids' device or on the CPU."""
    weights, _, _, ids, starts, _, dtype, names = call
    check_batch(ids, starts, None)
    device, facts, tables = ids.device, _Tables.of(call), tuple(call.tables)
    check_starts(starts, len(tables))
    if not tables or dtype not in OUTPUTS or not facts.served(device):
        return quantized_sequence_reference(call)
    raise_due(device)
    shared = _sequence_layout(tables, facts, device, names)
    check_tables(weights, ids, tables, names, 0 in facts.pointers)
    if shared.families[0].parts > GRID_Y:
        return quantized_sequence_reference(call)
    count, dim = ids.shape[0], shared.dims[0]
    raise_report = RaiseReport(names, tables, shared.rows, count, pooled=False)
    known = starts.device != device
    starts = known_starts(starts, raise_report, device) if known else flat(starts, (torch.int64,))
    out = torch.empty((count, dim), dtype=dtype, device=device)
    ids, report = flat(ids), new_report(device)
    for number, family in enumerate(shared.families):
        base = weights[family.table]
        # One program at least: it checks the starts of an empty batch, too.
        launch(quantized_sequence_kernel, (max(ceil_div(count, family.group), 1), family.parts),
            base, _heads(base, family.bits), out, ids, starts, family.numbers, report, count, len(tables), dim,
            BITS=family.bits, GROUP=family.group, TILE=family.tile, CHECK=number == 0 and not known, num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip
    post(report, raise_report)
    return out


KERNELS: dict[str, Callable[..., Any]] = {
    "quantized_pooled_lookup": quantized_pooled_lookup,
    "quantized_sequence_lookup": quantized_sequence_lookup,
}
"""Kernels by op name."""
