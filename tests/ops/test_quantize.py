"""Packed rows: the worked examples, what comes back, what is refused, and as torch programs."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from tilerec.errors import ConfigError
from tilerec.ops.quantize.definition import (
    pack_rows,
    pack_segments,
    pack_segments_reference,
    unpack_rows,
    unpack_segments,
    unpack_segments_reference,
)

OPS = torch.ops.tilerec
FORMATS = ["int8", "fp8"]


def test_rows_of_int8_are_a_scale_and_bytes() -> None:
    packed = pack_rows(torch.tensor([[1.0, -2.54, 0.01, 0.0]]), "int8")
    assert packed.shape == (1, 8)
    assert packed[0, :4].view(torch.float32).item() == pytest.approx(0.02)
    assert packed[0, 4:6].tolist() == [50, -127]
    assert packed[0, 7].item() == 0


def test_rows_of_fp8_are_a_scale_and_e4m3_numbers() -> None:
    packed = pack_rows(torch.tensor([[448.0, 1.1, -0.3]]), "fp8")
    assert packed[0, :4].view(torch.float32).item() == 1.0
    assert packed[0, 4:].view(torch.float8_e4m3fn).tolist() == [448.0, 1.125, -0.3125]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (1, 1), (5, 3), (3, 257)])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_come_back_in_their_shape_and_the_type_asked_for(
    format: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    rows = torch.randn(shape).to(dtype)
    packed = pack_rows(rows, format)
    assert packed.shape == (shape[0], shape[1] + 4)
    back = unpack_rows(packed, format, dtype)
    assert back.dtype == dtype
    torch.testing.assert_close(back, rows, rtol=0.07, atol=0.02 if format == "int8" else 1e-4)


def test_strided_rows_are_packed_as_they_are() -> None:
    rows = torch.randn(6, 8)[::2, 1:6]
    assert torch.equal(pack_rows(rows, "int8"), pack_rows(rows.clone(), "int8"))
    packed = pack_rows(rows, "fp8").T.contiguous().T
    assert torch.equal(unpack_rows(packed, "fp8"), unpack_rows(packed.contiguous(), "fp8"))


@pytest.mark.parametrize("format", FORMATS)
def test_segments_are_rows_one_after_the_other(format: str) -> None:
    blocks = [torch.randn(3, 5), torch.randn(0, 2), torch.randn(2, 3), torch.randn(1, 5)]
    flat = torch.cat([block.reshape(-1) for block in blocks])
    counts, widths = [3, 0, 2, 1], [5, 2, 3, 5]
    packed = pack_segments(flat, counts, widths, format)
    assert torch.equal(packed, torch.cat([pack_rows(block, format).reshape(-1) for block in blocks]))
    back = [unpack_rows(pack_rows(block, format), format).reshape(-1) for block in blocks]
    assert torch.equal(unpack_segments(packed, counts, widths, format), torch.cat(back))


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_codes_of_zero_and_a_scale_that_shows_it(format: str, bad: float) -> None:
    packed = pack_rows(torch.tensor([[bad, 1.0, -2.0], [4.0, 0.0, 2.0]]), format)
    codes = packed[:, 4:] if format == "int8" else packed[:, 4:].view(torch.float8_e4m3fn).float()
    assert not codes[0].any()
    assert codes[1].any()
    back = unpack_rows(packed, format, torch.float32)
    assert back[0].isnan().all()
    torch.testing.assert_close(back[1], torch.tensor([4.0, 0.0, 2.0]), rtol=0.07, atol=0.02)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("format", FORMATS)
def test_packed_and_unpacked_rows_have_the_reference_s_bits(format: str, threads: int) -> None:
    torch.set_num_threads(threads)
    counts, widths = [3, 0, 700, 2, 90, 5], [5, 2, 300, 0, 61, 7]
    sizes = [count * width for count, width in zip(counts, widths, strict=True)]
    flat = torch.randn(sum(sizes)) * (2 * torch.randn(sum(sizes))).exp()
    flat[torch.rand(flat.shape) < 0.01] *= 0.0  # zeros of both signs
    flat[-35:-28] = -0.0  # rows of zeros, of tiny numbers, and of numbers that end half-way between two codes
    flat[-28:-21] = torch.linspace(-9e-37, 9e-37, 7)
    flat[-21:-14] = torch.tensor([127.0, 0.5, 1.5, -2.5, 126.5, -126.5, 0.0]) * 2.0**-20
    flat[-14:-7] = torch.tensor([448.0, 432.0, 2.0**-7, 2.0**-10, -3 * 2.0**-10, 17.0, -(2.0**-6) * (1 - 2.0**-5)])
    flat[-7:] = torch.tensor([1.0, float("inf"), -1.0, 0.0, -0.0, 3.0, 4.0])
    packed = pack_segments(flat, counts, widths, format)
    assert torch.equal(packed, pack_segments_reference(flat, counts, widths, format))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        got = unpack_segments(packed, counts, widths, format, dtype)
        want = unpack_segments_reference(packed, counts, widths, format, dtype)
        assert got.dtype == want.dtype == dtype
        assert torch.equal(got.nan_to_num(7.5), want.nan_to_num(7.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_byte_of_fp8_is_unpacked_as_torch_does(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    packed = torch.cat([torch.tensor([0.75]).view(torch.uint8), codes])
    got = unpack_segments(packed, [1], [256], "fp8", dtype)
    want = (codes.view(torch.float8_e4m3fn).float() * 0.75).to(dtype)
    assert torch.equal(got.nan_to_num(7.5), want.nan_to_num(7.5))
    assert torch.equal(got.signbit()[~got.isnan()], want.signbit()[~want.isnan()])


def test_what_is_no_matrix_of_such_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pack_rows: got format='int4'; expected one of \['int8', 'fp8'\]"):
        pack_rows(torch.zeros(1, 2), "int4")
    with pytest.raises(ConfigError, match=r"pack_rows: got torch.int64 of shape \[1, 2\]; expected a matrix of floats"):
        pack_rows(torch.zeros(1, 2, dtype=torch.int64), "int8")
    with pytest.raises(ConfigError, match=r"of shape \[2\]; expected a matrix"):
        pack_rows(torch.zeros(2), "int8")
    for wrong in (torch.zeros(1, 8, dtype=torch.int8), torch.zeros(1, 3, dtype=torch.uint8), torch.zeros(8)):
        with pytest.raises(ConfigError, match=r"unpack_rows: got .* expected a matrix of packed rows \(fp8\)"):
            unpack_rows(wrong, "fp8")


@pytest.mark.parametrize("format", FORMATS)
def test_packing_passes_opcheck(format: str) -> None:
    flat = torch.randn(13)
    packed = pack_segments(flat, [2, 1], [5, 3], format)
    opcheck(OPS.pack_segments.default, (flat, [2, 1], [5, 3], format))
    opcheck(OPS.unpack_segments.default, (packed, [2, 1], [5, 3], format, torch.float32))
