"""Launch of `update_runs` for a group of tables: tiles, spans, and arguments in the kernel's order.

Nouns as in `apply_runs.py` (span, tile) and `tables.py` (group).

    2.6 million occurrences of fp32 x 128 rows, no slots: tiles of 4 rows, spans of 32, 81,250 programs
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from tilerec.ops.runtime.triton.addresses import ceil_div
from tilerec.ops.runtime.triton.launch import launch
from tilerec.ops.update.triton.apply_runs import update_runs
from tilerec.ops.update.triton.rules import PreparedRule
from tilerec.ops.update.triton.runs import CHUNK, CHUNKS
from tilerec.ops.update.triton.sort import Record, Sorted, steps_of, warps_of
from tilerec.ops.update.triton.tables import TableGroup


def tile_rows(columns: int, element_slots: int) -> int:
    """Return the rows of a tile: 16 numbers a lane, half of that with slots per element; at most 16 rows."""
    return max(1, min(16, (256 if element_slots else 512) // columns))


def registers(columns: int) -> dict[str, int]:
    """Return the bound on a thread's registers, for tiles of so many columns.

    96 registers leave room for 21 warps on a multiprocessor. That costs up to 190 bytes of spills a thread, but is
    faster: on an H100 updates of fp32 x 128 rows take 2 to 4 % less time than with 104 registers (19 warps, no spills),
    those of bf16 rows 14 % less than with 128 (16 warps). Wide tiles have no bound: Adam with 512 columns would spill 1
    KiB.
    """
    return {} if torch.version.hip or columns > 128 else {"maxnreg": 96}


def _span(total: int, rows: int) -> int:
    """Return the sorted occurrences of a program: first enough programs for every GPU, then up to 8 tiles each."""
    return rows * max(1, min(8, total // (rows * 8192)))


def launch_update(
    group: TableGroup, numbers: Tensor, record: Record, ordered: Sorted, made: PreparedRule, weight: Tensor,
    slots: Sequence[Tensor], step: int, by_value: tuple[float, float], *, paces: Tensor, names: Tensor,
    ROUND: int, PER_TABLE: bool, NAMED: bool, runs: Tensor | None = None, rows_out: Tensor | None = None,
) -> None:  # fmt: skip
    nothing = ordered.keys  # unread pointer arguments must be valid, and of one dtype for all batches
    rows = tile_rows(group.columns, made.kinds.count(1))
    span = _span(record.total, rows)
    assert span <= CHUNK, "a run has at most a chunk in a span, whose sum is a fold of rows (runs.py)"
    scale = made.rule.h["grad_scale"]
    launch(update_runs, (ceil_div(record.total, span),),
        ordered.keys, ordered.places, pointer_or(ordered.scales, nothing), record.grad, weight, *slots,
        ordered.partials, ordered.supers, numbers, paces, names, ordered.status,
        pointer_or(runs, nothing), pointer_or(rows_out, nothing), record.total, span, ordered.levels, group.count,
        group.first_key, group.end_key, step, scale, *made.numbers, *by_value,
        TERMS=made.bundle.terms, APPLY=made.bundle.apply, MODE=made.mode, WD=made.decays, ROW_STEP=made.row_step,
        SUMS0=made.sums[0], SUMS1=made.sums[1], KIND0=made.kinds[0], KIND1=made.kinds[1], KIND2=made.kinds[2],
        KEEPS=made.bundle.keeps, READS=made.rule.keeps, GRAD_SCALED=scale != 1.0, SCALED=ordered.scales is not None,
        ROUND=ROUND, PER_TABLE=PER_TABLE, NAMED=NAMED, COMPACT=runs is not None, STEPS=steps_of(group.count),
        CHUNK=CHUNK, CHUNKS=CHUNKS, PITCH=ordered.pitch, ROWS=rows, COLUMNS=group.columns,
        VEC=group.vec, VEC_D=group.vec_d, VEC_G=record.vec, VEC_S=group.vec_s, num_warps=warps_of(rows * group.columns),
        enable_fp_fusion=False, **registers(group.columns),
    )  # fmt: skip


def device_guard(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which the tensor's GPU is current: Triton launches on the current GPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def pointer_or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """Return `tensor`, or `other` if it is None: a pointer argument must be valid even if it is not read."""
    return other if tensor is None else tensor
