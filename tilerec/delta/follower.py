"""`Follower`: brings a model's weights from one published state to the next, while others read them.

    follower = Follower("deltas", model)         # at the newest base
    while True:
        follower.poll()                          # applies the deltas that have come

A delta is read as a whole, with all of its checksums, before the first row is written. So a damaged one changes
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from tilerec.checkpoint.chain import Chain, Wanted, open_chain, unreadable
from tilerec.checkpoint.contents import SavedContents
from tilerec.checkpoint.job_tables import announce_write
from tilerec.checkpoint.pieces import Box, Piece, pieces_of
from tilerec.delta.compare import published_blocks, unequal_rows
from tilerec.delta.encodings import PART
from tilerec.delta.log import DeltaLog, Entry, EntryName
from tilerec.delta.record import DeltaRecord
from tilerec.delta.request_lock import RequestLock
from tilerec.delta.staged import StagedRows, stage
from tilerec.errors import ConfigError, FileError, InputError
from tilerec.ops.backends import RowWrite

ROWS = 512
"""Rows that are written while the lock is held."""
BLOCK_ROWS = 65_536
"""Most rows of a call of the native library, which no signal interrupts."""
CALL_SECONDS = 0.02
"""Longest call of the native library that sleeps between rows."""
LEAST_ROWS_PER_SECOND = 50
"""One row in each such call."""

Reason = Literal["damaged", "gap", "repeated", "other base", "other model", "other run"]


class DeltaRefused(InputError):
    """An entry that a follower did not apply; its weights are unchanged. reason: why."""

    def __init__(self, text: str, reason: Reason) -> None:
        super().__init__(text)
        self.reason = reason


class Follower:
    """Weights that follow a log. One per process or rank; nothing is collective.

    Args:
        folder: of the log, or a URL of fsspec.
        target: whose weights are written in place: a model, sharded or not, or tensors by their names in the model.
        state: the published state that the target has already (`DeltaRecord.state`), for weights that were exported
            from a base; "": the newest base is loaded.
        lock: held while at most `ROWS` rows of a tensor are written; a `RequestLock`, if requests come one after
            another. None: readers may see a row that is half new.
        partial: True: the target lacks some tensors of the log, which are passed over.
        noted: called, while the lock is held, with the record of a state and False before its first row is written, and
            with True once the target has all of it.
        rows_per_second: see `Follower.rows_per_second`. It does not limit the rows of the base that is loaded here.

    Raises:
        FileError: the log has no whole base, or cannot be read. DeltaRefused: the base does not fit the target.
        ConfigError: rows_per_second is below `LEAST_ROWS_PER_SECOND`.
    """

    def __init__(
        self, folder: str | Path, target: nn.Module | Mapping[str, Tensor], *, state: str = "",
        lock: RequestLock | AbstractContextManager[object] | None = None, partial: bool = False,
        noted: Callable[[DeltaRecord, bool], object] = lambda record, complete: None,
        rows_per_second: float | None = None,
    ) -> None:  # fmt: skip
        self.log = DeltaLog(folder)
        self._target, self._noted = target, noted
        self._lock = nullcontext() if lock is None else lock
        self._gate = lock.gate if isinstance(lock, RequestLock) else None
        self._partial = partial
        self._row_seconds = 0.0
        self.record = self._entry_of(state).record if state else self._load_base()
        self.rows_per_second = rows_per_second

    @property
    def sequence(self) -> int:
        """Number of the published state that the target has."""
        return self.record.sequence

    @property
    def rows_per_second(self) -> float | None:
        """Most rows that are written in a second; None: no limit.

        The thread sleeps between two writes, so requests find free time of the processor and of the memory. Any thread
        may set it: a `poll` that runs follows within 20 ms, and writes the rest without a wait after None.
        """
        return 1 / self._row_seconds if self._row_seconds else None

    @rows_per_second.setter
    def rows_per_second(self, rows: float | None) -> None:
        if rows is not None and not rows >= LEAST_ROWS_PER_SECOND:
            raise ConfigError(
                f"Follower: got rows_per_second={rows}; expected at least {LEAST_ROWS_PER_SECOND}, or None for no "
                "limit. Correct it."
            )
        self._row_seconds = 0.0 if rows is None else 1 / rows

    def poll(self) -> list[DeltaRecord]:
        """Apply the deltas that have been published since the last call; return their records.

        If the next delta has been removed, or cannot follow, and a later base is whole, that is loaded.

        Raises:
            DeltaRefused: the next delta is damaged or does not follow, and there is no later base.
        """
        applied: list[DeltaRecord] = []
        names = self.log.names()
        self._check_run(names)
        for name in names:
            if name.sequence <= self.sequence:
                continue
            try:
                if name.is_base:  # its delta is gone
                    raise self._refused(name, "gap", f"got number {name.sequence} next; expected {self.sequence + 1}")
                applied.append(self.apply(name))
            except DeltaRefused as refused:
                base = self.log.newest_base()
                if base is None or base.record.sequence <= self.sequence:
                    if applied:  # the next call raises it
                        return applied
                    raise
                if base.record.run != self.record.run:
                    raise self._other_run(base) from refused
                self.record = self._load_base()
                applied.append(self.record)
        return applied

    @torch.no_grad()
    def apply(self, name: EntryName) -> DeltaRecord:
        """Apply one delta.

        Raises:
            DeltaRefused: it is damaged, or not the one that follows. The weights are unchanged.
        """
        try:
            entry = self.log.open(name)
            self._check_order(entry)
            with nullcontext() if self._gate is None else self._gate.other_core():
                staged = stage(entry)
        except DeltaRefused:
            raise
        except (FileError, InputError) as error:
            raise DeltaRefused(str(error), "damaged") from error
        places = self._places(entry, staged)
        with self._writing(entry.record):
            for part, pieces in places:
                for piece in pieces:
                    self._write(part, piece)
        self.record = entry.record
        return entry.record

    @contextmanager
    def _writing(self, record: DeltaRecord) -> Iterator[None]:
        """Announce the block's writes to readers, and to the target's tables.

        Tables get two announcements: a request may fill caches in between.
        """
        module = self._target if isinstance(self._target, nn.Module) else None
        with self._writing_lock():
            self._noted(record, False)
        if module is not None:
            announce_write(module)
        try:
            yield
        finally:
            if module is not None:
                announce_write(module)
        with self._writing_lock():
            self._noted(record, True)

    # -------------------------------------------------------------------------------------------------------- checks

    def _check_run(self, names: Sequence[EntryName]) -> None:
        """Raise `DeltaRefused` if the log has begun anew, with entries that this target never gets."""
        if names and names[-1].sequence <= self.sequence:
            base = self.log.newest_base()
            if base is not None and base.record.run != self.record.run:
                raise self._other_run(base)

    def _other_run(self, base: Entry) -> DeltaRefused:
        text = f"got the run {base.record.run}; expected {self.record.run}: the log has begun anew"
        return self._refused(base.name, "other run", text)

    def _refused(self, name: EntryName, reason: Reason, text: str) -> DeltaRefused:
        return DeltaRefused(
            f"Delta log {self.log.path}/{name}: {text}. Make a new Follower at its newest base.", reason
        )

    def _check_order(self, entry: Entry) -> None:
        own, new = self.record, entry.record
        if new.run != own.run:
            raise self._refused(entry.name, "other run", f"got the run {new.run}; expected {own.run}")
        if new.sequence <= own.sequence:
            raise self._refused(
                entry.name, "repeated", f"got number {new.sequence} again; expected {own.sequence + 1}, the next one"
            )
        if new.sequence > own.sequence + 1:
            raise self._refused(entry.name, "gap", f"got number {new.sequence}; expected {own.sequence + 1} before it")
        if new.previous != own.state:
            raise self._refused(
                entry.name, "other base", f"got a delta for the state {new.previous}; expected one for {own.state}"
            )

    def _tensors(self) -> Mapping[str, Tensor]:
        return self._target.state_dict() if isinstance(self._target, nn.Module) else self._target

    def _own(self, entry: Entry) -> dict[str, list[Piece]]:
        """Return the pieces of the target, by the names of the log."""
        own, found = self._tensors(), {}
        for name, saved in entry.manifest.tensors.items():
            tensor = own.get(name.removeprefix(f"{PART}."))
            if tensor is None and self._partial:
                continue
            if tensor is None or (tensor.dtype, tuple(tensor.shape)) != (saved.dtype, saved.shape):
                got = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise DeltaRefused(
                    f"Delta log {entry.path}: got {name} {saved.dtype} {list(saved.shape)} for {got} of the target; "
                    "expected the same. Make the target from the model that is published.",
                    "other model",
                )
            found[name] = pieces_of(name, tensor)
        if not found:
            raise DeltaRefused(
                f"Delta log {entry.path}: got the tensors {list(entry.manifest.tensors)[:4]}, none of the target's "
                f"{list(own)[:4]}; expected the same model. Publish the model that is served, not a wrapper of it.",
                "other model",
            )
        return found

    def _places(
        self, entry: Entry, staged: Mapping[str, list[StagedRows]]
    ) -> list[tuple[StagedRows, list[Piece]]]:  # fmt: skip
        own = self._own(entry)
        return [(part, own[name]) for name, parts in staged.items() if name in own for part in parts]

    def _entry_of(self, state: str) -> Entry:
        """Return the entry of a published state."""
        for name in reversed(self.log.names()):
            try:
                entry = self.log.open(name)
            except (FileError, InputError):
                continue  # `poll` reports it, if it comes to that
            if entry.record.state == state:
                return entry
        raise ConfigError(
            f"Delta log {self.log.path}: got the state {state!r}; expected one of its entries. The log has moved on: "
            "make the target from its newest base."
        )

    # -------------------------------------------------------------------------------------------------------- writes

    @torch.no_grad()
    def _load_base(self) -> DeltaRecord:
        """Write the rows of the newest whole base that the target has not; a mapped file stays clean elsewhere."""
        entry = self.log.newest_base()
        if entry is None:
            raise FileError(
                f"Delta log {self.log.path}: got no whole base in it; expected base-0 or a later one. Check the path, "
                "or publish one with DeltaWriter."
            )
        own = self._own(entry)
        SavedContents(entry.path).verify()
        chain = open_chain(entry.folder)
        try:
            with self._writing(entry.record):
                for name, pieces in own.items():
                    for piece in pieces:
                        self._write_base(chain, name, piece)
        except OSError as error:
            raise unreadable(entry.folder, error) from error
        return entry.record

    def _write_base(self, chain: Chain, name: str, piece: Piece) -> None:
        box, memory = piece
        if not box.sizes or not box.cells:
            with self._writing_lock():
                chain.read([Wanted(piece, name)])
            return
        for first, held in published_blocks(chain, name, box):
            rows_U = unequal_rows(held, memory[first - box.offsets[0] :])
            if rows_U.numel():
                part = Box((first, *box.offsets[1:]), tuple(held.shape))
                self._write(StagedRows(first + rows_U, part, _bytes_of(held)[rows_U], ""), piece)

    def _write(self, part: StagedRows, piece: Piece) -> None:
        """Write the rows of a part that a piece holds, some at a time."""
        both = part.box.overlap(piece.box) if part.box.sizes else None
        if both is None:
            if not part.box.sizes:
                with self._writing_lock():
                    piece.memory.copy_(part.values)
            return
        place, values = _bytes_of(piece.memory), _bytes_of(part.values)
        first, size = both.offsets[0], both.sizes[0]
        if part.rows_U is None:
            low, high = first - part.box.offsets[0], first - part.box.offsets[0] + size
        else:
            low, high = torch.searchsorted(part.rows_U, torch.tensor([first, first + size])).tolist()
        for dim in range(1, len(both.sizes)):
            place = place.narrow(dim, both.offsets[dim] - piece.box.offsets[dim], both.sizes[dim])
            values = values.narrow(dim, both.offsets[dim] - part.box.offsets[dim], both.sizes[dim])
        at = low
        while at < high:
            seconds = self._row_seconds  # another thread may set it
            most = max(1, int(CALL_SECONDS / seconds)) if seconds else BLOCK_ROWS
            some = values[at : min(at + min(most, BLOCK_ROWS), high)].to(place.device)
            if part.rows_U is None:
                own = place.narrow(0, at + part.box.offsets[0] - piece.box.offsets[0], some.shape[0])
                self._write_rows(RowWrite(own, None, some), seconds)
            else:
                rows = (part.rows_U[at : at + some.shape[0]] - piece.box.offsets[0]).to(place.device)
                self._write_rows(RowWrite(place, rows, some), seconds)
            at += some.shape[0]

    def _write_rows(self, write: RowWrite, seconds: float) -> None:
        """Write rows, at most `ROWS` of them while the lock is held; each takes `seconds` at least."""
        gate, native = self._gate, write.native
        if gate is not None and native is not None:
            write.run_between_requests(native, gate, ROWS, round(seconds * 1e9))
            return
        for some in write.parts(ROWS):
            some.own_pages()
            with self._writing_lock():
                some.run()
            if seconds:
                time.sleep(len(some.values) * seconds)

    def _writing_lock(self) -> AbstractContextManager[object]:
        return self._lock.writing() if isinstance(self._lock, RequestLock) else self._lock


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor of 8-bit floats as whole numbers: torch does not index all of them."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
