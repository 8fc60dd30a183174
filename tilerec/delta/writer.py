"""`DeltaWriter`: publishes the states of a model in training as a log of the rows that changed.

writer = DeltaWriter("deltas", model)            # all ranks, once the model has its state
for step in ...:
    ...
    if step % 100 == 0:
        writer.publish(step)
"""

from __future__ import annotations

import binascii
import os
import warnings
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tilerec.checkpoint.manifest import Base
from tilerec.checkpoint.parts import ranks_of_job, states_of
from tilerec.checkpoint.row_encoding import Form
from tilerec.checkpoint.saving import Since, file_errors, plan
from tilerec.checkpoint.tree import flatten
from tilerec.comms.agreement import on_all_ranks
from tilerec.delta.budget import Budget
from tilerec.delta.encodings import PART, encodings_of
from tilerec.delta.log import DeltaLog, EntryName
from tilerec.delta.notes import DeltaNotes
from tilerec.delta.record import DeltaRecord, LeftOut
from tilerec.errors import ConfigError, FileError, InputError
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.modules.managed_embedding import ManagedCollisionEmbeddings
from tilerec.quantized.row_type import AnyRowType

_MOST_LINKS = 64
_STATISTICS = ("since", "last", "hits", "expires", "admission", "step")


class Published(NamedTuple):
    """A published state.

    Args:
        bytes: of the delta's data files.
        left_out: changed rows that wait for a later delta, by table.
        base: path of the base that was written, too; "" if none was.
    """

    sequence: int
    path: str
    bytes: int
    left_out: Mapping[str, LeftOut]
    base: str = ""


class DeltaWriter:
    """Writer of one log. Every rank has one with the same settings, and calls it at the same steps.

    The first state of a log is a base, with everything. Then each delta has the rows that were written since the state
    before it, and the other tensors where they changed: dense weights, and ids with the rows that they gained or lost.
    So all of a delta is of one step. If the folder has a log, the writer goes on with it: it reads what was published,
    and the next delta has the rows that differ. A process that was killed loses nothing, and a model that went back to
    an earlier checkpoint publishes the rows that went back.

    Rows are known for tables with an attached optimizer. Other tensors are compared with a copy, which takes their
    memory a second time.

    Args:
        folder: of the log: a folder that all ranks see, or a URL of fsspec.
        model: sharded or not, with the state that training begins with.
        max_bytes: most bytes of listed rows in a delta, of all ranks together; rows with the largest changes come
            first. A delta's record states what was left out, with the largest change among it. A copy of the published
            tables is kept in host memory. None: all changed rows.
        base_every: deltas between two bases. None: a base once the deltas since the last one are as large as it.
        keep_bases: number of newest bases to keep, with the deltas after the oldest of them; 0 keeps all.
        row_type: type of the published rows of all tables, "int8" or "int4" for example, for models that were
            quantized (tilerec.quantized); None: that of the table.
        per_table: row types of some tables, by name.
        statistics: True: publish the use counts of managed ids, too, which lookups do not read.
        group: the ranks; None for those of the default process group, or for this process alone.

    Raises:
        ConfigError: a number is out of range. FileError, InputError: the log cannot be read.
    """

    def __init__(
        self, folder: str | Path, model: nn.Module, *, max_bytes: int | None = None, base_every: int | None = None,
        keep_bases: int = 2, row_type: AnyRowType | None = None, per_table: Mapping[str, AnyRowType] | None = None,
        statistics: bool = False, group: dist.ProcessGroup | Any = None,
    ) -> None:  # fmt: skip
        if keep_bases < 0 or (base_every is not None and base_every < 1):
            raise ConfigError(
                f"DeltaWriter: got keep_bases={keep_bases}, base_every={base_every}; expected at least 0, and at least "
                "1 or None. Correct them."
            )
        self.log = DeltaLog(folder if "://" in str(folder) else os.path.abspath(folder))
        self._ranks = ranks_of_job(group)
        self._state = _State(model, () if statistics else _statistics_of(model))
        self._encodings = encodings_of(model, row_type, per_table or {})
        row_bytes = {own.name: own.row_type.row_bytes(own.columns) for own in self._encodings.values()}
        budget = None if max_bytes is None else Budget(max_bytes, _managed_tables(model), row_bytes)
        self._notes = DeltaNotes(model, budget, self._encodings)
        self._base_every, self._keep_bases = base_every, keep_bases
        self._newest: _Newest | None = None
        self._run, self.sequence = "", 0  # number of the next entry
        self._base_bytes, self._since_base = 0, list[int]()  # bytes of the newest base, and of the deltas after it
        self._open()
        self._is_open = True  # False after an error: the log may have an entry more, or not

    def _open(self) -> None:
        """Find the newest state of the log. Collective."""
        with on_all_ranks(self._ranks, "the delta log", "reading it"):
            run = self._read()
            with file_errors(self.log.folder(EntryName(self.sequence, True))):
                if not self._ranks.rank:
                    self.log.remove_unfinished()
        self._run = str(self._ranks.all_gather_object(run or self._run or _drawn())[0])

    def _read(self) -> str:
        """Set what is known of the log; return its run."""
        self._newest, self._notes.published = None, None
        names = self.log.names()
        self.sequence = names[-1].sequence + 1 if names else 0
        base = self.log.newest_base()
        if base is None:
            return self.log.run()
        newest, since_base = base, list[int]()
        for name in names:
            if name.sequence > base.record.sequence and not name.is_base:
                try:
                    entry = self.log.open(name)
                except (FileError, InputError) as error:
                    warnings.warn(f"{error} The log goes on with a new base.", stacklevel=4)
                    return base.record.run
                if (entry.record.run, entry.record.previous) != (base.record.run, newest.record.state):
                    warnings.warn(f"{entry.path} does not follow {newest.path}. A new base follows.", stacklevel=4)
                    return base.record.run
                since_base.append(entry.manifest.bytes)
                newest = entry
        self._base_bytes, self._since_base = base.manifest.bytes, since_base
        forms = {name: (saved.dtype, saved.shape) for name, saved in newest.manifest.tensors.items()}
        self._newest = _Newest(newest.name, newest.record.state, newest.manifest.id, forms)
        self._notes.published = newest.folder
        return base.record.run

    @torch.no_grad()
    def publish(self, step: int) -> Published:
        """Publish the model's present state. Collective.

        Args:
            step: of training, for the record.

        Raises:
            FileError: files cannot be written; `ConfigError` on the ranks that did not fail. The log is whole, and the
                next call publishes the same rows.
        """
        if not self._is_open:
            self._open()
        self._is_open = False
        made = self._publish(step)
        self._is_open = True
        return made

    def _publish(self, step: int) -> Published:
        before, sequence, budget = self._newest, self.sequence, self._notes.budget
        state = str(self._ranks.all_gather_object(_drawn())[0])
        types = {name: (own.row_type.name, own.columns) for name, own in self._encodings.items()}
        record = DeltaRecord(self._run, sequence, step, state, before.state if before else "", row_types=types)
        with on_all_ranks(self._ranks, "the delta log", "the model's state"):
            with_base = before is not None and self._base_is_due(before.forms)
        if budget is not None:
            budget.lifted = with_base or before is None  # what was left out would not be found after the base
        made = self._write(EntryName(sequence, before is None), record, before)
        self.sequence += 1
        if before is None:
            self._base_bytes, self._since_base = made.bytes, []
            return made
        self._since_base.append(made.bytes)
        if not with_base:
            return made
        base = self._write(EntryName(sequence, True), record, None)
        self._base_bytes, self._since_base = base.bytes, []
        with (
            on_all_ranks(self._ranks, "the delta log", "removing old entries"),
            file_errors(self.log.folder(EntryName(sequence, True))),
        ):
            self._clean()
        return made._replace(base=base.path)

    def close(self) -> None:
        """End the observation of the model's tables."""
        self._notes.close()

    # -------------------------------------------------------------------------------------------------------- files

    def _base_is_due(self, before: Mapping[str, Form]) -> bool:
        now = flatten(states_of({PART: self._state}))[1]
        forms: dict[str, Form] = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in now.items()}
        forms |= {name: encoding.form(forms[name]) for name, encoding in self._encodings.items()}
        if forms != before:
            return True  # a table was resized: those who start later need its shape
        if self._base_every is not None:
            return len(self._since_base) + 1 >= self._base_every
        return sum(self._since_base) >= self._base_bytes or len(self._since_base) + 1 >= _MOST_LINKS

    def _write(self, name: EntryName, record: DeltaRecord, before: _Newest | None) -> Published:
        """Write an entry. before: the state that it continues; None: everything is written."""
        folder, budget = self.log.folder(name), self._notes.budget
        again = before is None and self._newest is not None and self._newest.state == record.state
        base = None if before is None else Base(str(before.name), before.id)
        since = None if again else Since(self._notes, base, before.forms if before else {})
        planned = plan(
            folder.path, {PART: self._state}, self._ranks, {}, ahead=False, since=since, encodings=self._encodings
        )
        left_out = budget.left_out if budget is not None and not again else {}
        saved = planned.write(self._ranks, replace(record, left_out=left_out).metadata())
        self._newest = _Newest(name, record.state, saved.id, saved.tensors)
        self._notes.complete(folder)
        return Published(record.sequence, folder.path, saved.bytes, left_out)

    def _clean(self) -> None:
        """Remove what lies before the oldest base that is kept."""
        if not self._keep_bases or self._ranks.rank:
            return
        names = self.log.names()
        bases = [name.sequence for name in names if name.is_base]
        oldest = bases[-self._keep_bases :][0]
        for name in names:
            if name.sequence < oldest or (name.sequence == oldest and not name.is_base):
                with suppress(FileNotFoundError):
                    self.log.folder(name).remove()


class _Newest(NamedTuple):
    """The newest entry: its name, its state, its id, and dtypes and shapes of its tensors."""

    name: EntryName
    state: str
    id: str
    forms: Mapping[str, Form]


class _State:
    """The state of a model, as a part of a checkpoint."""

    def __init__(self, model: nn.Module, left_out: Collection[str]) -> None:
        self._model, self._left_out = model, frozenset(left_out)

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in self._model.state_dict().items() if name not in self._left_out}


def _statistics_of(model: nn.Module) -> set[str]:
    """Return the names of the state that only the assignment of ids reads."""
    found = ((path, module) for path, module in model.named_modules() if isinstance(module, ManagedCollisionModule))
    return {f"{path}.{name}" for path, _ in found for name in _STATISTICS}


def _managed_tables(model: nn.Module) -> set[str]:
    """Return the names of the tables with managed ids."""
    found = (module for module in model.modules() if isinstance(module, ManagedCollisionEmbeddings))
    return {table for module in found for table in module.managed_collision_collection.modules_by_table}


def _drawn() -> str:
    return binascii.hexlify(os.urandom(8)).decode()
