"""`ReplicaSync`: averages weights and optimizer state of replicas that train independently.

    union     replicas exchange the numbers of the rows that any of them touched since the last sync
    average   w[row] = sum over replicas of w[row] / R, and the same for every optimizer slot; only the rows of the
              union are sent
    counts    update counts (Adam's t, per table or per row) become the largest of the replicas
    hot rows  each rank averages its own copies, and writes those of its tiles' rows to these

Copies of a hot row on the ranks of a sharding group have one value before a sync, and must have one after it. An
all-reduce may add replicas in another order in each replica group. So hot rows travel to all replicas, and each adds
them in the order of the replicas.

A row that only some replicas touched is averaged over all; the other replicas contribute its old value. Sums are
computed in fp32 (fp64 for fp64 tables) and rounded once, so the result has the same bits on every replica.

Legend: R replicas, U rows that any of them touched.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from tilerec.comms.agreement import agree, digest
from tilerec.comms.group import Group, Handle, Pending
from tilerec.ops.runtime.upload import upload
from tilerec.parallel.two_d.settings import AverageHook
from tilerec.sharding.changed_rows import SLOTS, WEIGHTS, changed_rows_of
from tilerec.sharding.head_rows import write_back
from tilerec.sharding.table import ShardedTable
from tilerec.sharding.update import TileRows

CHUNK = 1 << 26
"""Bytes per message of a blocking sync; two messages are in memory at a time."""


@dataclass(frozen=True)
class _Piece:
    """Some rows of one tensor."""

    memory: Tensor  # [rows, D] or [rows]
    rows_U: Tensor


@dataclass(frozen=True)
class _Chunk:
    """Pieces of one dtype in one message; of hot rows, `received` has those of all replicas, in their order."""

    pieces: list[_Piece]
    flat: Tensor
    handle: Handle | Pending | None  # None: the user's hook has averaged `flat`
    received: Sequence[Tensor] = ()

    def averaged(self, replicas: int) -> Tensor:
        """Wait for the message, and return the average."""
        if self.handle is None:
            return self.flat
        total = self.handle.wait()
        if total is None:
            total = self.received[0].clone()
            for part in self.received[1:]:
                total += part
        return total / replicas


@final
class ReplicaSync:
    """Synchronization of the attached tables of some modules over the ranks of a replica group.

    Args:
        axis: the replica group, R ranks that hold the same tiles.
        modules: the modules with the tables; tables without an attached optimizer are skipped.
        hook: averages tensors over the replica group in place of an all-reduce, except hot rows; None: all-reduce.
        ranks: numbers of the group's ranks in errors; None: their numbers in the group.
    """

    def __init__(
        self, axis: Group, modules: Sequence[nn.Module], hook: AverageHook | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self.axis = axis
        self.modules = tuple(modules)
        self.hook, self.ranks = hook, ranks
        self._sent: list[_Chunk] = []
        self._waiting: list[TileRows] = []
        self._hot: list[tuple[TileRows, Tensor]] = []  # copies of hot rows that a sync changes, and which

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicaSync:
        raise AssertionError("a copied model has its own ReplicaSync")

    def rows(self) -> list[TileRows]:
        """Return the tiles to synchronize, in one order on all replicas."""
        found: dict[int, TileRows] = {}
        for module in self.modules:
            for table in module.modules():
                if isinstance(table, ShardedTable):
                    found.update({id(rows): rows for rows in table.tile_rows if rows.touched is not None})
        return sorted(found.values(), key=TileRows._mark)

    @property
    def steps(self) -> int:
        """Updates since weights were last averaged, the maximum over the tables; equal on replicas in step."""
        return max([_touched(rows).updates for rows in self.rows()], default=0)

    @property
    def unsynced_steps(self) -> int:
        """Updates since weights and optimizer state were last averaged, the maximum over the tables."""
        return max([_touched(rows).state_updates for rows in self.rows()], default=0)

    def __call__(self, *, state: bool = True, wait: bool = True) -> None:
        """Average the touched rows. Collective over the replica group.

        Args:
            state: average optimizer state, too; state that is left out is averaged in the next call with `state`.
            wait: False: return early; the average ends when the rows are next read or written, or in `settle`. Until
                then no other code may write the rows.

        Raises:
            ConfigError: replicas differ in `state`, in whether they have a hook, or in their optimizers. All
                replicas raise, before any row is written.
        """
        self.settle()
        rows = self.rows()
        for tile in rows:
            tile.settle()
        done = WEIGHTS | SLOTS if state else WEIGHTS
        if self.axis.size == 1 or not rows:
            _clear_marks(rows, done)
            return
        touched = self._union(rows, done)
        for tile, rows_U in zip(rows, touched, strict=True):
            tile.about_to_write(rows_U)
        if state:
            self._take_largest_steps(rows, touched)
        hot = [tile.names is not None for tile in rows]
        self._hot = [(tile, rows_U) for tile, rows_U, own in zip(rows, touched, hot, strict=True) if own]
        chunks = (
            (pieces, in_order)
            for in_order in (False, True)
            for pieces in self._chunks(
                [tile for tile, own in zip(rows, hot, strict=True) if own is in_order],
                [rows_U for rows_U, own in zip(touched, hot, strict=True) if own is in_order],
                state, CHUNK if wait else None,
            )
        )  # fmt: skip
        # Marks are cleared after the rows are sent: if a hook fails, the next sync includes these rows.
        if wait:
            running: deque[_Chunk] = deque()
            for chunk in chunks:
                running.append(self._send(*chunk))
                if len(running) > 1:
                    self._write(running.popleft())
            while running:
                self._write(running.popleft())
            self._finish(rows)
            _clear_marks(rows, done)
            return
        self._sent = [self._send(*chunk) for chunk in chunks]
        _clear_marks(rows, done)
        self._waiting = rows
        for tile in rows:
            _touched(tile).pending = self.settle

    def settle(self) -> None:
        """Wait for the running messages and write their rows. Not a collective."""
        sent, self._sent = self._sent, []
        waiting, self._waiting = self._waiting, []
        for tile in waiting:
            _touched(tile).pending = None
        for chunk in sent:
            self._write(chunk)
        self._finish(waiting)

    def _finish(self, rows: Sequence[TileRows]) -> None:
        """Write hot rows to their places in the tables, and announce that all rows are written."""
        hot, self._hot = self._hot, []
        for tile in rows:
            tile.wrote()
        if hot:
            ends = list(itertools.accumulate([rows_U.numel() for _, rows_U in hot], initial=0))
            updated = [(h, *bounds) for h, bounds in enumerate(itertools.pairwise(ends))]
            write_back([head.as_head() for head, _ in hot], torch.cat([rows_U for _, rows_U in hot]), updated)

    # ------------------------------------------------------------------------------------------------ row numbers

    def _union(self, rows: Sequence[TileRows], wanted: int) -> list[Tensor]:
        """Return per tile the rows that any replica has touched, ascending; set update counts to the largest."""
        touched = [_touched(tile) for tile in rows]
        own, updates = changed_rows_of(touched, wanted, [tile.state[tile._counter] for tile in rows])
        settings = {
            "include_optimizer_state": bool(wanted & SLOTS),
            "a hook averages": self.hook is not None,
            "tables": {
                f"{i}: {t.name}": [
                    type(t.spec).__name__,
                    [slot.name for slot in _slots(t)],
                    _hyper_parameters(t),
                ]
                for i, t in enumerate(rows)
            },
        }
        settings_word = int.from_bytes(digest("what sync() averages", settings)[:8], "little", signed=True)
        facts = [
            settings_word,
            len(rows),
            *(n for t, u in zip(updates, own, strict=True) for n in (t, u.numel())),
        ]
        counts = self._exchange_all(
            "replica counts",
            upload(facts, self.axis.device),
            [2 + 2 * len(rows)] * self.axis.size,
        )
        peer_counts = torch.stack(counts).view(self.axis.size, -1, 2).tolist()
        if any(pairs[0] != peer_counts[0][0] for pairs in peer_counts):
            agree(self.axis, "what sync() averages", settings, self.ranks)
        peer_counts = [pairs[1:] for pairs in peer_counts]
        for t, tile in enumerate(rows):
            most = max(pairs[t][0] for pairs in peer_counts)
            if most > updates[t]:
                tile.state[tile._counter].fill_(most)
        numbers = torch.cat([u.to(self.axis.device) for u in own])
        received = self._exchange_all(
            "replica row numbers", numbers, [sum(n for _, n in pairs) for pairs in peer_counts]
        )
        for peer, (pairs, theirs) in enumerate(zip(peer_counts, received, strict=True)):
            if peer != self.axis.rank:
                for tile, part in zip(rows, theirs.split([n for _, n in pairs]), strict=True):
                    _touched(tile).mark(part.to(tile.leaf.device))
        union, _ = changed_rows_of(touched, wanted)
        return [rows_U.to(tile.leaf.device) for tile, rows_U in zip(rows, union, strict=True)]

    def _exchange_all(self, name: str, mine: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the tensors of all replicas, given their sizes. Collective."""
        peers = [rank for rank in range(self.axis.size) if rank != self.axis.rank]
        received = {rank: mine.new_empty(sizes[rank]) for rank in peers}
        self.axis.swap(name, received, dict.fromkeys(peers, mine)).wait()
        received[self.axis.rank] = mine
        return [received[rank] for rank in range(self.axis.size)]

    def _take_largest_steps(self, rows: Sequence[TileRows], touched: Sequence[Tensor]) -> None:
        """Set per-row update counts, for optimizers that have them, to the largest of the replicas."""
        counted = [
            (tile.state["step"], u)
            for tile, u in zip(rows, touched, strict=True)
            if any(slot.name == "step" for slot in _slots(tile))
        ]
        if not counted:
            return
        mine = torch.cat([steps[u].to(self.axis.device) for steps, u in counted])
        largest = torch.stack(self._exchange_all("replica steps", mine, [mine.numel()] * self.axis.size)).amax(0)
        for (steps, u), part in zip(counted, largest.split([u.numel() for _, u in counted]), strict=True):
            steps.index_copy_(0, u, part.to(steps))

    # ------------------------------------------------------------------------------------------------ row values

    @torch.no_grad()
    def _chunks(
        self, rows: Sequence[TileRows], touched: Sequence[Tensor], state: bool, most: int | None
    ) -> Iterator[list[_Piece]]:
        """Yield messages of the rows' weights and slots, one dtype each, at most `most` bytes (None: no limit)."""
        open_: dict[torch.dtype, tuple[list[_Piece], int]] = {}
        for tile, rows_U in zip(rows, touched, strict=True):
            memories = [tile.leaf.detach()]
            if state:
                memories += [tile.state[slot.name] for slot in _slots(tile) if slot.name != "step"]
            for memory in memories:
                accum_dtype = _accum_dtype(memory)
                width = accum_dtype.itemsize * (memory.shape[1] if memory.dim() == 2 else 1)
                for part_U in rows_U.split(max(1, (most or 1 << 62) // width)) if rows_U.numel() else ():
                    pieces, size = open_.get(accum_dtype, ([], 0))
                    if pieces and most is not None and size + part_U.numel() * width > most:
                        yield pieces
                        pieces, size = [], 0
                    open_[accum_dtype] = ([*pieces, _Piece(memory, part_U)], size + part_U.numel() * width)
        for pieces, _ in open_.values():
            yield pieces

    @torch.no_grad()
    def _send(self, pieces: list[_Piece], in_order: bool) -> _Chunk:
        """Send rows to be averaged; in_order: with sums in the order of the replicas."""
        accum_dtype = _accum_dtype(pieces[0].memory)
        flat = torch.cat([piece.memory[piece.rows_U].to(accum_dtype).view(-1) for piece in pieces])
        if in_order:
            flat = flat.to(self.axis.device)
            received = [flat if rank == self.axis.rank else torch.empty_like(flat) for rank in range(self.axis.size)]
            peers = {rank: part for rank, part in enumerate(received) if rank != self.axis.rank}
            handle = self.axis.swap("replica rows", peers, dict.fromkeys(peers, flat))
            return _Chunk(pieces, flat, handle, received)
        if self.hook is not None:
            self.hook([flat])
            return _Chunk(pieces, flat, None)
        flat = flat.to(self.axis.device)  # rows of cached tables lie in host memory
        return _Chunk(pieces, flat, self.axis.all_reduce_("replica rows", flat))

    @torch.no_grad()
    def _write(self, chunk: _Chunk) -> None:
        flat = chunk.averaged(self.axis.size)
        shapes = [(p.rows_U.numel(), *p.memory.shape[1:]) for p in chunk.pieces]
        parts = flat.split([torch.Size(shape).numel() for shape in shapes])
        for piece, shape, part in zip(chunk.pieces, shapes, parts, strict=True):
            piece.memory.index_copy_(0, piece.rows_U, part.view(shape).to(piece.memory))


def _touched(rows: TileRows) -> Any:
    assert rows.touched is not None
    return rows.touched


def _clear_marks(rows: Sequence[TileRows], marks: int) -> None:
    for tile in rows:
        _touched(tile).agreed(marks)


def _hyper_parameters(tile: TileRows) -> dict[str, str]:
    return {} if tile.group is None else {name: repr(n) for name, n in tile.group.numbers().items()}


def _slots(tile: TileRows) -> Sequence[Any]:
    return tile.spec.slots if tile.spec is not None else ()


def _accum_dtype(memory: Tensor) -> torch.dtype:
    return torch.float64 if memory.dtype == torch.float64 else torch.float32
