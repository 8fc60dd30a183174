"""`StepMemory`: the state of a job at the beginning of its last steps, in the memory of this rank.

    rows of tables and their slots     as they are now, and the journal with which earlier steps are reached
    all other tensors                  copied at each step; they are small
    values of the caller               position, counters, ...

`write` puts it into a file in memory (`memory_file.py`), for a process that takes this one's place. Steps are not
undone here: ranks are interrupted at different moments, and the step that all of them can reach is known only when all
have written.

Tensors are found once, by the state of the parts. They must keep their memory from then on; this is checked when the
state of an optimizer grows, and before a write.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilerec.checkpoint.dtypes import DTYPE_NAMES
from tilerec.checkpoint.memory_file import write_memory
from tilerec.checkpoint.parts import states_of
from tilerec.checkpoint.pieces import Box, check_tensor, pieces_of
from tilerec.checkpoint.step_journal import StepJournal
from tilerec.checkpoint.tree import Json, flatten
from tilerec.errors import ConfigError
from tilerec.modules.cached_tables import iter_table_rows
from tilerec.modules.managed_collection import ManagedCollisionCollection

_STEPS = 3
"""Ranks agree on a step with the exchange of one step later, so two more steps than the running one are kept."""


class _Place(NamedTuple):
    """A piece of a tensor: its box, and its memory in a table's tensor, or among the copied ones if `table` is -1."""

    box: Box
    table: int
    tensor: int
    offset: int
    strides: tuple[int, ...]

    def described(self) -> Json:
        return [list(self.box.offsets), list(self.box.sizes), self.table, self.tensor, self.offset, list(self.strides)]


class _Layout(NamedTuple):
    """The state of the parts: the text of its tree, the pieces by tensor, and the tensors to copy at each step.

    addresses: of the pieces, by tensor.
    """

    tree: str
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], list[_Place]]]
    copied: list[Tensor]
    addresses: dict[str, list[int]]

    def described(self) -> Json:
        tensors = {
            name: [DTYPE_NAMES[dtype], list(shape), [place.described() for place in places]]
            for name, (dtype, shape, places) in self.tensors.items()
        }
        return {"tree": self.tree, "tensors": tensors}


class _Kept(NamedTuple):
    """State at the beginning of a step, besides the rows of tables."""

    step: int
    layout: _Layout
    copies: list[Tensor]
    values: Mapping[str, Any]


class StepMemory:
    """The last steps of a job, until `close`.

    Args:
        parts: with `state_dict`, as for `save`. Their `state_dict` must not be collective.

    Raises:
        ConfigError: steps of these parts cannot be undone.
    """

    def __init__(self, parts: Mapping[str, Any]) -> None:
        _check_undoable(parts)
        self._parts = parts
        self._journal = StepJournal(parts, _STEPS)
        self._layout: _Layout | None = None
        self._entries = -1
        self._kept: deque[_Kept] = deque(maxlen=_STEPS)

    @torch.no_grad()
    def keep(self, step: int, values: Mapping[str, Any]) -> None:
        """Keep the state after this many steps.

        Args:
            values: of the caller: what `flatten` takes. Tensors are not copied.
        """
        entries = _optimizer_entries(self._parts)
        if self._layout is None or entries != self._entries:
            self._layout, self._entries = self._found(), entries
        copies = [tensor.clone() for tensor in self._layout.copied]
        self._kept.append(_Kept(step, self._layout, copies, values))
        self._journal.begin(step)

    @property
    def bytes(self) -> int:
        """Bytes of the journal and of the copies."""
        return self._journal.bytes + sum(copy.nbytes for kept in self._kept for copy in kept.copies)

    @torch.no_grad()
    def write(self, path: Path, extras: Mapping[int, Mapping[str, Any]]) -> None:
        """Write the steps that can be reached to a file, which appears as a whole or not at all.

        Args:
            extras: further values by step; steps without an entry are left out.

        Raises:
            ConfigError: no step can be reached. FileError: the file cannot be written.
        """
        kept = {one.step: one for one in self._kept}
        logs = self._journal.undoable()
        steps = [log.step for log in logs if log.step in extras]
        if not steps:
            why = self._journal.lost or "ranks have not finished a step together"
            raise ConfigError(f"Recovery: got a step that cannot be undone ({why}); expected writes with their rows.")
        now = self._found().addresses
        moved = [name for step in steps for name, own in kept[step].layout.addresses.items() if now.get(name) != own]
        if moved:
            raise ConfigError(f"Recovery: got other memory of {moved[0]} than before; expected updates in place.")
        state = {
            "tables": [[tensor.detach() for tensor in table.host()] for table in self._journal.tables],
            "kept": {
                str(step): {
                    "layout": kept[step].layout.described(),
                    "copies": kept[step].copies,
                    "values": dict(kept[step].values) | dict(extras[step]),
                }
                for step in steps
            },
            "writes": {
                str(log.step): [[write.table, write.rows_N, write.values] for write in log.writes] for log in logs
            },
        }
        write_memory(path, state)

    def close(self) -> None:
        """End the observation of the tables, and free the memory."""
        self._journal.close()
        self._kept.clear()
        self._layout = None

    def _found(self) -> _Layout:
        """Return the layout of the parts' present state."""
        tree, tensors = flatten(states_of(self._parts))
        spans = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, number, k)
            for number, table in enumerate(self._journal.tables)
            for k, tensor in enumerate(table.host())
        )
        starts = [span[0] for span in spans]
        copied: list[Tensor] = []
        found: dict[str, tuple[torch.dtype, tuple[int, ...], list[_Place]]] = {}
        addresses: dict[str, list[int]] = {}
        for name, tensor in tensors.items():
            check_tensor(name, tensor)
            places = []
            pieces = pieces_of(name, tensor)
            addresses[name] = [memory.data_ptr() for _, memory in pieces]
            for box, memory in pieces:
                at = bisect_right(starts, memory.data_ptr()) - 1
                if memory.numel() and at >= 0 and memory.data_ptr() < spans[at][1]:
                    first, _, table, k = spans[at]
                    offset = (memory.data_ptr() - first) // memory.itemsize
                    places.append(_Place(box, table, k, offset, tuple(memory.stride())))
                else:
                    places.append(_Place(box, -1, len(copied), 0, tuple(memory.contiguous().stride())))
                    copied.append(memory)
            found[name] = tensor.dtype, tuple(tensor.shape), places
        return _Layout(json.dumps(tree), found, copied, addresses)


def _optimizer_entries(parts: Mapping[str, Any]) -> int:
    """Return the number of entries in the state of torch's optimizers, which make them at a parameter's first step."""
    return sum(
        len(state)
        for part in parts.values()
        if type(part).__module__.startswith("torch.optim")
        for state in part.state.values()
    )


def _check_undoable(parts: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for parts with state that batches change before their step, or rows behind a cache."""
    for part in parts.values():
        for name, module in part.named_modules() if isinstance(part, nn.Module) else ():
            if isinstance(module, ManagedCollisionCollection):
                raise ConfigError(
                    f"Recovery: got managed collision in {name!r}, whose ids change before their step; expected plain "
                    "tables. Runs with it go on from checkpoints."
                )
        for table, rows in iter_table_rows(part) if isinstance(part, nn.Module) else ():
            if table.cache is not None or not all(tensor.is_contiguous() for tensor in rows.host()):
                raise ConfigError(
                    f"Recovery: got table '{rows.name}' with cached or strided rows; expected rows in one block of "
                    "memory. Runs with such tables go on from checkpoints."
                )
