"""Parts of an all-to-all that stay in their sender's memory, if sender and receiver are processes of one machine.

    part      data of one rank for another; both know its size
    small     a part below `least_bytes`, or between ranks that share no memory: it travels in the message
    shared    every other part: the message has its `Place` and size (24 bytes), and the receiver reads it where it lies

Ranks agree when they open a channel (`Group.split`), once per set of ranks: each tries to map the arenas of the others.
Both must be of one machine, of the same namespaces (of processes and networks) and one user. No later call waits.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import Tensor

from tilerec.comms.group import Group, Handle
from tilerec.comms.shared_memory import MAX_RANKS, MIN_SHARED_BYTES, Arena, PeerArena, Place
from tilerec.errors import CommsError
from tilerec.ops.backends import reused_empty

_PLACE = struct.Struct("<qqq")  # of part and block, and the size
_Description = tuple[str, int, int, bytes]


def is_enabled() -> bool:
    """Return True unless the environment has `TILEREC_SHARED_MEMORY=0`."""
    return os.environ.get("TILEREC_SHARED_MEMORY", "1").lower() not in ("0", "off", "false", "no")


def _namespaces() -> str:
    """Return the identity of this process's namespaces of processes and networks, on this boot of the machine."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return " ".join([boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")])


@final
class SharedParts:
    """Shared parts of the calls of one process group and the channels opened from it.

    Args:
        rank, size: this rank's number in the process group, and the number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self.least_bytes = MIN_SHARED_BYTES  # of a shared part; the same on all ranks
        self._arena: Arena | None = None
        self._agreed: set[tuple[int, ...]] = set()  # sets of ranks
        self._peers: dict[int, PeerArena | None] = {}  # senders; None: their parts are in the message
        self._readers: dict[int, bool] = {}  # receivers; True: they have mapped this rank's arena
        self._unread: list[SharedHandle] = []  # calls whose results were dropped before they arrived

    # -- agreement ---------------------------------------------------------------------------------------------

    def agree(self, group: Group, ranks: tuple[int, ...]) -> None:
        """Agree with all ranks of a group. Collective; the second call for a set of ranks does nothing.

        Args:
            ranks: numbers of the group's ranks.
        """
        if ranks in self._agreed:
            return
        self._agreed.add(ranks)
        descriptions = dict(zip(ranks, group.all_gather_object(self._description()), strict=True))
        for peer, description in descriptions.items():
            if peer != self._rank and peer not in self._peers:
                self._peers[peer] = self._open(cast("_Description | None", description))
        mapped = [peer for peer, arena in self._peers.items() if arena is not None]
        answers = cast("list[list[int]]", group.all_gather_object(mapped))
        self._readers.update({peer: self._rank in answer for peer, answer in zip(ranks, answers, strict=True)})

    def _description(self) -> _Description | None:
        """Return the namespaces, process, file and token of this rank's arena; None if it has none."""
        try:
            if not is_enabled() or self._size > MAX_RANKS:
                return None
            self._arena = self._arena or Arena(self._size)
            return _namespaces(), os.getpid(), self._arena.fd, self._arena.token
        except (AttributeError, OSError, ValueError):  # no memfd, no /proc, or a limit of addresses
            return None

    def _open(self, description: _Description | None) -> PeerArena | None:
        if description is None or self._arena is None:
            return None
        namespaces, pid, fd, token = description
        return PeerArena.open(pid, fd, token, self._rank) if namespaces == _namespaces() else None

    # -- memory ------------------------------------------------------------------------------------------------

    def buffer(self, size: int) -> Tensor | None:
        """Return `size` uninitialized bytes whose parts can be sent without a copy; None if no peer shares memory."""
        if self._arena is None or not any(self._readers.values()):
            return None
        return self._arena.take(size)

    # -- messages ----------------------------------------------------------------------------------------------

    def pack(
        self, title: str, input: Tensor, sends: list[int], receives: list[int], ranks: Sequence[int]
    ) -> SharedMessage | None:
        """Return the message of a call; None if none of its parts is shared.

        Args:
            title: of the call, in errors.
            input: the parts for each rank of the channel, as bytes.
            sends, receives: bytes for and from each rank of the channel; 0 for this rank itself.
            ranks: numbers of the channel's ranks.
        """
        self._release_unread()
        out = [p for p, size in enumerate(sends) if size >= self.least_bytes and self._readers.get(ranks[p])]
        arenas = [
            self._peers.get(peer) if size >= self.least_bytes else None
            for size, peer in zip(receives, ranks, strict=True)
        ]
        if not out and not any(arenas):
            return None
        kept, parts = input, list(input.split(sends))
        if out:
            assert self._arena is not None, "peers have mapped it"
            if not self._arena.holds(input):
                sizes = [sends[p] for p in out]
                kept = self._arena.take(sum(sizes))
                for p, copy in zip(out, kept.split(sizes), strict=True):
                    parts[p] = copy.copy_(parts[p])
            for p in out:
                place = self._arena.send(parts[p], ranks[p])
                parts[p] = torch.frombuffer(bytearray(_PLACE.pack(*place, sends[p])), dtype=torch.uint8)
        sizes = [size if arena is None else _PLACE.size for size, arena in zip(receives, arenas, strict=True)]
        wires = torch.cat(parts), torch.empty(sum(sizes), dtype=torch.uint8)
        return SharedMessage(title, *wires, [part.numel() for part in parts], sizes, receives, arenas, kept)

    # -- results that are dropped ------------------------------------------------------------------------------

    def drop(self, handle: SharedHandle) -> None:
        """Release the parts of a call whose result is not wanted, once they have arrived."""
        self._unread.append(handle)

    def _release_unread(self) -> None:
        for handle in [handle for handle in self._unread if handle.is_done()]:
            self._unread.remove(handle)
            handle.release()


@final
@dataclass
class SharedMessage:
    """A call some of whose parts are shared.

    Args:
        title: of the call.
        input, output: the message's bytes, and those that arrive.
        input_splits, output_splits: of these, per rank.
        receives: bytes from each rank, shared parts included.
        arenas: per rank, the memory of its part; None if the part is in the message.
        kept: the memory of the parts that this rank shares, until the call has ended.
    """

    title: str
    input: Tensor
    output: Tensor
    input_splits: list[int]
    output_splits: list[int]
    receives: list[int]
    arenas: list[PeerArena | None]
    kept: Tensor

    def parts(self) -> Iterator[Tensor]:
        """Yield each rank's part, as bytes, once the call has ended."""
        for part, size, arena in zip(self.output.split(self.output_splits), self.receives, self.arenas, strict=True):
            if arena is not None:
                *place, sent = _PLACE.unpack(part.numpy())
                part = arena.read(Place(*place), sent)
                if sent != size:
                    raise CommsError(
                        f"{self.title}: got a part of {sent} bytes; expected {size}. A rank makes other calls: every "
                        "rank makes the same calls in the same order."
                    )
            yield part

    def received(self, into: Tensor | None) -> Tensor:
        """Return all parts as bytes, in `into` if given; otherwise a single part remains where it lies."""
        if into is None and sum(map(bool, self.receives)) == 1:
            return next(part for part in self.parts() if part.numel())
        if into is None:
            into = reused_empty(sum(self.receives), torch.uint8)
        for to, part in zip(into.split(self.receives), self.parts(), strict=True):
            to.copy_(part)
        return into


@final
class SharedHandle:
    """The handle of a call some of whose parts are shared.

    Args:
        shared: takes the parts if the handle is dropped before `wait`.
        handle: of the message.
        output: destination of all parts; None: `wait` chooses it.
        dtype: of the parts.
    """

    def __init__(
        self, shared: SharedParts, handle: Handle, message: SharedMessage, output: Tensor | None, dtype: torch.dtype
    ) -> None:
        self._shared, self._handle, self._output, self._dtype = shared, handle, output, dtype
        self._message: SharedMessage | None = message
        self._received: Tensor | None = None

    def wait(self) -> Tensor:
        if self._received is None:
            self._handle.wait()
            message, self._message = self._message, None
            assert message is not None, "received once"
            into = None if self._output is None else self._output.detach().view(torch.uint8)
            received = message.received(into).view(self._dtype)
            self._received = received if self._output is None else self._output
        return self._received

    def is_done(self) -> bool:
        return self._handle.is_done()

    def release(self) -> None:
        """Let the senders of a call that has ended reuse their memory."""
        message, self._message = self._message, None
        try:
            self._handle.wait()
        except CommsError:  # the group has failed, and the places of its parts are not known
            return
        for _ in message.parts() if message is not None else ():
            pass

    def __del__(self) -> None:
        if self._message is not None:
            message, self._message = self._message, None
            self._shared.drop(SharedHandle(self._shared, self._handle, message, None, self._dtype))
