"""Rows of hashed ids: the same numbers from the op, the reference and every instruction set, for tables of any size."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.ops import backends as backends
from tilerec.ops.hash.cpu import kernels
from tilerec.ops.hash.definition import hash_rows
from tilerec.ops.runtime.cpu.library import library
from tilerec.ops.runtime.library import LIBRARY

NATIVE = library()
SIZES = [
    1,
    2,
    3,
    7,
    1000,
    2**14 - 1,
    2**14,
    2**14 + 1,
    2**20,
    10**9 + 7,
    2**32 - 1,
    2**32,
    2**32 + 1,
    2**62,
    2**62 + 1,
    2**63 - 1,
]
EXTREMES = [-(2**63), -(2**32), -1, 0, 1, 2**31, 2**32, 2**63 - 1]
# Inverses of the hash, so that hashes too have extreme values: 0, 2**63 - 1, 2**63 and 2**64 - 1.
_INVERSE = (pow(0xBF58476D1CE4E5B9, -1, 2**64), pow(0x94D049BB133111EB, -1, 2**64))


def _mixed(id_: int) -> int:
    x = id_ % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _unmixed(hash_: int) -> int:
    x = (hash_ ^ (hash_ >> 31) ^ (hash_ >> 62)) * _INVERSE[1] % 2**64
    x = (x ^ (x >> 27) ^ (x >> 54)) * _INVERSE[0] % 2**64
    x ^= (x >> 30) ^ (x >> 60)
    return x - 2**64 if x >= 2**63 else x


def _rows(kernel: Callable[..., None], ids_N: Tensor, rows: int, first_row: int = 0) -> list[int]:
    rows_N = torch.full_like(ids_N, -1, memory_format=torch.contiguous_format)
    kernel(ids_N, rows, first_row, rows_N)
    return rows_N.tolist()


@pytest.fixture
def isa() -> Iterator[Callable[[int], int]]:
    """A way to choose an instruction set for one test."""
    assert isinstance(NATIVE, ctypes.CDLL)
    before = NATIVE.tr_isa()
    yield NATIVE.tr_isa_choose
    NATIVE.tr_isa_choose(before)


@pytest.mark.parametrize("kernel", [hash_rows, LIBRARY.references["hash_rows_"]])
def test_rows_give_the_worked_example(kernel: Callable[..., None]) -> None:
    assert _rows(kernel, torch.tensor([1, 2, -1]), 1000) == [789, 730, 67]


@pytest.mark.parametrize("kernel", [hash_rows, LIBRARY.references["hash_rows_"]])
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.sampled_from(EXTREMES)),
    st.sampled_from(SIZES) | st.integers(1, 2**63 - 1),
    st.sampled_from([0, 1, 5]),
)
def test_rows_are_the_unsigned_hash_modulo_the_rows(
    kernel: Callable[..., None], ids: list[int], size: int, first_row: int
) -> None:
    rows = min(size + first_row, 2**63 - 1)
    divisor = rows - first_row
    expected = [first_row + _mixed(id_) % divisor for id_ in ids]
    assert _rows(kernel, torch.tensor(ids, dtype=torch.int64), rows, first_row) == expected


@pytest.mark.skipif(NATIVE is None, reason="the native CPU library is not built")
@pytest.mark.parametrize("level", [0, 1, 2])
def test_every_instruction_set_gives_the_rows_of_hashes_beside_multiples(level: int, isa: Callable[[int], int]) -> None:
    """A quotient that is off by one shows next to a multiple of the rows, and at the ends of the hashes."""
    assert NATIVE is not None
    isa(level)
    kernel = LIBRARY.taking_arguments(kernels(NATIVE))["hash_rows_"]
    for rows in SIZES:
        top = (2**64 - 1) // rows
        factors = {0, 1, top // 3, top // 2, top - 1, top}
        hashes = sorted(
            {
                hash_
                for factor in factors
                for near in (-1, 0, 1, rows - 1)
                if 0 <= (hash_ := factor * rows + near) < 2**64
            }
            | {2**63 - 1, 2**63, 2**64 - 1}
        )
        # Eight of each: vectors of eight leave the rest to another loop.
        ids_N = torch.tensor([_unmixed(hash_) for hash_ in hashes]).repeat_interleave(8)
        assert _rows(kernel, ids_N, rows) == [hash_ % rows for hash_ in hashes for _ in range(8)]


@pytest.mark.skipif(NATIVE is None, reason="the native CPU library is not built")
def test_ids_may_be_strided() -> None:
    ids_N = torch.arange(-60_000, 60_000).view(-1, 3)[:, 1]
    assert _rows(hash_rows, ids_N, 999, 1) == _rows(LIBRARY.references["hash_rows_"], ids_N, 999, 1)


def test_no_ids_have_no_rows() -> None:
    assert _rows(hash_rows, torch.zeros(0, dtype=torch.int64), 3) == []


def test_bad_numbers_and_memory_are_refused() -> None:
    ids_N = torch.arange(4)
    for rows, first_row, message in (
        (0, 0, "rows is 0; expected 1"),
        (3, 3, "rows is 3; expected 4"),
        (3, -1, "first_row is -1"),
    ):
        with pytest.raises(ConfigError, match=message):
            hash_rows(ids_N, rows, first_row, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InputError, match=r"ids are torch\.int32"):
        hash_rows(ids_N.int(), 3, 0, torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InputError, match=r"rows_N has shape \[3\]; expected \[4\]"):
        hash_rows(ids_N, 3, 0, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(InputError, match=r"rows_N is torch\.int32"):
        hash_rows(ids_N, 3, 0, torch.zeros(4, dtype=torch.int32))
    with pytest.raises(InputError, match="not contiguous"):
        hash_rows(ids_N, 3, 0, torch.zeros(8, dtype=torch.int64)[::2])
