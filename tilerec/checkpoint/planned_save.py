"""`PlannedSave`: what one rank writes to a checkpoint, planned while the job stands still.

    tensors of the job  ->  boxes, each assigned to one rank that holds it  ->  entries of this rank's data files

memory of a box            how its bytes are read
another thread writes      from a snapshot of the leaf's rows, or from a copy made now
this thread writes         from the memory itself
base, and rows are known   only the rows that have changed since the base
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilerec.checkpoint.blocks import BLOCK
from tilerec.checkpoint.data_file import CHUNK_BYTES, Entry, bytes_of, chunks_of, key_of
from tilerec.checkpoint.pieces import Box, is_spread, pieces_of, written_boxes
from tilerec.checkpoint.row_encoding import Form, RowEncoding
from tilerec.checkpoint.row_snapshot import RowSnapshot
from tilerec.comms.group import Group
from tilerec.storage.file_rows import select_rows
from tilerec.storage.row_file import bytes_between_rows, fetch, file_of, release
from tilerec.storage.table_rows import TableRows


class PlannedChunk(NamedTuple):
    """A box of a tensor, and its entry."""

    name: str
    box: Box
    entry: Entry


class PlannedRows(NamedTuple):
    """Some rows of a box of a tensor: entries of their numbers in the tensor, int64 ascending, and of their values."""

    name: str
    box: Box
    numbers: Entry
    values: Entry


class Changed(NamedTuple):
    """What has changed since the base; everything else of a tensor that the base has is left out.

    Args:
        tables: whose writes are announced; some tensors share their memory.
        rows: of some of these tables, the changed rows of the leaf, int64 ascending.
        boxes: of some boxes of other tensors, the changed rows of the tensor, int64 ascending.
    """

    tables: Sequence[TableRows]
    rows: Mapping[TableRows, Tensor]
    boxes: Mapping[tuple[str, Box], Tensor]


class PlannedSave:
    """What this rank writes.

    Args:
        tensors: of the job, by name.
        boxes: those that this rank writes, by tensor; see `boxes_of_rank`.
        changed: since the base.
        in_base: names, dtypes and shapes of the base's tensors; other tensors are written whole.
        ahead: True if another thread will write while training goes on.
        encodings: of tensors whose rows are saved in another form, by name.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], boxes: Sequence[tuple[str, Box]], changed: Changed,
        in_base: Mapping[str, Form], *, ahead: bool, encodings: Mapping[str, RowEncoding] | None = None,
    ) -> None:  # fmt: skip
        self._changed, self._in_base, self._ahead = changed, in_base, ahead
        self._encodings = encodings or {}
        self._leaves = Leaves(changed.tables)
        self._snapshots: dict[TableRows, RowSnapshot] = {}
        self._numbers: dict[tuple[Any, ...], Entry] = {}
        self.own: list[PlannedChunk | PlannedRows] = []
        self._records: dict[str, tuple[TableRows, int]] = {}  # by key of an entry: its table in a file, first row
        try:
            for name, box in boxes:
                memory = next(piece.memory for piece in pieces_of(name, tensors[name]) if piece.box == box)
                self._plan(name, tuple(tensors[name].shape), box, memory)
            self._put_records_together()
        except BaseException:
            self.close()
            raise

    @property
    def entries(self) -> list[Entry]:
        """The entries, each once, by falling size of their dtype: so each begins at a multiple of that size."""
        parts = [[own.entry] if isinstance(own, PlannedChunk) else [own.numbers, own.values] for own in self.own]
        once = {entry.key: entry for part in parts for entry in part}
        return sorted(once.values(), key=lambda entry: -entry.dtype.itemsize)

    @property
    def copied_bytes(self) -> int:
        """Bytes of rows that training has copied so far."""
        return sum(snapshot.copied_bytes for snapshot in self._snapshots.values())

    def check(self) -> None:
        """Raise `ConfigError` if other code has written rows that are saved, without an announcement."""
        for snapshot in self._snapshots.values():
            snapshot.check()

    def close(self) -> None:
        """End the observation of the tables, and free the copies."""
        for snapshot in self._snapshots.values():
            snapshot.close()
        self.own = []

    # ------------------------------------------------------------------------------------------------------ entries

    def _plan(self, name: str, shape: tuple[int, ...], box: Box, memory: Tensor) -> None:
        place = self._leaves.take(memory) if box.cells else None
        encoding = self._encodings.get(name)
        form = (memory.dtype, shape) if encoding is None else encoding.form((memory.dtype, shape))
        is_in_base = self._in_base.get(name) == form
        rows_U = self._changed.boxes.get((name, box)) if is_in_base and place is None else None
        if rows_U is not None:
            self._plan_listed(name, shape, box, memory, rows_U, encoding)
        elif place is None:
            held = memory.detach().to("cpu", copy=True) if self._ahead else memory
            for chunk in chunks_of(box, memory.dtype):
                part = box.within(held, chunk)
                saved = chunk if encoding is None else encoding.box(chunk)
                key = key_of(name, form[1], saved)
                entry = Entry(key, form[0], saved.sizes, _bytes_of(part, encoding))
                self.own.append(PlannedChunk(name, saved, entry))
        elif place.table in self._changed.rows and is_in_base:
            self._plan_rows(name, shape, box, memory, place, encoding)
        else:
            for chunk in chunks_of(box, memory.dtype, bytes_between_rows(memory)):
                first = place.first + chunk.offsets[0] - box.offsets[0]
                data = self._read(place, memory, first, chunk.sizes[0], None, encoding)
                saved = chunk if encoding is None else encoding.box(chunk)
                entry = Entry(key_of(name, form[1], saved), form[0], saved.sizes, data)
                self.own.append(PlannedChunk(name, saved, entry))
                if file_of(memory) is not None:
                    self._records[entry.key] = place.table, first

    def _put_records_together(self) -> None:
        """Order chunks of the same records of a file one after the other, so that the disk reads their pages once."""
        tables: dict[TableRows, int] = {}
        order = []
        for k, own in enumerate(self.own):
            table, first = self._records.get(own.entry.key, (None, 0)) if isinstance(own, PlannedChunk) else (None, 0)
            order.append((k if table is None else tables.setdefault(table, k), first, k))
        self.own = [self.own[k] for _, _, k in sorted(order)]

    def _plan_listed(
        self, name: str, shape: tuple[int, ...], box: Box, memory: Tensor, rows_U: Tensor,
        encoding: RowEncoding | None,
    ) -> None:  # fmt: skip
        """Plan the given rows of a box that belongs to no known table."""
        step = max(1, CHUNK_BYTES // max(1, memory.nbytes // memory.shape[0]))
        for first in range(0, rows_U.numel(), step):
            some = rows_U[first : first + step]
            held = memory.detach().index_select(0, (some - box.offsets[0]).to(memory.device)).cpu()
            held = held if encoding is None else encoding.encode(held)
            key = f"{key_of(name, shape, box)}.{first}"
            numbers = Entry(f"{key}.rows", torch.int64, (some.numel(),), _bytes_of(some))
            values = Entry(f"{key}.values", held.dtype, tuple(held.shape), _bytes_of(held))
            saved = box if encoding is None else encoding.box(box)
            self.own.append(PlannedRows(name, saved, numbers, values))

    def _plan_rows(
        self, name: str, shape: tuple[int, ...], box: Box, memory: Tensor, place: Place, encoding: RowEncoding | None
    ) -> None:  # fmt: skip
        """Plan the changed rows of a box."""
        rows_U = self._changed.rows[place.table]
        edges = torch.tensor([place.first, place.first + box.sizes[0]])
        low, high = torch.searchsorted(rows_U, edges).tolist()
        widest = max(tensor.nbytes // tensor.shape[0] for tensor in place.table.host())
        step = max(1, CHUNK_BYTES // widest)
        for first in range(low, high, step):
            count = min(step, high - first)
            # Weights and slots of the same rows share the entry of their numbers.
            shift = box.offsets[0] - place.first
            mark = (place.table.handle, first, count, shift)
            key = f"{key_of(name, shape, box)}.{first}"
            if mark not in self._numbers:
                numbers = rows_U[first : first + count] + shift
                self._numbers[mark] = Entry(f"{key}.rows", torch.int64, (count,), _bytes_of(numbers))
            data = self._read(place, memory, first, count, rows_U, encoding)
            saved = box if encoding is None else encoding.box(box)
            dtype = memory.dtype if encoding is None else encoding.row_type.dtype
            values = Entry(f"{key}.values", dtype, (count, *saved.sizes[1:]), data)
            self.own.append(PlannedRows(name, saved, self._numbers[mark], values))

    def _read(
        self, place: Place, memory: Tensor, first: int, count: int, rows_U: Tensor | None,
        encoding: RowEncoding | None,
    ) -> Callable[[], Iterator[memoryview]]:  # fmt: skip
        """Return a function that yields the bytes of rows number `first` to `first + count`, of `rows_U` or of all."""
        step = max(1, BLOCK // max(1, bytes_between_rows(memory)))
        if self._ahead:
            snapshot = self._snapshots.get(place.table)
            if snapshot is None:
                snapshot = self._snapshots[place.table] = RowSnapshot(place.table, rows_U)

            def read(at: int, rows: int) -> memoryview:
                return snapshot.read(place.tensor, at, rows)
        else:
            live = place.table.host()[place.tensor].detach()

            def read(at: int, rows: int) -> memoryview:
                if rows_U is not None:
                    return bytes_of(select_rows(live, rows_U[at : at + rows].to(live.device)))
                fetch(live[at : at + rows])
                return bytes_of(live[at : at + rows])

        def parts() -> Iterator[memoryview]:
            for at in range(first, first + count, step):
                rows = read(at, min(step, first + count - at))
                if encoding is not None:
                    held = torch.frombuffer(rows, dtype=memory.dtype).view(-1, *memory.shape[1:])
                    rows = bytes_of(encoding.encode(held))
                yield rows
                release(memory)

        return parts


def _bytes_of(memory: Tensor, encoding: RowEncoding | None = None) -> Callable[[], Iterator[memoryview]]:
    def parts() -> Iterator[memoryview]:
        fetch(memory)
        yield bytes_of(memory if encoding is None else encoding.encode(memory))
        release(memory)

    return parts


class Place(NamedTuple):
    """Rows of a leaf (tensor 0) or of one of its slots, from row `first` on."""

    table: TableRows
    tensor: int
    first: int


class Leaves:
    """Finds the leaf or slot whose memory a tensor shares."""

    def __init__(self, tables: Sequence[TableRows]) -> None:
        self._of: dict[tuple[torch.device, int], list[tuple[Tensor, TableRows, int]]] = {}
        for table in tables:
            for k, tensor in enumerate(table.host()):
                if tensor.numel() and (tensor.is_contiguous() or file_of(tensor) is not None):
                    key = tensor.device, tensor.untyped_storage().data_ptr()
                    self._of.setdefault(key, []).append((tensor, table, k))

    def take(self, memory: Tensor) -> Place | None:
        """Return the place of some memory; None if it shares none, or for a second tensor of it (a tied table)."""
        key = memory.device, memory.untyped_storage().data_ptr()
        for i, (tensor, table, k) in enumerate(self._of.get(key, ())):
            row, step = tensor[:1].nbytes, bytes_between_rows(tensor)
            first, rest = divmod(memory.data_ptr() - tensor.data_ptr(), step)
            whole = memory.dim() and memory[0].is_contiguous() and memory[:1].nbytes == row
            whole = whole and (memory.shape[0] == 1 or memory.stride(0) * memory.itemsize == step)
            if whole and not rest and first >= 0 and first + memory.shape[0] <= tensor.shape[0]:
                del self._of[key][i]
                return Place(table, k, first)
        return None


Offers = Mapping[str, Sequence[Box]]
"""Boxes of the spread tensors that a rank could write."""


def offers_of(tensors: Mapping[str, Tensor]) -> Offers:
    """Return the boxes of this rank."""
    return {name: written_boxes(name, tensor) for name, tensor in tensors.items() if is_spread(tensor)}


def boxes_of_rank(tensors: Mapping[str, Tensor], own_offers: Offers, ranks: Group) -> list[tuple[str, Box]]:
    """Return the boxes that this rank writes, by tensor. The same tensors are assigned alike each time. Collective."""
    offers: Sequence[Any] = ranks.all_gather_object(own_offers)
    spread = [name for name in tensors if name in own_offers]
    loads = [0] * ranks.size
    own: list[tuple[str, Box]] = []

    def assign(name: str, box: Box, holders: Sequence[int]) -> None:
        rank = min(holders, key=lambda rank: (loads[rank], rank))
        loads[rank] += box.cells * tensors[name].dtype.itemsize
        if rank == ranks.rank:
            own.append((name, box))

    for name in spread:
        holders: dict[Box, list[int]] = {}
        for rank, offered in enumerate(offers):
            for box in offered[name]:
                holders.setdefault(Box(*box), []).append(rank)
        for box, some in sorted(holders.items()):
            assign(name, box, some)
    plain = (name for name in tensors if name not in own_offers)
    for name in sorted(plain, key=lambda name: (-tensors[name].nbytes, name)):
        for box in written_boxes(name, tensors[name]):
            assign(name, box, range(ranks.size))
    return own
