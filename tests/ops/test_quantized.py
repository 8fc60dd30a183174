"""Quantized rows: their bytes and errors; lookups in them equal lookups in the rows that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.op_cases import check
from tilerec.errors import ConfigError, InputError
from tilerec.ops import backends as backends
from tilerec.ops.quantized.row_format import (
    BITS,
    check_quantizable,
    dequantize_rows,
    quantize_rows,
    row_bytes,
)
from tilerec.ops.runtime.library import LIBRARY

ops = torch.ops.tilerec
POOLED = LIBRARY.references["quantized_pooled_lookup"]
SEQUENCE = LIBRARY.references["quantized_sequence_lookup"]
NO_SINKS = torch.zeros(0, dtype=torch.int64)


def rows_of(scale: float, rows: int = 40, dim: int = 33, seed: int = 0) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)) * scale


def test_worked_example_of_the_row_format() -> None:
    rows = quantize_rows(torch.tensor([[1.0, -2.0, 0.5, 5.5]]), 4)
    assert rows.tolist() == [[0x00, 0x38, 0x00, 0xC0, 0x06, 0xF5, 0x00, 0x00]]
    assert dequantize_rows(rows, 4, 4).tolist() == [[1.0, -2.0, 0.5, 5.5]]


def test_row_bytes_of_64_columns_are_shares_of_fp32() -> None:
    assert [row_bytes(64, bits) for bits in BITS] == [68, 36, 20]
    assert [round(row_bytes(64, bits) / 256, 3) for bits in BITS] == [0.266, 0.141, 0.078]
    assert [row_bytes(dim, bits) for dim in (1, 3, 9) for bits in BITS] == [8, 8, 8, 8, 8, 8, 16, 12, 8]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("scale", [1e-5, 0.01, 1.0, 1e4])
def test_every_number_is_within_half_a_step(bits: int, scale: float) -> None:
    rows = rows_of(scale)
    packed = quantize_rows(rows, bits)
    step = packed[:, :4].contiguous().view(torch.float16)[:, :1].float()
    error = (dequantize_rows(packed, 33, bits) - rows).abs()
    assert (error <= step * 0.5001 + rows.abs() * 1e-6).all()
    # The scale is the range over the largest code, up to the rounding of bias and scale to fp16.
    spread = (rows.amax(1) - rows.amin(1))[:, None]
    assert (step <= spread / (2**bits - 1) * (1.002 if scale > 1e-4 else 1.2) + rows.abs().amax() * 2**-10).all()


@pytest.mark.parametrize("bits", BITS)
def test_rows_of_one_number_keep_it(bits: int) -> None:
    for number in (0.0, -0.0, 1.5, -3.0):
        rows = torch.full((2, 5), number)
        assert torch.equal(dequantize_rows(quantize_rows(rows, bits), 5, bits), rows)
    assert dequantize_rows(quantize_rows(torch.full((1, 5), 0.1), bits), 5, bits).sub(0.1).abs().max() < 1e-6


def test_parts_of_a_table_are_quantized_like_the_whole() -> None:
    rows = rows_of(0.1, rows=9000, dim=64)  # three chunks
    packed = quantize_rows(rows, 4)
    assert torch.equal(packed[8990:], quantize_rows(rows[8990:], 4))
    assert torch.equal(quantize_rows(rows.bfloat16(), 8), quantize_rows(rows.bfloat16().float(), 8))
    assert quantize_rows(rows[:0], 8).shape == (0, 68)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -70000.0])
def test_numbers_without_a_code_are_named(bad: float) -> None:
    rows = rows_of(1.0, rows=9000, dim=64)
    check_quantizable(rows, "t")
    rows[8000, 3] = bad
    with pytest.raises(InputError, match=rf"Table 't': got {bad} in row 8000; expected numbers in \[-65504"):
        check_quantizable(rows, "t")


def test_other_bits_and_other_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"bits=3; expected one of \[8, 4, 2\]"):
        quantize_rows(torch.zeros(2, 3), 3)
    with pytest.raises(ConfigError, match="expected a matrix of floats"):
        quantize_rows(torch.zeros(2, 3, dtype=torch.int64), 8)
    with pytest.raises(ConfigError, match=r"expected uint8 of \[rows, 8\]"):
        dequantize_rows(torch.zeros(2, 4, dtype=torch.uint8), 3, 8)


def tables(dim: int = 9) -> tuple[list[Tensor], list[int], list[int]]:
    """Tables of 50 rows of every type, their dims and bits."""
    floats = [rows_of(0.3, 50, dim, seed) for seed in range(4)]
    weights = [*(quantize_rows(rows, bits) for rows, bits in zip(floats, BITS, strict=False)), floats[3].half()]
    return weights, [dim] * 4, [*BITS, 0]


def batch(count: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 50, (count,), generator=generator), torch.tensor([0, 3, 3, 10, 20, 25, 30, 41, count])


@pytest.mark.parametrize("batches", [[2], [2, 2, 1, 3]])
@pytest.mark.parametrize("weighted", [False, True])
def test_lookups_have_the_bits_of_lookups_in_dequantized_rows(batches: list[int], weighted: bool) -> None:
    weights, dims, bits = tables()
    floats = [dequantize_rows(w, 9, b) if b else w for w, b in zip(weights, bits, strict=True)]
    ids, offsets = batch()
    sample_weights = torch.rand(60) if weighted else None
    layout = ([0, 1, 2, 3, 0], [0, 1, 2, 3, 1], [0, 1, 0, 1, 1], batches)
    rest = (*layout, torch.float32, "a@a,b@b,c@c,d@d,b@a")
    want, _ = ops.pooled_lookup(floats, NO_SINKS, ids, offsets, sample_weights, *rest)
    assert torch.equal(ops.quantized_pooled_lookup(weights, dims, bits, ids, offsets, sample_weights, *rest), want)
    starts = torch.tensor([0, 10, 30, 30, 60])
    rest = ([3, 1, 0, 2], torch.bfloat16, "a@d,b@b,c@a,d@c")
    want, _ = ops.sequence_lookup(floats, NO_SINKS, ids, starts, *rest)
    assert torch.equal(ops.quantized_sequence_lookup(weights, dims, bits, ids, starts, *rest), want)


def test_worked_example_of_a_lookup() -> None:
    weights = [quantize_rows(torch.tensor([[0.0, 3.0], [1.0, 4.0]]), 2)]
    ids, offsets = torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])
    out = POOLED(weights, [2], [2], ids, offsets, None, [0], [0], [0], [2], torch.float32, "f@t")
    assert out.tolist() == [[1.0, 7.0], [1.0, 4.0]]


def call(weights: Any, dims: Any = (9,), bits: Any = (8,), ids: Any = (0, 1), names: str = "f@t") -> Tensor:
    return ops.quantized_pooled_lookup(
        weights, dims, bits, torch.tensor(ids), torch.tensor([0, 2]), None, [0], [0], [0], [1], torch.float32, names
    )


def test_rows_of_another_format_are_refused() -> None:
    packed = quantize_rows(rows_of(1.0, 5, 9), 8)
    ids, offsets = torch.tensor([0, 1]), torch.tensor([0, 2])

    def reference(*tables: Any) -> Tensor:
        return POOLED(*tables, ids, offsets, None, [0], [0], [0], [1], torch.float32, "f@t")

    for function in (call, reference):
        with pytest.raises(InputError, match=r"got torch.uint8 of shape \[5, 16\]; expected uint8 \[rows, 12\]"):
            function([packed], [9], [4])
        with pytest.raises(InputError, match="expected float32, bfloat16 or float16"):
            function([packed], [16], [0])
        with pytest.raises(InputError, match="got bits=3"):
            function([packed], [9], [3])
        with pytest.raises(InputError, match="got 2 dims and 1 bits"):
            function([packed], [9, 9], [8])


def test_bad_ids_are_named_by_every_kernel() -> None:
    packed = [quantize_rows(rows_of(1.0, 5, 9), 8)]
    with pytest.raises(InputError, match=r"Table 't': got id 5 of feature 'f' \(position 1"):
        call(packed, ids=(0, 5))
    ids, offsets = torch.tensor([0, -1]), torch.tensor([0, 2])
    with pytest.raises(InputError, match="Table 't': got id -1"):
        POOLED(packed, [9], [8], ids, offsets, None, [0], [0], [0], [1], torch.float32, "f@t")
    with pytest.raises(InputError, match="Table 't': got id -1"):
        SEQUENCE(packed, [9], [8], ids, offsets, [0], torch.float32, "f@t")


def test_a_backward_pass_through_sample_weights_raises() -> None:
    packed, ids = [quantize_rows(rows_of(1.0, 5, 9), 8)], torch.tensor([0, 1])
    weights = torch.rand(2, requires_grad=True)
    rest = ([0], [0], [0], [1], torch.float32, "f@t")
    out = ops.quantized_pooled_lookup(packed, [9], [8], ids, torch.tensor([0, 2]), weights, *rest)
    with pytest.raises(InputError, match="quantized rows are for inference"):
        out.sum().backward()
    assert not ops.quantized_pooled_lookup(packed, [9], [8], ids, torch.tensor([0, 2]), None, *rest).requires_grad


@pytest.mark.parametrize("op", ["quantized_pooled_lookup", "quantized_sequence_lookup"])
def test_ops_pass_torchs_own_checks(op: str) -> None:
    check(op, "cpu")
