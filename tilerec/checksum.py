"""`crc32`: the CRC-32 of zip archives and checkpoints, with `zlib.crc32`'s arguments and values.

ISA-L computes it with carry-less multiplication, four times as fast as zlib does. Its package `isal` belongs
to the extra `train` on the platforms that it has wheels for; without it, zlib computes the same numbers.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
