"""Native initial values against the reference: the same words, the same numbers, any cut."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tests.ops.random_ops import random_fill_reference_
from tilerec.ops import backends
from tilerec.ops.random.definition import table_key
from tilerec.ops.runtime.cpu.library import DTYPES, library

pytestmark = pytest.mark.skipif(not backends.NATIVE_CPU, reason="the native library is not built")

KEY = table_key(12345678901, "user")
fill_ = torch.ops.tilerec.random_fill_


@pytest.fixture
def lib() -> Iterator[ctypes.CDLL]:
    lib = library()
    assert lib is not None
    before = lib.tr_isa()
    yield lib
    lib.tr_isa_choose(before)


def test_first_words_are_the_published_known_answer() -> None:
    out = torch.empty(1, 4)
    fill_(out, [0, 0], 0, 0, "uniform", 0.0, 1.0)
    words = torch.tensor([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8])
    assert torch.equal(out[0], (words >> 8).to(torch.float32) * 2.0**-24)


@given(
    rows=st.integers(0, 40),
    width=st.sampled_from([0, 1, 3, 4, 7, 64, 257]),
    row=st.sampled_from([0, 5, 2**31 - 3, 2**33 + 1]),
    column=st.integers(0, 9),
    kind=st.sampled_from(["uniform", "normal"]),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_tiles_equal_the_reference(rows: int, width: int, row: int, column: int, kind: str, dtype: torch.dtype) -> None:
    got, want = torch.empty(rows, width, dtype=dtype), torch.empty(rows, width, dtype=dtype)
    fill_(got, KEY, row, column, kind, -0.25, 1.5)
    random_fill_reference_(want, KEY, row, column, kind, -0.25, 1.5)
    if kind == "uniform":
        assert torch.equal(got, want)
    else:  # a last place of float64 may decide how fp32 rounds
        torch.testing.assert_close(got, want, rtol=2e-7 if dtype == torch.float32 else 2**-7, atol=1e-7)
        assert (got != want).float().sum() <= 1


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_a_tile_is_the_slice_of_the_whole(kind: str, dtype: torch.dtype) -> None:
    whole = torch.empty(60, 19, dtype=dtype)
    fill_(whole, KEY, 0, 0, kind, 0.0, 1.0)
    for r0, r1, c0, c1 in ((0, 60, 0, 5), (0, 60, 5, 12), (17, 18, 12, 19), (33, 60, 3, 19)):
        tile = torch.empty(r1 - r0, c1 - c0, dtype=dtype)
        fill_(tile, KEY, r0, c0, kind, 0.0, 1.0)
        assert torch.equal(tile, whole[r0:r1, c0:c1])


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_bits_depend_neither_on_threads_nor_on_the_instruction_set(lib: ctypes.CDLL, kind: str) -> None:
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for level in range(lib.tr_isa_widest() + 1):
            lib.tr_isa_choose(level)
            out = torch.empty(3001, 65)
            fill_(out, KEY, 7, 2, kind, 0.5, 2.0)
            results.append(out)
    assert all(torch.equal(out, results[0]) for out in results)


def test_normal_values_have_the_moments_of_a_normal_distribution() -> None:
    out = torch.empty(20_000, 64)
    fill_(out, KEY, 0, 0, "normal", 0.0, 1.0)
    x = out.double()
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert float((x**power).mean()) == pytest.approx(moment, abs=0.03)
    assert out.isfinite().all()
    assert out.abs().max() < 5.8  # sqrt(2 ln 2^24)


def test_a_strided_or_fp64_tile_goes_to_the_reference() -> None:
    wide, want = torch.zeros(10, 12), torch.empty(10, 6)
    fill_(wide[:, 3:9], KEY, 4, 1, "uniform", -1.0, 1.0)
    fill_(want, KEY, 4, 1, "uniform", -1.0, 1.0)
    assert torch.equal(wide[:, 3:9], want)
    assert (wide[:, :3] == 0).all()
    assert (wide[:, 9:] == 0).all()
    double = torch.empty(10, 6, dtype=torch.float64)
    fill_(double, KEY, 4, 1, "uniform", -1.0, 1.0)
    assert torch.equal(double.float(), want)


def test_rows_of_a_strided_tile_are_those_of_a_tile_of_its_own() -> None:
    """Its columns do not lie side by side, or every other row number is given."""
    rows = torch.tensor([5, 9, 2, 0])
    want = torch.empty(4, 6)
    torch.ops.tilerec.random_rows_(want, rows, KEY, 1, "uniform", -1.0, 1.0)
    wide = torch.zeros(4, 12)
    torch.ops.tilerec.random_rows_(wide[:, 3:9], rows, KEY, 1, "uniform", -1.0, 1.0)
    assert torch.equal(wide[:, 3:9], want)
    assert (wide[:, :3] == 0).all()
    assert (wide[:, 9:] == 0).all()
    every_other = torch.stack((rows, -rows), 1).view(-1)[::2]
    got = torch.empty(4, 6)
    torch.ops.tilerec.random_rows_(got, every_other, KEY, 1, "uniform", -1.0, 1.0)
    assert torch.equal(got, want)
