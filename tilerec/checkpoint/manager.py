"""`CheckpointManager`: when to save, how, what to keep, and which checkpoint is the newest whole one.

    run/checkpoints/step-100  step-200  step-300

    manager = CheckpointManager("run/checkpoints", every=100, keep_last=2)
    found = manager.resume(parts)               # None if there is no checkpoint
    for step in ...:
        manager.save_if_due(step, parts)

Only folders with a valid manifest count, and the number in the name is their order. The newest ones are never removed
before a newer one is complete, nor is the base of an incremental one.
"""

from __future__ import annotations

import math
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tilerec.checkpoint.chain import open_chain, open_manifest
from tilerec.checkpoint.changes import Changes
from tilerec.checkpoint.folder import folder_at, parent_at
from tilerec.checkpoint.job_tables import known_rows
from tilerec.checkpoint.loading import load_chain
from tilerec.checkpoint.manifest import Base, Manifest
from tilerec.checkpoint.parts import ranks_of_job
from tilerec.checkpoint.row_changes import JobChanges
from tilerec.checkpoint.running_save import RunningSave
from tilerec.checkpoint.saving import Saved, Since, file_errors, plan
from tilerec.checkpoint.scratch_memory import DEFAULT_BUDGET
from tilerec.checkpoint.tree import Json
from tilerec.comms.agreement import on_all_ranks
from tilerec.comms.group import Group
from tilerec.errors import ConfigError, FileError, InputError, TilerecError

_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
LAST_STEP = 10**18 - 1
"""Largest step of a checkpoint: its name has at most 18 digits."""
_MOST_LINKS = 64  # increments on a whole checkpoint: each is opened to load the last one
_LEFT = re.compile(r"step-([0-9]{1,18})(?:\.(?:tmp|old)-[0-9a-f]+)+")
"""Folders of saves and removals that did not end, also of removals of these."""


class Found(NamedTuple):
    """A checkpoint of a folder: the step of its name, and its path."""

    step: int
    path: str


def names_in(folder: str | Path) -> list[str]:
    """Return the names of what a folder holds; none if it does not exist. Raises FileError."""
    try:
        return parent_at(folder).names()
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"Checkpoints {folder}: got '{error.strerror or error}'; expected a folder that can be listed. Check the "
            "path, and try again.",
            error.errno,
        ) from error


def checkpoints(folder: str | Path) -> list[Found]:
    """Return the checkpoints of a folder by their names, oldest first. They may be damaged: see `latest`."""
    steps = sorted(int(match[1]) for name in names_in(folder) if (match := _NAME.fullmatch(name)))
    return [Found(step, f"{str(folder).rstrip('/')}/step-{step}") for step in steps]


def latest(folder: str | Path, *, group: Group | dist.ProcessGroup | None = None) -> Found | None:
    """Return the newest checkpoint of a folder whose files are all there; None if there is none. Collective.

    A damaged one is passed over with a warning. On ranks that see different folders, the newest one that all of them
    see.
    """
    found = whole_checkpoints(folder, group=group)
    return found[0] if found else None


def whole_checkpoints(folder: str | Path, *, group: Group | dist.ProcessGroup | None = None) -> list[Found]:
    """Return the checkpoints of a folder whose manifests and file sizes are right, newest first. Collective."""
    ranks = ranks_of_job(group)
    whole: dict[int, Found] = {}
    known: dict[str, Manifest] = {}
    for found in reversed(checkpoints(folder)):
        try:
            open_chain(parent_at(folder).folder(f"step-{found.step}"), known)
        except TilerecError as error:
            warnings.warn(f"{error} It is passed over.", stacklevel=3)
        else:
            whole[found.step] = found
    seen: Sequence[Any] = ranks.all_gather_object(sorted(whole))
    return [whole[step] for step in sorted(set.intersection(*map(set, seen)), reverse=True)]


def read_metadata(path: str | Path) -> Mapping[str, Json]:
    """Return the metadata of a checkpoint, as `save` got them. Raises as `load` for a damaged one."""
    return open_manifest(folder_at(path)).metadata


def _is_number(value: object, kind: type) -> bool:
    """Return True for numbers of Python and numpy of a kind; a bool is none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _step_of(step: int) -> int:
    """Return a step; raise `ConfigError` for one whose checkpoint could not be found by its name."""
    if not _is_number(step, Integral) or not 0 <= step <= LAST_STEP:
        raise ConfigError(
            f"CheckpointManager: got step={step!r}; expected a whole number from 0 to {LAST_STEP:,}. Pass the number "
            "of steps that the job has done."
        )
    return int(step)


class CheckpointManager:
    """Checkpoints of one run. Every rank has one with the same settings, and calls it at the same steps.

    Args:
        folder: of the checkpoints: a folder that all ranks see, or a URL of fsspec.
        every: steps between two checkpoints; 0 for none.
        seconds: as an alternative, seconds between two checkpoints, by rank 0's clock; 0 for none.
        keep_last: number of newest checkpoints to keep; 0 keeps all.
        keep_every: further checkpoints to keep: those whose step is a multiple of this; 0 for none.
        asynchronous: True: `save` returns while another thread writes. One save runs at a time: the next one waits for
            it, and raises its errors. `wait` ends the last one.
        incremental: True: write only the rows that have changed since the last save, and everything once these saves
            are as large as the last whole one together. Rows are known for tables with an attached optimizer, which
            are found in parts that are modules.
        group: the ranks, as for `save`.

    Raises:
        ConfigError: a number of steps or checkpoints is not whole, or a number is negative or not finite.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every: int = 0,
        seconds: float = 0.0,
        keep_last: int = 2,
        keep_every: int = 0,
        asynchronous: bool = False,
        incremental: bool = False,
        group: Group | dist.ProcessGroup | None = None,
    ) -> None:
        for name, count in (("every", every), ("keep_last", keep_last), ("keep_every", keep_every)):
            if not _is_number(count, Integral) or count < 0:
                raise ConfigError(
                    f"CheckpointManager: got {name}={count!r}; expected a whole number from 0. Correct it."
                )
        if not _is_number(seconds, Real) or not 0 <= seconds < math.inf:
            raise ConfigError(
                f"CheckpointManager: got seconds={seconds!r}; expected a finite number from 0. Correct it."
            )
        self.folder = folder if "://" in str(folder) else os.path.abspath(folder)
        self._every, self._seconds = every, seconds
        self._keep_last, self._keep_every = keep_last, keep_every
        self._ranks = ranks_of_job(group)
        self._since = time.monotonic()
        self._last: int | None = None  # step of the last save
        self._damaged: set[int] = set()  # steps whose files have the right sizes and wrong bytes
        self._channel = self._ranks.split("checkpoints") if asynchronous else None
        self._running: RunningSave | None = None
        self._noted: tuple[int, bool] = (0, False)  # step of the running save, and if it is incremental
        self._changes = JobChanges() if incremental else None
        self._note_of_changes: dict[str, Json] = {}  # those that the job was loaded with
        self._chain: list[tuple[int, Saved]] = []  # steps of the newest chain, the whole one first

    def due(self, step: int) -> bool:
        """Return True if a checkpoint is due after this many steps. Collective if `seconds` is set.

        Raises:
            ConfigError: see `save`.
        """
        step = _step_of(step)
        if step == self._last:
            return False
        due = bool(self._every) and step % self._every == 0
        if self._seconds:
            late = time.monotonic() - self._since >= self._seconds
            due = bool(self._ranks.all_gather_object(late)[0]) or due
        return due

    def save(self, step: int, parts: Mapping[str, Any], metadata: Mapping[str, Json] | None = None) -> str:
        """Write the checkpoint of a step, then remove old ones; return its path. Collective. Raises as `save`.

        A damaged checkpoint of this step is replaced. If this manager has saved or resumed the step, nothing is done.

        Raises:
            ConfigError: the step is not a whole number from 0 to `LAST_STEP`; nothing is written.
        """
        step = _step_of(step)
        path = f"{str(self.folder).rstrip('/')}/step-{step}"
        if step == self._last:
            return path
        self.wait()
        with on_all_ranks(self._ranks, "the checkpoints", "removing a damaged one"), file_errors(folder_at(path)):
            if self._ranks.rank == 0:
                self._remove_damaged(step)
        ahead = self._channel is not None
        base = self._base(step)
        tensors = self._chain[-1][1].tensors if base is not None else {}
        try:
            planned = plan(
                path, parts, self._ranks, {"step": step, **self._note_of_changes, **(metadata or {})}, ahead=ahead,
                since=None if self._changes is None else Since(self._changes, base, tensors),
            )  # fmt: skip
            if self._channel is not None:
                self._running = RunningSave(planned, self._channel, lambda: self._clean(step))
                self._noted = step, base is not None
            else:
                self._note(step, planned.write(self._ranks), incremental=base is not None)
                self._clean(step)
        except BaseException:
            self._forget()
            raise
        self._last, self._since = step, time.monotonic()
        return path

    def wait(self) -> None:
        """Wait until the running save is complete. Raises its errors, on every rank. Collective."""
        if self._running is None:
            return
        try:
            saved = self._running.wait()
        except BaseException:
            if self._running.done:  # an interrupt leaves it running
                self._running = None
                self._forget()
            raise
        self._running = None
        step, incremental = self._noted
        self._note(step, saved, incremental=incremental)

    def leave(self) -> None:
        """Wait for the running save of a failed job, if this process is its only rank: others may not end theirs."""
        if self._ranks.size == 1:
            with suppress(TilerecError):
                self.wait()

    def _note(self, step: int, saved: Saved, *, incremental: bool) -> None:
        """Note a complete checkpoint as the next base."""
        self._chain = [*(self._chain if incremental else ()), (step, saved)]

    def _clean(self, step: int) -> None:
        """Remove old checkpoints. The thread of a running save calls this."""
        if self._ranks.rank == 0:
            try:
                self._remove_old(step)
            except OSError as error:  # the checkpoint counts more
                warnings.warn(f"Checkpoints {self.folder}: old ones stay ({error}).", stacklevel=2)

    def _forget(self) -> None:
        """Make the next save write everything: the last one failed."""
        self._last, self._chain = None, []
        if self._changes is not None:
            self._changes.forget()

    def _base(self, step: int) -> Base | None:
        """Return the base of an incremental save; None for a whole one. Collective if the save is incremental."""
        if self._changes is None or not self._chain:
            return None
        (_, whole), *later = self._chain
        last, saved = self._chain[-1]
        fits = last < step and len(later) < _MOST_LINKS and sum(one.bytes for _, one in later) < whole.bytes
        # Rank 0 alone looks at the files, and decides.
        there = self._ranks.all_gather_object(fits and (self._ranks.rank != 0 or self._is_whole(last)))
        return Base(f"step-{last}", saved.id) if all(there) else None

    def save_if_due(
        self, step: int, parts: Mapping[str, Any], metadata: Mapping[str, Json] | None = None
    ) -> str | None:
        """Save if a checkpoint is due; return its path or None. Collective."""
        return self.save(step, parts, metadata) if self.due(step) else None

    def resume(
        self,
        parts: Mapping[str, Any],
        *,
        changes: Changes | None = None,
        check: Callable[[str, dict[str, Any]], None] | None = None,
        newest: int | None = None,
        memory_budget: int = DEFAULT_BUDGET,
    ) -> tuple[int, dict[str, Any]] | None:
        """Load the newest whole checkpoint; return its step and the states of `load`, or None. Collective.

        If reading it fails because a file is damaged, the one before it is loaded, with a warning.

        Args:
            changes: what differs between the job and the checkpoints that were saved before it had these changes. Each
                later save notes them, so the same job, started again, loads its own checkpoints as they are.
            check: called with the path and the plain values of the parts before anything is loaded; it may raise.
            newest: step of the newest checkpoint that may be loaded; later ones count as damaged. None for no limit.
            memory_budget: as for `load`.
        """
        self.wait()
        self._note_of_changes = {} if changes is None else changes.note
        for found in whole_checkpoints(self.folder, group=self._ranks):
            if newest is not None and found.step > newest:
                self._damaged.add(found.step)
                continue
            try:
                values, changed = load_chain(found.path, parts, self._ranks, changes or Changes(), check, memory_budget)
            except (InputError, FileError) as error:  # on all ranks, if on one
                warnings.warn(f"{error} The checkpoint before it is loaded.", stacklevel=2)
                self._damaged.add(found.step)
                continue
            self._last = found.step
            self._continue(found, parts, fits=not changed)
            return found.step, values
        return None

    def _continue(self, found: Found, parts: Mapping[str, Any], *, fits: bool) -> None:
        """Make the loaded checkpoint the base of the next save, if the tables have exactly its rows."""
        if self._changes is None:
            return
        chain = open_chain(parent_at(self.folder).folder(f"step-{found.step}"))
        names = [f"step-{found.step}", *(link.manifest.base.name for link in chain.links if link.manifest.base)]
        # Parts that were not loaded have other values than those of the checkpoint.
        loaded = {
            name: (saved.dtype, saved.shape) for name, saved in chain.tensors.items() if name.split(".", 1)[0] in parts
        }
        links = [
            (int(name.removeprefix("step-")), Saved(link.manifest.id, link.manifest.bytes, loaded))
            for name, link in zip(names, chain.links, strict=True)
        ]
        self._chain = links[::-1] if fits and all(saved.id for _, saved in links) else []
        self._changes.begin_tables(known_rows(parts))

    def _remove_damaged(self, step: int) -> None:
        """Remove the checkpoint of a step if it is damaged."""
        folder = parent_at(self.folder).folder(f"step-{step}")
        if not folder.exists():
            return
        if step in self._damaged or not self._is_whole(step):
            with suppress(FileNotFoundError):  # another process has removed it meanwhile
                folder.remove()
            self._damaged.discard(step)

    def _remove_old(self, newest: int) -> None:
        """Remove what is older than the newest whole checkpoints, and what stopped processes have left."""
        parent = parent_at(self.folder)
        gone = [name for name in parent.names() if (left := _LEFT.fullmatch(name)) and int(left[1]) <= newest]
        if self._keep_last:
            chains = self._chains([found.step for found in checkpoints(self.folder) if found.step <= newest])
            whole = [step for step, bases in chains.items() if bases is not None]
            # None are left if another process has removed them meanwhile.
            oldest = whole[-self._keep_last :][0] if whole else 0
            kept = {step for step in chains if step >= oldest or (self._keep_every and step % self._keep_every == 0)}
            names = {f"step-{step}" for step in kept}.union(*(chains[step] or () for step in kept))
            # Incremental ones go before their bases, so no base is missing meanwhile.
            gone += [f"step-{step}" for step in reversed(chains) if f"step-{step}" not in names]
        for name in gone:
            try:
                parent.folder(name).remove()
            except OSError as error:
                warnings.warn(f"Checkpoint {name}: it cannot be removed ({error}). The run continues.", stacklevel=2)

    def _chains(self, steps: Sequence[int]) -> dict[int, list[str] | None]:
        """Return the names of the bases of each checkpoint; None for one that is not whole."""
        known: dict[str, Manifest] = {}
        found: dict[int, list[str] | None] = {}
        for step in steps:
            try:
                chain = open_chain(parent_at(self.folder).folder(f"step-{step}"), known)
            except TilerecError:
                found[step] = None
            else:
                found[step] = [link.manifest.base.name for link in chain.links if link.manifest.base is not None]
        return found

    def _is_whole(self, step: int) -> bool:
        return self._chains([step])[step] is not None
