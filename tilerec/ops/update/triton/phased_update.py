"""Rules in phases, for rows that are split by columns.

Nouns
  part      some columns of a table's rows; its rule runs in phases, between which the row sums are added over the parts
  block     8 neighbouring columns of the whole table, aligned; a part's tile begins at the block that contains its
            first column, `shift` columns before it
  numbers   of a part: PER_PART numbers, uploaded in every call, since rows and gradients are new each time

Sums within a block are a fixed tree, ((x0+x1)+(x2+x3))+((x4+x5)+(x6+x7)), and blocks are added in ascending order. So
the bits are the reference's, and do not depend on where the columns are split. (In the kernel for whole rows,
`apply_runs.py`, the warp adds a row in its own order: the same bits every time, and equal to these up to rounding.)

    columns 5 … 10 of a row: shift 5, tile of 16 columns from 0, blocks (x5 + x6 + x7) and (x8 + x9 + x10)

The host never waits for the device.

Legend: T parts or tables, U distinct rows, R rows of a tile, C columns of a tile, W columns of a part, K sums of a
phase, P sums of the phases so far.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.ops.runtime.triton.addresses import base_and_distances, capturing, ceil_div, upload
from tilerec.ops.runtime.triton.launch import GRID_Y, launch
from tilerec.ops.runtime.triton.reports import new_report, post, raise_due
from tilerec.ops.runtime.triton.rows import take_report
from tilerec.ops.update.calls import ApplyCall, PartialsCall, PartRows, RuleTables
from tilerec.ops.update.checks import check_names, check_parts, check_tables, raise_bad_row
from tilerec.ops.update.counts import check_counts
from tilerec.ops.update.parts import block_count, rule_apply_reference_, rule_partials_reference
from tilerec.ops.update.rules import BLOCK
from tilerec.ops.update.triton.counts import pace_table, paces_on_device, read_pace, refuse_frozen_counts
from tilerec.ops.update.triton.launch import device_guard
from tilerec.ops.update.triton.rules import PreparedRule, has_kernels, prepare_rule
from tilerec.ops.update.triton.slots import load_slots, names_of_rows, store_rows, store_slots
from tilerec.ops.update.triton.sort import warps_of
from tilerec.ops.update.triton.tables import is_supported

PER_PART = 24


@triton.jit
def _block_sums(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return sums over aligned blocks of 8 columns: [R, C] -> [R, C / 8], each by the same tree."""
    even, odd = tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (ROWS, COLUMNS // 4, 2)))
    even, odd = tl.split(tl.reshape(even + odd, (ROWS, COLUMNS // 8, 2)))
    return even + odd


@triton.jit
def _read_part(
    rows, grads, scalars, numbers, report, grad_scale,
    SUMS: tl.constexpr, GRAD_SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return a program's rows of a part: numbers, masks, positions, gradients and the sums so far."""
    u = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = u < tl.load(numbers)
    row = tl.load(rows + (tl.load(numbers + 1) + u), mask=here, other=0)
    bad = here & ((row < 0) | (row >= tl.load(numbers + 14)))
    if tl.max(bad.to(tl.int32), axis=0) > 0:
        place = tl.min(tl.where(bad, u, 0x7FFFFFFFFFFFFFFF), axis=0)
        take_report(report, tl.sum(tl.where(u == place, row, 0), axis=0), tl.load(numbers + 10), place)
    take = here & (bad == 0)
    width = tl.load(numbers + 15)
    columns = tl.arange(0, COLUMNS)[None, :] - tl.load(numbers + 22)
    inside = (columns >= 0) & (columns < width)
    at = tl.load(numbers + 16) + u * width
    g = tl.load(grads + (at[:, None] + columns), mask=take[:, None] & inside, other=0.0)
    whole = tl.min(tl.where(tl.abs(g) < float("inf"), 1, 0), axis=1)
    if GRAD_SCALED:
        g = tl.div_rn(g, grad_scale)
    at = scalars + (tl.load(numbers + 17) + u)
    stride = tl.load(numbers + 18)
    z0 = 0.0
    z1 = 0.0
    z2 = 0.0
    if SUMS >= 1:
        z0 = tl.load(at, mask=take, other=0.0)[:, None]
    if SUMS >= 2:
        z1 = tl.load(at + stride, mask=take, other=0.0)[:, None]
    if SUMS >= 3:
        z2 = tl.load(at + 2 * stride, mask=take, other=0.0)[:, None]
    return u, here, row, take, width, columns, inside, g, whole, (z0, z1, z2)


@triton.jit
def part_sums(
    rows, grads, scalars, weights, slot0, slot1, slot2, out, meta, paces, report, grad_scale,
    h1, h2, h3, h4, h5, h6,
    TERMS: tl.constexpr, PHASE: tl.constexpr, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr,
    SUMS: tl.constexpr, KINDS: tl.constexpr, FINITE: tl.constexpr, KIND0: tl.constexpr, KIND1: tl.constexpr,
    KIND2: tl.constexpr, GRAD_SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the block sums of rows i * ROWS … of a phase's KINDS terms; the program's number is (i, part).

    With FINITE, also write 1 for rows whose gradient is finite, else 0. SUMS: of the phases before. Out [U, KINDS +
    FINITE, blocks].
    """
    part = tl.program_id(1)
    numbers = meta + part * 24
    if tl.program_id(0).to(tl.int64) * ROWS < tl.load(numbers):
        u, here, row, take, width, columns, inside, g, whole, z = _read_part(
            rows, grads, scalars, numbers, report, grad_scale, SUMS, GRAD_SCALED, ROWS, COLUMNS
        )
        _, e0, e1, h0, h7 = read_pace(paces, tl.load(numbers + 10))
        start = tl.load(numbers + 2) + row * width
        w = tl.load(weights + (start[:, None] + columns), mask=take[:, None] & inside, other=0.0).to(tl.float32)
        firsts = (tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5))
        slots = (slot0, slot1, slot2)
        s = load_slots(slots, firsts, row, width, take, columns, inside, KIND0, KIND1, KIND2, 1)
        dim = tl.zeros((ROWS, 1), tl.float32) + tl.load(numbers + 11).to(tl.float32)
        h = (h0, h1, h2, h3, h4, h5, h6, h7)
        x0, x1 = TERMS(PHASE, g, w, s, z, dim, h, (e0, e1), MODE, WD, ROW_STEP)
        blocks = tl.load(numbers + 20)
        block = tl.arange(0, COLUMNS // 8)[None, :]
        at = (tl.load(numbers + 19) + u * (KINDS + FINITE) * blocks)[:, None] + block
        wanted = here[:, None] & (block < blocks)
        tl.store(out + at, _block_sums(tl.where(inside, x0, 0.0), ROWS, COLUMNS), mask=wanted)
        if KINDS >= 2:
            tl.store(out + at + blocks, _block_sums(tl.where(inside, x1, 0.0), ROWS, COLUMNS), mask=wanted)
        if FINITE:
            finite = tl.zeros((ROWS, COLUMNS // 8), tl.float32) + whole.to(tl.float32)[:, None]
            tl.store(out + at + KINDS * blocks, finite, mask=wanted)


@triton.jit
def add_block_sums(sums, out, meta, EACH: tl.constexpr, FINITE: tl.constexpr, BLOCK: tl.constexpr):
    """Add blocks in ascending order: sums [U, EACH, blocks] -> [U, EACH]; with FINITE the last of EACH is a flag.

    The program's number is (i, part).
    """
    numbers = meta + tl.program_id(1) * 24
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = n < tl.load(numbers) * EACH
    blocks = tl.load(numbers + 20)
    at = sums + (tl.load(numbers + 19) + n * blocks)
    flag = tl.load(at, mask=here & (blocks > n * 0), other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(blocks):
        total += tl.load(at + block, mask=here, other=0.0)
    if FINITE:
        total = tl.where(n % EACH == EACH - 1, flag, total)
    tl.store(out + (tl.load(numbers + 21) + n), total, mask=here)


@triton.jit
def apply_to_parts(
    rows, grads, scalars, weights, slot0, slot1, slot2, names, meta, paces, report, grad_scale,
    h1, h2, h3, h4, h5, h6,
    APPLY: tl.constexpr, MODE: tl.constexpr, WD: tl.constexpr, ROW_STEP: tl.constexpr, SUMS: tl.constexpr,
    KIND0: tl.constexpr, KIND1: tl.constexpr, KIND2: tl.constexpr, GRAD_SCALED: tl.constexpr, ROUND: tl.constexpr,
    NAMED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write rows i * ROWS … of a part and their slots, given the sums of all phases; (i, part) is the program."""
    part = tl.program_id(1)
    numbers = meta + part * 24
    if tl.program_id(0).to(tl.int64) * ROWS < tl.load(numbers):
        _, _, row, take, width, columns, inside, g, _, z = _read_part(
            rows, grads, scalars, numbers, report, grad_scale, SUMS, GRAD_SCALED, ROWS, COLUMNS
        )
        t, e0, e1, h0, h7 = read_pace(paces, tl.load(numbers + 10))
        start = tl.load(numbers + 2) + row * width
        w = tl.load(weights + (start[:, None] + columns), mask=take[:, None] & inside, other=0.0).to(tl.float32)
        firsts = (tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5))
        slots = (slot0, slot1, slot2)
        s = load_slots(slots, firsts, row, width, take, columns, inside, KIND0, KIND1, KIND2, 1)
        dim = tl.zeros((ROWS, 1), tl.float32) + tl.load(numbers + 11).to(tl.float32)
        h = (h0, h1, h2, h3, h4, h5, h6, h7)
        w, s = APPLY(g, w, s, z, dim, h, (e0, e1), MODE, WD, ROW_STEP)
        name = names_of_rows(names, numbers, row, take, NAMED)
        if COLUMNS > 512:
            # Several warps have read the row's slots, and one of them writes the new values.
            tl.debug_barrier()
        store_rows(weights, w, start, take, columns, inside, numbers, name, t, ROUND, ROWS, COLUMNS, 1)
        store_slots(slots, s, firsts, row, width, take, columns, inside, KIND0, KIND1, KIND2, 1)


class _Parts:
    """Parts of one data type in a call, as kernel arguments."""

    def __init__(
        self, own: Sequence[int], tables: RuleTables, given: PartRows, kinds: str, names: Sequence[Tensor]
    ) -> None:
        self.own, self.tables, self.dims = own, tables, given.dims
        each = len(kinds)
        self.weights = [tables.weights[t] for t in own]
        self.slots = [[tables.slots[t * each + k] for t in own] for k in range(each)]
        self.rows = [given.rows[t].to(torch.int64).contiguous() for t in own]
        self.grads = [given.grads[t].contiguous() for t in own]
        self.scalars = []
        # Sums may have any stride (those of several tables are neighbours); a sum's rows must be dense.
        for t in own:
            s = given.scalars[t].to(torch.float32)
            self.scalars.append(s if s.shape[1] <= 1 or s.stride(1) == 1 else s.contiguous())
        self.names = [names[t] for t in own] if names else []
        self.counts = [r.numel() for r in self.rows]
        self.most = max(self.counts)

    def numbers(self, outs: Sequence[tuple[int, int]]) -> Tensor:
        """Return the numbers of all parts, uploaded.

        `outs`: per part of the call, the starts of its block sums and of its sums.
        """
        listed = [self.rows, self.weights, *self.slots, self.grads, self.scalars]
        self.bases, apart = [], []
        for tensors in [*listed, *([self.names] if self.names else [])]:
            start, distances = base_and_distances(
                [x.data_ptr() for x in tensors], [x.numel() for x in tensors], range(len(tensors)),
                tensors[0].element_size(),
            )  # fmt: skip
            self.bases.append(tensors[start])
            apart.append(distances)
        flat: list[int] = []
        each, row_offsets, column_offsets = (
            len(self.slots),
            self.tables.row_offsets,
            self.tables.column_offsets,
        )
        for i, t in enumerate(self.own):
            row, weight, *slots = (distances[i] for distances in apart[: 2 + each])
            grad, scalar = apart[2 + each][i], apart[3 + each][i]
            width, shift = self.weights[i].shape[1], column_offsets[t] % BLOCK
            flat += [self.counts[i], row, weight, *slots, *[0] * (3 - each)]
            flat += [row_offsets[t], column_offsets[t] - shift, *self.tables.seeds[2 * t : 2 * t + 2], t]
            flat += [self.dims[t]]
            flat += [apart[4 + each][i], int(self.names[i].numel() > 0)] if self.names else [0, 0]
            flat += [self.weights[i].shape[0], width, grad, scalar, self.scalars[i].stride(0), outs[t][0]]
            flat += [block_count(column_offsets[t], width), outs[t][1], shift, 0]
        return upload(flat, self.rows[0].device)

    def columns(self) -> int:
        """Return the columns of a tile that holds every part, from the block in which the part begins."""
        return max(
            triton.next_power_of_2(self.tables.column_offsets[t] % BLOCK + w.shape[1])
            for t, w in zip(self.own, self.weights, strict=True)
        )


def _by_type(tables: RuleTables, given: PartRows, kinds: str, names: Sequence[Tensor]) -> list[_Parts]:
    members: dict[torch.dtype, list[int]] = {}
    for t, weight in enumerate(tables.weights):
        if given.rows[t].numel():
            members.setdefault(weight.dtype, []).append(t)
    # Parts are the second axis of a grid, which GRID_Y limits.
    return [
        _Parts(own[first : first + GRID_Y], tables, given, kinds, names)
        for own in members.values()
        for first in range(0, len(own), GRID_Y)
    ]


def _serves(tables: RuleTables, grads: Sequence[Tensor]) -> bool:
    return (
        bool(grads)
        and has_kernels(tables.rule)
        and {g.dtype for g in grads} == {torch.float32}
        and is_supported(tables.weights[0].device, grads[0], tables)
        and all(tables.columns)
    )


def _checked(op: str, tables: RuleTables, parts: PartRows, phase: int | None) -> PreparedRule:
    """Return the call's rule; raise the reference's errors, except those for values on the device."""
    raise_due(tables.weights[0].device)
    check_counts(op, tables)
    made = prepare_rule(tables.rule, tables.hyper)
    check_tables(op, tables, made.slots, parts.dims)
    check_parts(op, made.rule, tables, parts, phase)
    return made


def _tile(columns: int) -> tuple[int, int]:
    """Return the columns and rows of a tile."""
    columns = max(columns, BLOCK)
    return columns, max(1, min(16, 256 // columns))


def _rule_arguments(made: PreparedRule) -> dict[str, object]:
    return {
        "MODE": made.mode, "WD": made.decays, "ROW_STEP": made.row_step, "KIND0": made.kinds[0], "KIND1": made.kinds[1],
        "KIND2": made.kinds[2], "GRAD_SCALED": made.rule.h["grad_scale"] != 1.0,
    }  # fmt: skip


def rule_partials_of_tables(call: PartialsCall) -> Tensor:
    """See `parts.py`. Every operation is rounded once, and sums are in the reference's order."""
    tables, rows, phase, exact, finite = call
    if not _serves(tables, rows.grads):
        return rule_partials_reference(call)
    op, device = "rule_partials", tables.weights[0].device
    made = _checked(op, tables, rows, phase)
    each = made.sums[phase] + int(finite)
    sums = [each * r.numel() for r in rows.rows]
    blocks = [block_count(offset, w) for offset, w in zip(tables.column_offsets, tables.columns, strict=True)]
    sizes = [n * count for n, count in zip(sums, blocks, strict=True)]
    starts = [itertools.accumulate(own[:-1], initial=0) for own in (sizes, sums)]
    outs = list(zip(*starts, strict=True))
    out = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    added = out if exact else torch.empty(sum(sums), dtype=torch.float32, device=device)
    with device_guard(out):
        report = new_report(device)
        paces = _paces(made, tables, False)
        for parts in _by_type(tables, rows, made.slots, []):
            numbers = parts.numbers(outs)
            at_rows, at_weights, *at_slots, at_grads, at_scalars = parts.bases
            at_slots += [at_rows] * (3 - len(at_slots))
            columns, height = _tile(parts.columns())
            launch(
                part_sums, (ceil_div(parts.most, height), len(parts.own)), at_rows, at_grads, at_scalars,
                at_weights, *at_slots, out, numbers, paces, report,
                made.rule.h["grad_scale"], *made.numbers[1:7], TERMS=made.bundle.terms, PHASE=phase,
                SUMS=sum(made.sums[:phase]), KINDS=made.sums[phase], FINITE=int(finite), ROWS=height, COLUMNS=columns,
                **_rule_arguments(made), num_warps=warps_of(height * columns), enable_fp_fusion=False,
            )  # fmt: skip
            if not exact:
                launch(
                    add_block_sums, (ceil_div(parts.most * each, 128), len(parts.own)), out, added, numbers, EACH=each,
                    FINITE=finite, BLOCK=128, num_warps=4,
                )  # fmt: skip
        post(report, _row_error(op, tables))
    return added


def _paces(made: PreparedRule, tables: RuleTables, advance: bool) -> Tensor:
    """Return per part of the call its update count, paces and rates."""
    device = tables.weights[0].device
    if tables.counts:
        return paces_on_device(made, tables, device, advance)
    if capturing():
        refuse_frozen_counts(made, [w.dtype for w in tables.weights])
    return pace_table(made, tables.steps, device)


def _row_error(op: str, tables: RuleTables) -> functools.partial[None]:
    return functools.partial(_raise_bad_row, op, tuple(tables.rows))


def _raise_bad_row(op: str, rows: Sequence[int], row: int, part: int, place: int) -> None:
    raise_bad_row(op, row, part, place, rows[part], part)


def rule_apply_to_tables_(call: ApplyCall) -> None:
    """See `parts.py`. Every operation is rounded once, and sums are in the reference's order."""
    tables, rows = call
    if not _serves(tables, rows.grads):
        rule_apply_reference_(call)
        return
    op, device = "rule_apply_", tables.weights[0].device
    made = _checked(op, tables, rows, None)
    names = check_names(op, tables)
    outs = [(0, 0)] * len(tables.weights)
    with device_guard(tables.weights[0]):
        report = new_report(device)
        paces = _paces(made, tables, True)
        for parts in _by_type(tables, rows, made.slots, names):
            numbers = parts.numbers(outs)
            at_rows, at_weights, *at_slots, at_grads, at_scalars = parts.bases[: 4 + len(made.slots)]
            at_slots += [at_rows] * (3 - len(at_slots))
            columns, height = _tile(parts.columns())
            rounds = made.rule.h["stochastic_rounding"] and parts.weights[0].dtype != torch.float32
            launch(
                apply_to_parts, (ceil_div(parts.most, height), len(parts.own)), at_rows, at_grads, at_scalars,
                at_weights, *at_slots, parts.bases[-1] if names else at_rows, numbers,
                paces, report, made.rule.h["grad_scale"], *made.numbers[1:7], APPLY=made.bundle.apply,
                SUMS=sum(made.sums), ROUND=int(bool(rounds)), NAMED=bool(names), ROWS=height, COLUMNS=columns,
                **_rule_arguments(made), num_warps=warps_of(height * columns), enable_fp_fusion=False,
            )  # fmt: skip
        post(report, _row_error(op, tables))
