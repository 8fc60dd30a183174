"""Checksums are zlib's, whichever library computes them."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib

import pytest

from tilerec.checksum import crc32


@pytest.mark.parametrize("size", [0, 1, 7, 16, 255, 4097, 1 << 20])
@pytest.mark.parametrize("at", [0, 1, 9])
def test_values_are_those_of_zlib(size: int, at: int) -> None:
    data = memoryview(random.Random(size).randbytes(size + at))[at:]
    assert crc32(data) == zlib.crc32(data)
    assert crc32(data, 0xDEADBEEF) == zlib.crc32(data, 0xDEADBEEF)


def test_a_value_goes_on_over_parts() -> None:
    data = random.Random(1).randbytes(10_001)
    assert crc32(data[4096:], crc32(data[:4096])) == zlib.crc32(data)


def test_zlib_serves_where_isal_is_not_installed() -> None:
    program = "import sys; sys.modules['isal'] = None; import zlib, tilerec.checksum as c; assert c.crc32 is zlib.crc32"
    subprocess.run([sys.executable, "-c", program], check=True)
