"""Chunked transfer: send the values of tables from old tiles to new tiles in messages of bounded size.

Nouns
  part    one tensor that moves: a weight, a slot, a gradient. With `cells` it has the tile's shape, else one or several
          numbers per row
  load    the parts of a table, and the transfers from its old tiles to its new ones
  round   one message to and from every peer that has messages left

Cells whose source and target are the same rank are copied directly. If a message is one slice, and its memory is
contiguous on a side, that side sends from or receives into this memory. Only other messages (of several slices, or of
slices cut by columns) are packed into buffers.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.parallel.resharding.transfers import (
    Slice,
    Transfer,
    cut,
    message_bytes,
    messages,
    row_transfers,
    starts,
    transfers,
)
from tilerec.spec.tile import Rectangle, Tiling
from tilerec.spec.topology import Topology
from tilerec.storage.row_file import copy_rows, fetch, in_use, release


@dataclass
class TensorTransfer:
    """One tensor of a table, over all tiles of this rank.

    Args:
        cells: True: it has the tile's shape. False: its first dimension is the tile's rows, and the others are free.
        unit: bytes of a cell, or of a row.
        before, after: the tensors, one per old and per new tile of this rank. `after` is allocated when the table
            moves.
    """

    name: str
    cells: bool
    unit: int
    before: list[Tensor]
    after: list[Tensor] = field(default_factory=list)


class TableTransfer:
    """The data of one table that moves.

    Args:
        old, new: tilings of the table.
        parts: its tensors, equal on every rank except for their memory.
    """

    def __init__(self, old: Tiling, new: Tiling, parts: Sequence[TensorTransfer], topology: Topology) -> None:
        self.old, self.new, self.parts = old, new, list(parts)
        self._cells = transfers(old, new, topology)
        by_rows = any(not part.cells for part in parts)
        self._rows = row_transfers(old, new, topology) if by_rows else []

    def transfers(self) -> Iterator[tuple[int, Transfer, int]]:
        """Yield (part index, transfer, bytes of one row of the transfer), in the same order on all ranks."""
        for p, part in enumerate(self.parts):
            for transfer in self._cells if part.cells else self._rows:
                yield p, transfer, part.unit * (transfer.rectangle.width if part.cells else 1)

    def row_bytes(self) -> int:
        """Return the bytes of the largest row that moves. A message holds at least one row."""
        return max((size for _, _, size in self.transfers()), default=0)

    def bytes_between(self) -> dict[tuple[int, int], int]:
        """Return (source, target) -> bytes over all ranks. Pairs with source == target are copies within a rank."""
        return {pair: size for pair, (size, _, _) in self.packed_between().items()}

    def packed_between(self) -> dict[tuple[int, int], tuple[int, int, int]]:
        """Return (source, target) -> (bytes, those that the source packs, those that the target unpacks).

        Bytes are packed or unpacked where a transfer has fewer columns than the tile, so its memory is not contiguous.
        """
        widths = [
            {(rank, k): tile.c1 - tile.c0 for rank in own for k, tile in enumerate(tiling.tiles_of(rank))}
            for tiling, own in ((self.old, self._sources()), (self.new, self._targets()))
        ]
        found: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0, 0])
        for p, transfer, row_bytes in self.transfers():
            size, cells = transfer.rectangle.rows * row_bytes, self.parts[p].cells
            total = found[(transfer.source, transfer.target)]
            total[0] += size
            width = transfer.rectangle.width
            total[1] += size * (cells and width < widths[0][(transfer.source, transfer.source_leaf)])
            total[2] += size * (cells and width < widths[1][(transfer.target, transfer.target_leaf)])
        return {pair: (a, b, c) for pair, (a, b, c) in found.items()}

    def _sources(self) -> set[int]:
        return {transfer.source for transfer in self._cells}

    def _targets(self) -> set[int]:
        return {transfer.target for transfer in self._cells}

    def bytes_held(self, tiling: Tiling, ranks: int) -> list[int]:
        """Return the bytes of the table's parts on each rank under a tiling."""
        cell = sum(part.unit for part in self.parts if part.cells)
        row = sum(part.unit for part in self.parts if not part.cells)
        return [sum(tile.cells * cell + tile.rows * row for tile in tiling.tiles_of(rank)) for rank in range(ranks)]


def directions(loads: Sequence[TableTransfer]) -> int:
    """Return the largest number of peers of any rank in these moves: its targets plus its sources."""
    counts: defaultdict[int, int] = defaultdict(int)
    for source, target in {pair for load in loads for pair in load.bytes_between()}:
        if source != target:
            counts[source] += 1
            counts[target] += 1
    return max(counts.values(), default=0)


class ChunkedTransfer:
    """This rank's part in moving several tables at once. The constructor allocates all buffers.

    Args:
        most: largest bytes of a message. A row that is larger is a message of its own.
        device: device of the tables, the same kind on all ranks.
    """

    def __init__(self, group: Group, loads: Sequence[TableTransfer], most: int, device: torch.device) -> None:
        self._group, self._loads = group, list(loads)
        me = group.rank
        self._device = device
        self._kept: list[Slice] = []
        sends: defaultdict[int, list[Slice]] = defaultdict(list)
        receives: defaultdict[int, list[Slice]] = defaultdict(list)
        for t, load in enumerate(loads):
            for p, transfer, row_bytes in load.transfers():
                if transfer.stays:
                    if transfer.source == me:
                        rectangle = transfer.rectangle
                        self._kept.append(Slice(t, p, transfer, rectangle.r0, rectangle.r1, 0))
                elif transfer.source == me:
                    sends[transfer.target].extend(cut(transfer, t, p, row_bytes, most))
                elif transfer.target == me:
                    receives[transfer.source].extend(cut(transfer, t, p, row_bytes, most))
        self._sends = {peer: list(messages(own, most)) for peer, own in sorted(sends.items())}
        self._receives = {peer: list(messages(own, most)) for peer, own in sorted(receives.items())}
        self._out = {
            peer: self._buffer([m for m in own if self._direct(m, False) is None]) for peer, own in self._sends.items()
        }
        self._into = {
            peer: self._buffer([m for m in own if self._direct(m, True) is None])
            for peer, own in self._receives.items()
        }
        every = [*self._sends.values(), *self._receives.values()]
        self.rounds = max((len(own) for own in every), default=0)
        self.sent = sum(own.bytes for parts in self._sends.values() for m in parts for own in m)

    def run(self, rounds: int, after_round: Callable[[int], None]) -> BaseException | None:
        """Move all values. Return an error of this rank after the last round instead of raising it.

        Peers wait for a fixed number of bytes, so a failed rank still sends all its messages; their content is then
        undefined.

        Args:
            rounds: the largest number of rounds of any rank. Every rank takes part in each round.
            after_round: called with the number of finished rounds; may raise.

        Raises:
            CommsError: a peer is gone.
        """
        failure: BaseException | None = None
        try:
            for own in self._kept:
                copy_rows(self._window(own, True), self._window(own, False))
        except BaseException as error:
            failure = error
        for k in range(rounds):
            sends = {peer: own[k] for peer, own in self._sends.items() if k < len(own)}
            receives = {peer: own[k] for peer, own in self._receives.items() if k < len(own)}
            for window in self._windows(sends.values(), receives.values()):
                fetch(window)
            out: dict[int, Tensor] = {}
            for peer, message in sends.items():
                direct = self._direct(message, False)
                out[peer] = self._out[peer][: message_bytes(message)] if direct is None else direct
                if direct is None and failure is None:
                    try:
                        self._pack(message, out[peer])
                    except BaseException as error:
                        failure = error
            into: dict[int, Tensor] = {}
            for peer, message in receives.items():
                direct = self._direct(message, True)
                into[peer] = self._into[peer][: message_bytes(message)] if direct is None else direct
            # One call for all ranks: gloo is faster that way than with single messages. The empty message to itself
            # gives a rank that has no messages left the same dtype as the others.
            out.setdefault(self._group.rank, torch.empty(0, dtype=torch.uint8, device=self._device))
            self._group.swap("reshard", into, out).wait()
            if failure is None:
                try:
                    for peer, message in receives.items():
                        if self._direct(message, True) is None:
                            self._unpack(message, into[peer])
                    after_round(k + 1)
                except BaseException as error:
                    failure = error
            for window in self._windows(sends.values(), receives.values()):
                release(window)
        return failure

    # ------------------------------------------------------------------------------------------------ memory

    def _window(self, own: Slice, after: bool) -> Tensor:
        """Return the view of a slice in the old or the new tile."""
        load, transfer = self._loads[own.table], own.transfer
        part, (_, _, c0, c1) = load.parts[own.part], transfer.rectangle
        leaf = transfer.target_leaf if after else transfer.source_leaf
        memory = (part.after if after else part.before)[leaf]
        tile: Rectangle = (load.new if after else load.old).tiles_of(self._group.rank)[leaf]
        rows = memory[own.r0 - tile.r0 : own.r1 - tile.r0]
        return rows[:, c0 - tile.c0 : c1 - tile.c0] if part.cells else rows

    def _windows(
        self, sent: Iterable[Sequence[Slice]], received: Iterable[Sequence[Slice]]
    ) -> Iterator[Tensor]:  # fmt: skip
        """Yield the contiguous views of a round, if tables are in files; `copy_rows` copies the others in blocks."""
        for some, after in ((sent, False), (received, True)) if in_use() else ():
            for own in itertools.chain.from_iterable(some):
                window = self._window(own, after)
                if window.is_contiguous():
                    yield window

    def _direct(self, message: Sequence[Slice], after: bool) -> Tensor | None:
        """Return a message's memory as bytes if it is one slice in contiguous memory, else None."""
        if len(message) > 1:
            return None
        window = self._window(message[0], after)
        return window.view(-1).view(torch.uint8) if window.is_contiguous() else None

    def _buffer(self, own: Sequence[Sequence[Slice]]) -> Tensor:
        """Return a buffer for the largest of these messages."""
        size = max((message_bytes(message) for message in own), default=0)
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    def _views(self, message: Sequence[Slice], buffer: Tensor, after: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the view of each slice in its tile, and its view in the buffer."""
        for own, at in zip(message, starts(message), strict=True):
            window = self._window(own, after)
            yield window, buffer[at : at + own.bytes].view(window.dtype).view(window.shape)

    def _pack(self, message: Sequence[Slice], buffer: Tensor) -> None:
        for window, place in self._views(message, buffer, False):
            copy_rows(place, window)

    def _unpack(self, message: Sequence[Slice], buffer: Tensor) -> None:
        for window, place in self._views(message, buffer, True):
            copy_rows(window, place)


def sent_by_rank(loads: Sequence[TableTransfer], ranks: int) -> tuple[list[int], list[int], int]:
    """Return the bytes that each rank sends, the bytes that each receives, and the sum of bytes copied within ranks."""
    out, into, kept = [0] * ranks, [0] * ranks, 0
    for (source, target), size in itertools.chain.from_iterable(load.bytes_between().items() for load in loads):
        if source == target:
            kept += size
        else:
            out[source] += size
            into[target] += size
    return out, into, kept
