"""Files with a checksum for each block of `BLOCK` bytes, so that a reader of a part verifies just that part.

CRC-32 detects damage, not forgery. (3.5 GB/s on one core of an AMD EPYC; SHA-256 0.85 GB/s.)
"""

from __future__ import annotations

import io
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO, NamedTuple

from tilerec.checksum import crc32
from tilerec.errors import InputError

BLOCK = 1 << 22  # bytes
MOST_CHECKS = 7  # blocks that wait for their check: memory that belongs to no part stays until then


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
        try:
            self._pending = self._thread.submit(self._hash, memoryview(data))
        except RuntimeError:  # the program has ended but for this save, and threads take no more work
            self._hash(memoryview(data))
        self._file.write(data)
        _begin_writeback(self._file, self.size, len(data))
        self.size += len(data)
        self._wait()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _hash(self, rest: memoryview) -> None:
        while len(rest):
            part = rest[: BLOCK - self._hashed % BLOCK]
            self._crc = crc32(part, self._crc)
            self._hashed += len(part)
            rest = rest[len(part) :]
            if self._hashed % BLOCK == 0:
                self._close_block()

    def _close_block(self) -> None:
        self.crcs.append(self._crc)
        self._crc = 0


def _begin_writeback(file: BinaryIO, first: int, count: int) -> None:
    """Begin to write bytes of a local file to the disk, so that checksums of later ones are computed meanwhile.

    The kernel would keep up to a tenth of the memory until fsync. (Linux writes the range at once for this advice; its
    pages leave the cache only if they are clean.)
    """
    if count >= BLOCK and isinstance(file, io.BufferedWriter) and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), first, count, os.POSIX_FADV_DONTNEED)


class Part(NamedTuple):
    """Bytes of a file to read, from byte `first` on, into `out`. then: called after they have been read."""

    first: int
    out: memoryview
    then: Callable[[], object] | None = None


class _OpenBlock:
    """A block that is being put together: the memory for its bytes from its start to byte `at` of the file."""

    def __init__(self, number: int) -> None:
        self.number, self.at = number, number * BLOCK
        self.views: list[memoryview] = []
        self.then: list[Callable[[], object]] = []

    def fill_to(self, at: int) -> None:
        """Add memory for bytes that belong to no part, but to the checksum."""
        if at > self.at:
            self.views.append(memoryview(bytearray(at - self.at)))
            self.at = at


class BlockReader:
    """Reads and verifies ranges of a file, as a context; another thread computes the checksums meanwhile.

    Each block is read once, straight into the memory of all parts in it. So a file is read from its start to its end
    without a pause, however its chunks lie in the blocks.

    Args:
        name: of the file, for errors.
        size: bytes of the file. crcs: CRC-32 of each block.
        checks: number of blocks that may wait for their checksums; one more is read meanwhile. 0: the caller's thread
            computes them.
    """

    def __init__(self, file: BinaryIO, name: str, size: int, crcs: Sequence[int], *, checks: int = MOST_CHECKS) -> None:
        self._file, self._name, self._size, self._crcs = file, name, size, crcs
        self._most_checks = checks
        self._thread = ThreadPoolExecutor(1)
        self._checks: deque[Future[None]] = deque()
        self._kept: tuple[int, memoryview] | None = None  # number of a block, and its bytes

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()

    def read(self, parts: Iterable[Part]) -> None:
        """Read parts, in the order of their bytes; one that lies before the part before it costs a second read.

        Raises:
            InputError: the file is shorter than a part, or a checksum differs. Parts may have been read before.
        """
        block: _OpenBlock | None = None
        for first, out, then in parts:
            done = 0
            while done < len(out):
                at = first + done
                if block is not None and (block.number != at // BLOCK or block.at > at):
                    self._close(block)
                    block = None
                if block is None:
                    block = _OpenBlock(at // BLOCK)
                block.fill_to(at)
                end = min((block.number + 1) * BLOCK, self._size)
                if at >= end:
                    raise self._error(f"end at byte {self._size:,}", f"{first + len(out):,} bytes")
                count = min(len(out) - done, end - at)
                block.views.append(out[done : done + count])
                block.at, done = at + count, done + count
                if block.at == end:
                    self._close(block)
                    block = None
            if then is not None and block is not None:
                block.then.append(then)
            elif then is not None:
                then()
        if block is not None:
            self._close(block)
        while self._checks:
            self._checks.popleft().result()

    def read_into(self, first: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `first` on. A block that is not read to its end is kept for the next call.

        Raises:
            InputError: see `read`.
        """
        done = 0
        while done < len(out):
            number, inside = divmod(first + done, BLOCK)
            size = min(BLOCK, self._size - number * BLOCK)
            if size <= inside:
                raise self._error(f"end at byte {self._size:,}", f"{first + len(out):,} bytes")
            whole = 0 if inside else (len(out) - done) // BLOCK * BLOCK
            if whole:
                self.read([Part(first + done, out[done : done + whole])])
                done += whole
                continue
            if self._kept is None or self._kept[0] != number:
                self._kept = None  # its memory is free before the next one takes some
                block = memoryview(bytearray(size))
                self.read([Part(number * BLOCK, block)])
                self._kept = number, block
            count = min(len(out) - done, size - inside)
            out[done : done + count] = self._kept[1][inside : inside + count]
            done += count

    def _close(self, block: _OpenBlock) -> None:
        """Read a block, and begin its check."""
        block.fill_to(min((block.number + 1) * BLOCK, self._size))
        self._fill(block.number, block.views)
        if self._most_checks:
            self._checks.append(self._thread.submit(self._check, block.number, block.views))
            if len(self._checks) > self._most_checks:
                self._checks.popleft().result()
        else:
            self._check(block.number, block.views)
        for then in block.then:
            then()

    def _fill(self, number: int, views: Sequence[memoryview]) -> None:
        at = number * BLOCK
        self._file.seek(at)
        for view in views:
            done = 0
            while done < len(view):
                count = self._file.readinto(view[done:])  # type: ignore[attr-defined]
                if not count:
                    raise self._error(f"end at byte {at + done:,}", f"{self._size:,} bytes")
                done += count
            at += done

    def _check(self, number: int, views: Sequence[memoryview]) -> None:
        crc = size = 0
        for view in views:
            crc = crc32(view, crc)
            size += len(view)
        if crc != self._crcs[number]:
            where = f"bytes {number * BLOCK:,} to {number * BLOCK + size:,}"
            raise self._error(f"checksum {crc:08x} of {where}", f"{self._crcs[number]:08x}")

    def _error(self, got: str, expected: str) -> InputError:
        return InputError(
            f"Checkpoint {self._name}: got {got}; expected {expected}. The file is damaged: load an earlier checkpoint."
        )
