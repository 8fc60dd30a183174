"""Memory of a rank that other ranks of its machine read: large parts of an all-to-all stay in their sender's memory.

gloo copies a message into a socket and out of it, which takes as much processor time as the step's own copies of the
same rows. Here the message has the position of the data instead, and the receiver reads them where they are.

Nouns
  arena   memory of one rank, a file without a name (memfd) that its peers map; pages exist once they are written
  block   a range of an arena: a page of marks, then data. It carries one message of one call
  mark    byte of a block, one per rank: 1 while that rank may read the block
  lease   hold on a block: of the sender until its call has ended, of a receiver until its tensor is freed

A block is reused when its sender's lease has ended and all marks are 0. The sender sets a mark before the message
leaves, and the receiver clears it. Arenas have no names: the system frees them with the last process, however it ends.

`shared_parts.py` sends messages this way.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from tilerec.ops.backends import size_class

MIN_SHARED_BYTES = 1 << 20
"""Least size of a part that stays in memory: below, a socket is about as fast."""
ARENA_BYTES = 1 << 38
"""Addresses of an arena. Memory is used by pages that were written."""
MAX_IDLE_BYTES = 1 << 30
"""Maximum size of unused blocks whose pages are kept."""
MAX_RANKS = 4096
"""Maximum number of ranks of a group whose parts stay in memory: a mark for each."""
_PAGE = max(MAX_RANKS, mmap.PAGESIZE)
_TOKEN_BYTES = 16


class Place(NamedTuple):
    """Position of a part in its sender's arena, in bytes: of the part, and of its block."""

    part: int
    block: int


def _map(fd: int) -> mmap.mmap:
    memory = mmap.mmap(fd, ARENA_BYTES)
    memory.madvise(mmap.MADV_DONTFORK)  # a forked child must neither read nor write messages
    memory.madvise(mmap.MADV_DONTDUMP)  # a core dump would fill all addresses with pages
    return memory


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _tensor(address: int, size: int, end: Callable[..., None], *args: object) -> Tensor:
    """Return `size` bytes at an address as a tensor; `end(*args)` runs when its storage is freed."""
    # One C type per size class, not per size: ctypes never frees these types.
    lease = (ctypes.c_char * size_class(size)).from_address(address)
    weakref.finalize(lease, end, *args).atexit = False
    return torch.frombuffer(lease, dtype=torch.uint8, count=size)


@final
class _Block:
    """A range of this rank's arena; its marks lie in the page before `begin`."""

    def __init__(self, begin: int, size: int) -> None:
        self.begin, self.size = begin, size
        self.leased = self.sent = self.has_pages = False


@final
class Arena:
    """This rank's blocks.

    Args:
        ranks: number of ranks that may read them.

    Raises:
        OSError, ValueError: the system has no memory without names, or no room for its addresses.
    """

    def __init__(self, ranks: int) -> None:
        self.fd = os.memfd_create("tilerec", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, ARENA_BYTES)
        self._memory = _map(self.fd)
        self._address = _address(self._memory)
        self._ranks, self._pid, self._lock = ranks, os.getpid(), threading.Lock()
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._memory[:_TOKEN_BYTES] = self.token
        self._end = _PAGE
        self._blocks: dict[int, list[_Block]] = {}  # by size class
        self._by_address: dict[int, _Block] = {}  # of leased blocks, by the address of their data

    def take(self, size: int) -> Tensor:
        """Return `size` uninitialized bytes of a free block; they are leased until the tensor's storage is freed."""
        room = size_class(size)
        with self._lock:
            own = self._blocks.setdefault(room, [])
            block = next((block for block in own if self._is_free(block)), None)
            if block is None:
                block = self._new(room)
                own.append(block)
            block.leased, block.sent, block.has_pages = True, False, True
        self._by_address[self._address + block.begin] = block
        return _tensor(self._address + block.begin, size, self._give, block)

    def holds(self, tensor: Tensor) -> bool:
        """Return True if a tensor lies in a block that carries no message yet."""
        block = self._by_address.get(tensor.untyped_storage().data_ptr())
        return block is not None and not block.sent

    def send(self, part: Tensor, reader: int) -> Place:
        """Mark a part of a leased block for a reader, and return its position."""
        block = self._by_address[part.untyped_storage().data_ptr()]
        block.sent = True
        self._memory[block.begin - _PAGE + reader] = 1
        return Place(part.data_ptr() - self._address, block.begin)

    def _is_free(self, block: _Block) -> bool:
        marks = block.begin - _PAGE
        return not block.leased and not any(self._memory[marks : marks + self._ranks])

    def _new(self, room: int) -> _Block:
        self._drop_idle_pages()
        begin = self._end + _PAGE
        end = begin + -(-room // _PAGE) * _PAGE
        if end > ARENA_BYTES:
            raise MemoryError(
                f"Messages between ranks of one machine: got {end} bytes in flight; expected at most {ARENA_BYTES}. "
                "Send smaller batches, or set TILEREC_SHARED_MEMORY=0."
            )
        self._end = end
        return _Block(begin, room)

    def _drop_idle_pages(self) -> None:
        """Return the pages of unused blocks to the system, if there are many."""
        idle = [block for own in self._blocks.values() for block in own if block.has_pages and self._is_free(block)]
        if sum(block.size for block in idle) > MAX_IDLE_BYTES:
            for block in idle:
                block.has_pages = False
                self._memory.madvise(mmap.MADV_REMOVE, block.begin, block.size // _PAGE * _PAGE)

    def _give(self, block: _Block) -> None:
        if os.getpid() == self._pid:  # a forked child frees its copies of the tensors
            self._by_address.pop(self._address + block.begin, None)
            block.leased = False  # last: another thread may take the block now


@final
class PeerArena:
    """A peer's arena, mapped by this rank, which is its reader number `reader`."""

    def __init__(self, memory: mmap.mmap, reader: int) -> None:
        self._memory, self._reader, self._pid = memory, reader, os.getpid()
        self._address = _address(memory)

    @staticmethod
    def open(pid: int, fd: int, token: bytes, reader: int) -> PeerArena | None:
        """Return the arena of another process; None if the system does not give access, or it is another file."""
        try:
            own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            memory = _map(own)
        except (OSError, ValueError):
            return None
        finally:
            os.close(own)
        return PeerArena(memory, reader) if memory[:_TOKEN_BYTES] == token else None

    def read(self, place: Place, size: int) -> Tensor:
        """Return `size` bytes of a part; its block is released when the tensor's storage is freed."""
        return _tensor(self._address + place.part, size, self._release, place.block)

    def _release(self, block: int) -> None:
        if os.getpid() == self._pid:
            self._memory[block - _PAGE + self._reader] = 0
