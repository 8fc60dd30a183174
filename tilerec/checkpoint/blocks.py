"""Files with a checksum for each block of `BLOCK` bytes, so that a reader of a part verifies just that part.

CRC-32 detects damage, not forgery. (3.5 GB/s on one core of an AMD EPYC; SHA-256 0.85 GB/s.)
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

from tilerec.errors import InputError

BLOCK = 1 << 22  # bytes


class BlockWriter:
    """Writes a file from its start to its end, as a context; another thread computes the checksums meanwhile.

    crcs: CRC-32 of each block, complete at the end of the context. size: bytes so far.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._crc, self._hashed = file, 0, 0
        self.crcs: list[int] = []
        self.size = 0
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._wait()
        self._thread.shutdown()
        if self._hashed % BLOCK:
            self._close_block()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes, which the caller may change afterwards."""
        self._pending = self._thread.submit(self._hash, memoryview(data))
        self._file.write(data)
        self.size += len(data)
        self._wait()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _hash(self, rest: memoryview) -> None:
        while len(rest):
            part = rest[: BLOCK - self._hashed % BLOCK]
            self._crc = zlib.crc32(part, self._crc)
            self._hashed += len(part)
            rest = rest[len(part) :]
            if self._hashed % BLOCK == 0:
                self._close_block()

    def _close_block(self) -> None:
        self.crcs.append(self._crc)
        self._crc = 0


class BlockReader:
    """Reads and verifies ranges of a file, as a context; another thread computes the checksums meanwhile.

    Args:
        name: of the file, for errors.
        size: bytes of the file. crcs: CRC-32 of each block.
    """

    def __init__(self, file: BinaryIO, name: str, size: int, crcs: Sequence[int]) -> None:
        self._file, self._name, self._size, self._crcs = file, name, size, crcs
        self._edge = memoryview(bytearray(BLOCK))  # a block of which a caller gets a part
        self._held = -1  # number of the block in `_edge`
        self._thread = ThreadPoolExecutor(1)

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    def read_into(self, first: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `first` on.

        Raises:
            InputError: the file is shorter than that, or a checksum differs.
        """
        checks: list[Future[None]] = []
        done = 0
        while done < len(out):
            at = first + done
            block = at // BLOCK
            start = block * BLOCK
            size = min(BLOCK, self._size - start)
            if size <= 0:
                raise self._error(f"end at byte {self._size:,}", f"{first + len(out):,} bytes")
            if at == start and len(out) - done >= size:
                whole = out[done : done + size]
                self._fill(block, whole)
                checks.append(self._thread.submit(self._check, block, whole))
                done += size
                continue
            if block != self._held:
                self._held = -1
                self._fill(block, self._edge[:size])
                self._check(block, self._edge[:size])
                self._held = block
            count = min(len(out) - done, start + size - at)
            out[done : done + count] = self._edge[at - start : at - start + count]
            done += count
        for check in checks:
            check.result()

    def _fill(self, block: int, out: memoryview) -> None:
        self._file.seek(block * BLOCK)
        done = 0
        while done < len(out):
            count = self._file.readinto(out[done:])  # type: ignore[attr-defined]
            if not count:
                raise self._error(f"end at byte {block * BLOCK + done:,}", f"{self._size:,} bytes")
            done += count

    def _check(self, block: int, data: memoryview) -> None:
        crc = zlib.crc32(data)
        if crc != self._crcs[block]:
            where = f"bytes {block * BLOCK:,} to {block * BLOCK + len(data):,}"
            raise self._error(f"checksum {crc:08x} of {where}", f"{self._crcs[block]:08x}")

    def _error(self, got: str, expected: str) -> InputError:
        return InputError(
            f"Checkpoint {self._name}: got {got}; expected {expected}. The file is damaged: load an earlier checkpoint."
        )
