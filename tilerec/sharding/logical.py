"""Logical tensors: tensors with the shape of the whole table, of which each rank holds some rectangles.

Nouns
  cover    the rectangles of a logical tensor, with the ranks that hold each; `[rows]` tensors are `rows` x 1, single
           numbers 1 x 1
  written  those rectangles of a cover that hold every cell once: only these are saved and sent. (Every column block has
           its own copy of state per row; if column blocks are cut at different rows, the first block's is written.)
  piece    a rectangle that this rank holds, with its memory: a view of the leaf or of the optimizer's slot
  writer   the lowest rank that holds a rectangle: it saves and sends it
  copies   of hot rows, on every rank, beside the pieces (`head_rows.py`): written with the rows, and never read

Values are never copied: a write to a piece is a write to the table. `state.py` makes tensors for state dicts from these
records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.ops.cache.definition import indexable
from tilerec.sharding.head_rows import HotCopies
from tilerec.spec.tile import Rectangle, Tile, ceil_chunks
from tilerec.storage.file_rows import select_rows
from tilerec.storage.row_file import copy_rows


@dataclass(frozen=True)
class Cover:
    """Distribution of a logical tensor's cells over ranks.

    Args:
        shape: shape of the tensor: two numbers, one (per row), or none.
        tiles: every rectangle with the ranks that hold it; rectangles that are not written may overlap.
        written: positions in `tiles` of rectangles that together hold every cell once.
        repeated: some rank holds a rectangle more than once, one copy for each of several tiles.
    """

    shape: tuple[int, ...]
    tiles: tuple[Tile, ...]
    written: tuple[int, ...]
    repeated: bool = False

    @staticmethod
    def of_cells(shape: tuple[int, int], tiles: Sequence[Tile]) -> Cover:
        """Return the cover of a tensor of the table's shape."""
        return Cover(shape, tuple(tiles), tuple(range(len(tiles))))

    @staticmethod
    def of_rows(rows: int, tiles: Sequence[Tile], column: bool = False) -> Cover:
        """Return the cover of a number per row, `[rows]` or as a column `[rows, 1]`; every tile has its own copy."""
        owners: dict[tuple[int, int], list[int]] = {}
        first: set[tuple[int, int]] = set()
        for tile in tiles:
            owners.setdefault((tile.r0, tile.r1), []).extend(tile.owners)
            if tile.c0 == 0:
                first.add((tile.r0, tile.r1))
        spans = sorted(owners)
        return Cover(
            (rows, 1) if column else (rows,),
            tuple(Tile(r0, r1, 0, 1, tuple(sorted(set(owners[(r0, r1)])))) for r0, r1 in spans),
            tuple(t for t, span in enumerate(spans) if span in first),
            any(len(set(ranks)) < len(ranks) for ranks in owners.values()),
        )

    @staticmethod
    def of_one(tiles: Sequence[Tile]) -> Cover:
        """Return the cover of a single number, held by every rank that holds a tile."""
        ranks = [rank for tile in tiles for rank in tile.owners]
        owners = tuple(sorted(set(ranks)))
        return Cover((), (Tile(0, 1, 0, 1, owners),), (0,), len(owners) < len(ranks))

    def whole_on(self, size: int) -> bool:
        """Return True if each of `size` ranks holds the whole tensor exactly once."""
        return len(self.tiles) == 1 and len(self.tiles[0].owners) == size and not self.repeated

    def shard_dim(self, size: int) -> int | None:
        """Return the dimension that is cut as torch's `Shard` on a mesh of all ranks cuts it, or None."""
        parts = [(tile.rectangle, tile.owners) for tile in self.tiles]
        if not self.shape or self.repeated or len(self.written) != len(parts):
            return None
        rows, columns = self.shape[0], self.shape[1] if len(self.shape) == 2 else 1
        cuts = ceil_chunks(rows, size)
        even = [(Rectangle(r0, r1, 0, columns), (rank,)) for rank, (r0, r1) in enumerate(pairwise(cuts))]
        if sorted(parts) == even:
            return 0
        cuts = ceil_chunks(columns, size)
        even = [(Rectangle(0, rows, c0, c1), (rank,)) for rank, (c0, c1) in enumerate(pairwise(cuts))]
        # torch gives a rank without columns a [rows, 0] shard; here, such a rank holds no rectangle.
        return 1 if len(even) == size > 1 and sorted(parts) == even else None

    def offsets(self, tile: Tile) -> tuple[int, ...]:
        """Return a rectangle's first cell, in the tensor's dimensions."""
        return (tile.r0, tile.c0)[: len(self.shape)]

    def extent(self, tile: Tile) -> tuple[int, ...]:
        """Return a rectangle's size, in the tensor's dimensions."""
        return (tile.r1 - tile.r0, tile.c1 - tile.c0)[: len(self.shape)]


class Piece(NamedTuple):
    """A rectangle that this rank holds: its position in `Cover.tiles`, and its memory, of `Cover.extent`."""

    tile: int
    memory: Tensor


@dataclass(frozen=True)
class LogicalTensor:
    """A logical tensor on one rank.

    Args:
        cover: the same on every rank.
        pieces: this rank's rectangles.
        group: all ranks.
        like: an empty tensor of the logical tensor's dtype and device.
        copies: of this rank, which `load` and `load_whole` fill, too; None: there are none.
    """

    cover: Cover
    pieces: tuple[Piece, ...]
    group: Group
    like: Tensor
    copies: HotCopies | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LogicalTensor:
        return self.mapped(torch.clone)

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> LogicalTensor:
        """Return the same cover over other memory: `fn` applied to every piece."""
        pieces = tuple(Piece(piece.tile, fn(piece.memory)) for piece in self.pieces)
        copies = self.copies and self.copies._replace(memory=fn(self.copies.memory))
        return LogicalTensor(self.cover, pieces, self.group, fn(self.like), copies)

    def memories(self) -> list[Tensor]:
        """Return all memory of the tensor on this rank."""
        return [memory for _, memory in self.pieces] + ([] if self.copies is None else [self.copies.memory])

    # ---------------------------------------------------------------------------------------------- whole values

    @torch.no_grad()
    def full(self) -> Tensor:
        """Return the whole tensor, on every rank. Collective."""
        cover, me = self.cover, self.group.rank
        out = self.like.new_empty(cover.shape)
        own = {piece.tile: piece.memory for piece in reversed(self.pieces)}
        receives: dict[int, list[int]] = {}
        sends: dict[int, list[Tensor]] = {}
        for t in cover.written:
            tile = cover.tiles[t]
            if t in own:
                self._view_of(out, tile).copy_(own[t])
            else:
                receives.setdefault(tile.owners[0], []).append(t)
            if tile.owners[0] == me:
                for rank in range(self.group.size):
                    if rank not in tile.owners:
                        sends.setdefault(rank, []).append(own[t].reshape(-1))
        received = {rank: self._buffer_for(tiles) for rank, tiles in receives.items()}
        self.group.exchange(
            "full tensor", received, {rank: _concatenated(parts) for rank, parts in sends.items()}
        ).wait()
        for rank, tiles in receives.items():
            at = 0
            for t in tiles:
                place = self._view_of(out, cover.tiles[t])
                place.copy_(received[rank][at : at + place.numel()].view(place.shape))
                at += place.numel()
        return out

    def _buffer_for(self, tiles: Sequence[int]) -> Tensor:
        sizes = [self.cover.tiles[t].rectangle.cells for t in tiles]
        return self.like.new_empty(sum(sizes))

    def _view_of(self, whole: Tensor, tile: Tile) -> Tensor:
        """Return the view of a rectangle in a whole tensor."""
        if not self.cover.shape:
            return whole
        rows = whole[tile.r0 : tile.r1]
        return rows[:, tile.c0 : tile.c1] if len(self.cover.shape) == 2 else rows

    # ---------------------------------------------------------------------------------------------------- loading

    @torch.no_grad()
    def load_whole(self, value: Tensor) -> None:
        """Copy the values of a whole tensor of this shape; each rank reads its part."""
        for tile, memory in self.pieces:
            copy_into(memory, self._view_of(value.detach(), self.cover.tiles[tile]))
        if self.copies is not None:
            rows_H = self.copies.rows_H.to(value.device)
            self.copies.memory.copy_(indexable(value.detach())[rows_H].view(value.dtype))

    @torch.no_grad()
    def load(self, source: LogicalTensor) -> None:
        """Copy the values of another logical tensor of this shape, with any cover over the same ranks. Collective.

        A cell that this rank lacks is sent by its writer. Values are converted to this tensor's dtype.
        """
        assert source.cover.shape == self.cover.shape
        if source.cover == self.cover:
            theirs = {piece.tile: piece.memory for piece in reversed(source.pieces)}
            for tile, memory in self.pieces:  # equal covers may repeat a rectangle on different ranks
                copy_into(memory, theirs[tile])
        else:
            self._exchange_load(source)
        self.fill_copies()

    def fill_copies(self) -> None:
        """Fill the copies of hot rows from the pieces, of which writers send them. Collective, if there are any."""
        if self.copies is not None:
            self.group.begin("hot rows")
            CopiesFill(self).run()

    def _exchange_load(self, source: LogicalTensor) -> None:
        me = self.group.rank
        self.group.begin("a load of state")
        theirs = {piece.tile: piece.memory for piece in reversed(source.pieces)}
        written = [(t, source.cover.tiles[t]) for t in source.cover.written]
        sends: dict[int, list[Tensor]] = {}
        for _, rank, target in self._targets():
            if rank == me:
                continue
            for t, tile in written:
                if t in theirs and _sender(tile, rank) == me and (both := _overlap(target, tile)) is not None:
                    sends.setdefault(rank, []).append(_within(theirs[t], tile, both).reshape(-1))
        receives: dict[int, list[tuple[Tensor, Rectangle, Tile]]] = {}
        for t, rank, target in self._targets():
            if rank != me:
                continue
            places = [memory for at, memory in self.pieces if at == t]
            for s, tile in written:
                both = _overlap(target, tile)
                if both is None:
                    continue
                if s in theirs:
                    for memory in places:
                        copy_into(_within(memory, target, both), _within(theirs[s], tile, both))
                else:
                    receives.setdefault(_sender(tile, me), []).append((places[0], both, target))
        received = {
            rank: source.like.new_empty(sum(both.cells for _, both, _ in items)) for rank, items in receives.items()
        }
        self.group.exchange("state", received, {rank: _concatenated(parts) for rank, parts in sends.items()}).wait()
        for rank, items in receives.items():
            at = 0
            for memory, both, target in items:
                place = _within(memory, target, both)
                place.copy_(received[rank][at : at + both.cells].view(place.shape))
                at += both.cells
        first: dict[int, Tensor] = {}
        for t, memory in self.pieces:  # fill further copies of a rectangle that this rank holds twice
            if t in first:
                memory.copy_(first[t])
            first.setdefault(t, memory)

    def _targets(self) -> Iterator[tuple[int, int, Tile]]:
        """Yield (position, rank, tile) for every rectangle and every rank that holds it."""
        for t, tile in enumerate(self.cover.tiles):
            for rank in tile.owners:
                yield t, rank, tile


class CopiesFill:
    """One fill of the copies of a logical tensor from its pieces. The constructor allocates the messages.

    Ranks that have agreed on the fill make and run it without a handshake: a dead rank never answers one, but gloo
    reports its closed connection to ranks that wait for its message.
    """

    def __init__(self, tensor: LogicalTensor) -> None:
        assert tensor.copies is not None
        rows_H, memory = tensor.copies
        self._group, me = tensor.group, tensor.group.rank
        own = {piece.tile: piece.memory for piece in reversed(tensor.pieces)}
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []  # copies, the piece with their rows, positions in it
        self._places: dict[int, list[Tensor]] = {}  # by rank: copies of rows that it sends
        sends: dict[int, list[int]] = {}
        places: dict[int, Tensor] = {}
        for t in tensor.cover.written:
            tile = tensor.cover.tiles[t]
            first, last = torch.searchsorted(rows_H, rows_H.new_tensor([tile.r0, tile.r1])).tolist()
            place = memory[first:last]  # the ids are ascending, so those of a tile are neighbours
            places[t] = place = place[:, tile.c0 : tile.c1] if memory.dim() == 2 else place
            if t not in own:
                self._places.setdefault(tile.owners[0], []).append(place)
                continue
            at_H = (rows_H[first:last] - tile.r0).to(own[t].device)  # rows in host memory, copies on a device
            self._kept.append((place, own[t], at_H))
            if tile.owners[0] == me:
                for rank in sorted({*range(self._group.size)} - {*tile.owners}):
                    sends.setdefault(rank, []).append(t)
        # Ranks that get the same tiles share a message.
        self._messages = {
            tiles: (memory.new_empty(sum(places[t].numel() for t in tiles)), [places[t] for t in tiles])
            for tiles in map(tuple, sends.values())
        }
        self._sends = {rank: self._messages[tuple(tiles)][0] for rank, tiles in sends.items()}
        self._receives = {rank: memory.new_empty(sum(map(Tensor.numel, own))) for rank, own in self._places.items()}

    @torch.no_grad()
    def run(self) -> None:
        """Copy and exchange the rows. Collective.

        A rank that cannot read its rows raises after the exchange: its peers wait for a message.
        """
        failure: BaseException | None = None
        try:
            for place, piece, at_H in self._kept:
                indexable(place).copy_(select_rows(indexable(piece), at_H))
            for message, places in self._messages.values():
                for part, place in _parts(message, places):
                    part.copy_(place)
        except BaseException as error:
            failure = error
        self._group.exchange("hot rows", self._receives, self._sends).wait()
        if failure is not None:
            raise failure
        for rank, places in self._places.items():
            for part, place in _parts(self._receives[rank], places):
                place.copy_(part)


def _parts(message: Tensor, places: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the part of a message for each place, in the shape of the place, and the place."""
    for part, place in zip(message.split([own.numel() for own in places]), places, strict=True):
        yield part.view(place.shape), place


def _sender(tile: Tile, rank: int) -> int:
    """Return the rank that sends a rectangle to `rank`: `rank` itself if it holds the rectangle."""
    return rank if rank in tile.owners else tile.owners[0]


def _overlap(a: Tile, b: Tile) -> Rectangle | None:
    r0, r1, c0, c1 = max(a.r0, b.r0), min(a.r1, b.r1), max(a.c0, b.c0), min(a.c1, b.c1)
    return Rectangle(r0, r1, c0, c1) if r0 < r1 and c0 < c1 else None


def _within(memory: Tensor, tile: Tile, part: Rectangle) -> Tensor:
    """Return the view of a part of a rectangle's memory."""
    if memory.dim() == 0:
        return memory
    rows = memory[part.r0 - tile.r0 : part.r1 - tile.r0]
    return rows[:, part.c0 - tile.c0 : part.c1 - tile.c0] if memory.dim() == 2 else rows


def copy_into(memory: Tensor, values: Tensor) -> None:
    """Copy, unless both are the same memory, as after a checkpoint was read into it in place."""
    same = memory.dtype == values.dtype and memory.data_ptr() == values.data_ptr() and memory.numel()
    if not (same and memory.stride() == values.stride()):
        copy_rows(memory, values)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))
