"""Update counts and learning rates on the GPU: one small launch advances the counts and computes the pace table.

Nouns (and those of `rules.py`: paces, rates)
  pace table   per table of a call five numbers, int64 [T, 5]: update count, and by their fp32 bits e0, e1, h0, h7
  count        a table's update count, an int64 tensor of its own on the device: `counts + places[t]`

An update kernel reads the pace table if tables have different update counts, or if counts and learning rate are on the
device. In the first case the host computes it, in the second `advance_counts` does, in float64, by the same operations:
the bits are the same. A replay advances the counts again, and reads the current learning rate.

    counts (4, 7), lr 0.1, "adam"    advance_counts    counts (5, 8); rows (5, e0(5), e1(5), 0.1, h7), (8, …)
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.runtime.triton.addresses import constants, distances, upload
from tilerec.ops.runtime.triton.launch import launch
from tilerec.ops.update.calls import RuleTables
from tilerec.ops.update.triton.rules import PreparedRule

PACES = 5
"""Numbers of a table in the pace table."""
_BLOCK = 32


@triton.jit
def fp32_bits(x):
    """Round a float64 number to fp32 and return its bits as the integer that a pace table holds."""
    return x.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit(do_not_specialize=["tables"], do_not_specialize_on_alignment=["counts", "lr"])
def advance_counts(
    counts, places, lr, numbers, paces, tables,
    RULE: tl.constexpr, ROW_STEP: tl.constexpr, RATED: tl.constexpr, ADVANCE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the pace table of tables b * BLOCK … for the next update, b being the program's number.

    With ADVANCE, write their counts, too. RULE: the rule's `on_device`; numbers: its `PreparedRule.constants`, of
    them the first the learning rate unless RATED.

    Example: counts (4), "adagrad" with lr_decay 0.25, lr 1 -> paces (5, bits of 0.5, 0, bits of 1, 0), counts (5).
    """
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = t < tables
    place = tl.load(places + t, mask=here, other=0)
    count = tl.load(counts + place, mask=here, other=0) + 1
    zero = (count * 0).to(tl.float64)
    if RATED:
        rate = zero + tl.load(lr).to(tl.float64)
    else:
        rate = zero + tl.load(numbers).to(tl.float64, bitcast=True)
    c0 = zero + tl.load(numbers + 1).to(tl.float64, bitcast=True)
    c1 = zero + tl.load(numbers + 2).to(tl.float64, bitcast=True)
    c2 = zero + tl.load(numbers + 3).to(tl.float64, bitcast=True)
    e0, e1, h7 = RULE(count, rate, c0, c1, c2, ROW_STEP)
    at = paces + t * 5
    tl.store(at, count, mask=here)
    tl.store(at + 1, fp32_bits(e0), mask=here)
    tl.store(at + 2, fp32_bits(e1), mask=here)
    tl.store(at + 3, fp32_bits(rate), mask=here)
    tl.store(at + 4, fp32_bits(h7), mask=here)
    if ADVANCE:
        tl.store(counts + place, count, mask=here)


@triton.jit
def read_pace(paces, table):
    """Return update count, e0, e1, h0, h7 of a table of the call."""
    at = paces + table * 5
    e0 = tl.load(at + 1).to(tl.int32).to(tl.float32, bitcast=True)
    e1 = tl.load(at + 2).to(tl.int32).to(tl.float32, bitcast=True)
    h0 = tl.load(at + 3).to(tl.int32).to(tl.float32, bitcast=True)
    h7 = tl.load(at + 4).to(tl.int32).to(tl.float32, bitcast=True)
    return tl.load(at), e0, e1, h0, h7


def pace_table(made: PreparedRule, steps: Sequence[int], device: torch.device) -> Tensor:
    """Return the pace table of update counts that the host has."""
    h0, h7 = made.numbers[0], made.numbers[7]
    rows = {step: (step, *struct.unpack("4i", struct.pack("4f", *made.paces(step), h0, h7))) for step in set(steps)}
    return upload([number for step in steps for number in rows[step]], device)


def paces_on_device(made: PreparedRule, tables: RuleTables, device: torch.device, advance: bool) -> Tensor:
    """Return the pace table of the next update, from counts on the device; `advance`: add 1 to the counts."""
    counts, lr = tables.counts, tables.lr
    assert counts, "the call has counts"
    paces = torch.empty(len(counts) * PACES, dtype=torch.int64, device=device)
    places = constants(tuple(distances(counts)), device)
    numbers = constants(made.constants, device)
    launch(
        advance_counts, (-(-len(counts) // _BLOCK),), counts[0], places, counts[0] if lr is None else lr, numbers,
        paces, len(counts), RULE=made.bundle.on_device, ROW_STEP=made.row_step, RATED=lr is not None, ADVANCE=advance,
        BLOCK=_BLOCK, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    return paces


def refuse_frozen_counts(made: PreparedRule, dtypes: Sequence[torch.dtype]) -> None:
    """Raise a `ConfigError` if a graph would repeat an update count and the update depends on it."""
    rounds = made.rule.h["stochastic_rounding"] and any(dtype != torch.float32 for dtype in dtypes)
    if rounds or made.paces(1) != made.paces(2):
        what = "the random words of stochastic rounding" if rounds else "bias correction or lr_decay"
        raise ConfigError(
            f"An update by {type(made.rule).__name__} is captured in a CUDA graph with its update count by value: "
            f"every replay would repeat it, and {what} depends on it. Attach the optimizer with "
            "{'capturable': True}, which keeps count and learning rate on the device (the op: pass counts and lr)."
        )
