"""`DeltaRecord`: sequence number, step and state of an entry, in the metadata of its manifest.

run         random, one per log: entries of another run never fit
sequence    0, 1, 2, …, without gaps
step        of training
state       random, one per published state; a delta and a base of the same state share it
previous    the state that a delta is applied to
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tilerec.checkpoint.manifest import Manifest
from tilerec.checkpoint.tree import Json
from tilerec.errors import InputError
from tilerec.json_document import JsonValue

_KEY = "delta"
_NAMES = ("run", "sequence", "step", "state", "previous", "left_out")
_ROW_TYPES = "row_types"
"""Of logs in the served type only."""


class LeftOut(NamedTuple):
    """Changed rows of a table that a delta left out, for its budget. largest: of the changes of their cells."""

    rows: int
    largest: float


@dataclass(frozen=True)
class DeltaRecord:
    """See the head of this file.

    Args:
        left_out: by table.
        row_types: of tensors whose rows are published in another type than their own, by name: the type, and the
            columns of a row.
    """

    run: str
    sequence: int
    step: int
    state: str
    previous: str = ""
    left_out: Mapping[str, LeftOut] = field(default_factory=dict)
    row_types: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def metadata(self) -> dict[str, Json]:
        """Return the metadata of a manifest."""
        left_out = {table: list(left) for table, left in self.left_out.items()}
        types = {name: list(own) for name, own in self.row_types.items()}
        own = {**{name: getattr(self, name) for name in _NAMES[:-1]}, "left_out": left_out}
        return {_KEY: {**own, _ROW_TYPES: types} if types else own}

    @staticmethod
    def of(manifest: Manifest, what: str) -> DeltaRecord:
        """Return the record of a manifest.

        Raises:
            InputError: the manifest is that of another checkpoint, or states something impossible.
        """
        try:
            stated = JsonValue.of(manifest.metadata.get(_KEY), f"{what}: metadata.{_KEY}")
            found = stated.record((*_NAMES, _ROW_TYPES), _NAMES)
            left_out = {}
            for table, left in found["left_out"].members().items():
                rows, largest = left.items()
                left_out[table] = LeftOut(rows.whole(), float(largest.number()))
            types = {}
            for name, own in found[_ROW_TYPES].members().items() if _ROW_TYPES in found else ():
                kind, columns = own.items()
                types[name] = kind.text(), columns.whole()
            return DeltaRecord(
                found["run"].text(), found["sequence"].whole(), found["step"].whole(), found["state"].text(),
                found["previous"].text(), left_out, types,
            )  # fmt: skip
        except ValueError as error:
            raise InputError(f"{error} This is no entry of a delta log: check the path.") from error
