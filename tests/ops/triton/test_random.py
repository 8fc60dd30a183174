"""Initial values and random rounding by Triton's kernels: the reference's bits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.ops.random_ops import random_fill_reference_
from tests.ops.triton.interpreter import quick
from tests.ops.triton.random_kernels import random_fill_, random_rows_
from tilerec.errors import ConfigError
from tilerec.ops.random.definition import random_words, stochastic_round
from tilerec.ops.random.triton.backend import (
    round_at_random,
    round_to_nearest,
    words,
)

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels run on the GPU here: see tests/cuda"
)
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("place", [(5, 3, 0, 0), (17, 257, 2**33 + 5, 3), (3, 8, 1, 6), (0, 4, 0, 0)])
def test_initial_values_are_those_of_the_reference(kind: str, dtype: torch.dtype, place: tuple[int, ...]) -> None:
    rows, width, row_offset, column_offset = place
    got, want = torch.full((rows, width), 9.0).to(dtype), torch.full((rows, width), 8.0).to(dtype)
    for fill, out in ((random_fill_, got), (random_fill_reference_, want)):
        fill(out, [0xFFFFFFFF, 0x9E3779B9], row_offset, column_offset, kind, -0.3, 0.7)
    assert torch.equal(got.float(), want.float())


def test_a_tile_is_the_slice_of_the_whole_table() -> None:
    whole, tile = torch.empty(9, 20), torch.empty(4, 7)
    random_fill_(whole, [3, 4], 0, 0, "normal", 0.0, 1.0)
    random_fill_(tile, [3, 4], 5, 11, "normal", 0.0, 1.0)
    assert torch.equal(tile, whole[5:9, 11:18])


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_rows_anywhere_are_those_of_the_whole_table(kind: str) -> None:
    whole, some = torch.empty(9, 20), torch.empty(5, 7)
    random_fill_(whole, [3, 4], 0, 0, kind, 0.0, 1.0)
    rows = torch.tensor([7, 0, 0, 8, 3])
    random_rows_(some, rows, [3, 4], 11, kind, 0.0, 1.0)
    assert torch.equal(some, whole[rows, 11:18])
    far = torch.tensor([2**40 + 1])
    got, want = torch.empty(1, 4), torch.empty(1, 4)
    random_rows_(got, far, [3, 4], 0, kind, 0.0, 1.0)
    random_fill_(want, [3, 4], 2**40 + 1, 0, kind, 0.0, 1.0)
    assert torch.equal(got, want)
    random_rows_(torch.empty(0, 4), rows[:0], [3, 4], 0, kind, 0.0, 1.0)


def test_tiles_the_kernel_does_not_write_go_to_the_reference() -> None:
    strided, wide = torch.empty(4, 6)[:, ::2], torch.empty(4, 3, dtype=torch.float64)
    for out in (strided, wide):
        random_fill_(out, [3, 4], 0, 0, "uniform", 0.0, 1.0)
        want = torch.empty(4, 3, dtype=out.dtype)
        random_fill_reference_(want, [3, 4], 0, 0, "uniform", 0.0, 1.0)
        assert torch.equal(out, want)


def test_a_tile_without_a_place_is_refused() -> None:
    with pytest.raises(ConfigError, match="no negative number"):
        random_fill_(torch.empty(2, 2), [1, 2], -1, 0, "uniform", 0.0, 1.0)


@triton.jit
def _round(values, rounded, nearest, row, column, stream, k0, k1, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
           ALIGNED: tl.constexpr):  # fmt: skip
    zero = tl.zeros((ROWS, 1), tl.int64)
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    random = words(
        row + tl.arange(0, ROWS)[:, None].to(tl.int64), zero + column, zero + stream, zero + k0, zero + k1, ROWS,
        COLUMNS, ALIGNED,
    )  # fmt: skip
    x = tl.load(values + at)
    tl.store(rounded + at, round_at_random(x, random, rounded.dtype.element_ty))
    tl.store(nearest + at, round_to_nearest(x, nearest.dtype.element_ty))


@pytest.mark.parametrize("dtype", TYPES[1:], ids=str)
@pytest.mark.parametrize("column", [8, 5])
def test_rounding_is_the_references_bit_for_bit(dtype: torch.dtype, column: int) -> None:
    """Large numbers and such as are subnormal in the row's type, both zeros, infinities and NaN."""
    values = torch.randn(8, 64) * 10.0 ** torch.randint(-9, 4, (8, 64))
    values[0, :8] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 448.0, 463.0, 470.0])
    rounded, nearest = torch.zeros(8, 64).to(dtype), torch.zeros(8, 64).to(dtype)
    row, stream, key = 2**32 - 3, 2**32 + 7, [0xFFFFFFFF, 1]
    _round[(1,)](values, rounded, nearest, row, column, stream, *key, ROWS=8, COLUMNS=64, ALIGNED=column % 4 == 0)
    random = random_words(torch.arange(row, row + 8), 64, key, column, stream)
    torch.testing.assert_close(
        rounded.float(), stochastic_round(values, random, dtype).float(), rtol=0, atol=0, equal_nan=True
    )
    if dtype == torch.float8_e4m3fn:  # what lies beyond its range was NaN in some versions of torch
        values = values.clamp(-448.0, 448.0)
    torch.testing.assert_close(nearest.float(), values.to(dtype).float(), rtol=0, atol=0, equal_nan=True)
