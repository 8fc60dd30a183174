"""`RowPasses`: passes over the rows of one source, as parts of batches: for training, held out, or all in order.

Row groups are read in any order (`order.py`). A stream is read from its start in every pass (`stream_order.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import TypeVar

from tilerec.data.batch_part import BatchPart
from tilerec.data.column_checks import check_exists, check_source
from tilerec.data.columns import Columns
from tilerec.data.fields import Bounds
from tilerec.data.hold_out import NO_HOLD_OUT, HeldOutRows, HoldOut
from tilerec.data.id_types import check_vocabularies, typed
from tilerec.data.order import BatchOrder, PassOrder, check_lanes
from tilerec.data.pass_reader import OrderedParts, PassReader, RankParts, ordered_parts
from tilerec.data.row_groups import RowGroups
from tilerec.data.stream_groups import StreamGroups
from tilerec.data.stream_order import StreamOrder
from tilerec.data.table_source import opened
from tilerec.data.window_loader import WindowLoader
from tilerec.errors import ConfigError

_P = TypeVar("_P")


class RowPasses:
    """Passes over a source.

    Args:
        source: row groups, or a stream.
        columns: roles of the columns.
        rule: the rows that are held out of training.
        seed, shuffle_rows, lanes, session: see `TableDataset`.
        labels: False leaves the label columns unread.

    Raises:
        ConfigError: a column does not exist, or a setting that a stream does not support.
        InputError: a column of a wrong type.
    """

    def __init__(
        self,
        source: RowGroups | StreamGroups,
        columns: Columns,
        *,
        rule: HoldOut = NO_HOLD_OUT,
        seed: int = 0,
        shuffle_rows: int = 1 << 17,
        lanes: int = 1,
        session: str = "",
        labels: bool = True,
    ) -> None:
        self.source, self._columns, self._rule = source, columns, rule
        self._seed, self._shuffle_rows, self._lanes, self._session = seed, shuffle_rows, lanes, session
        self._labels = labels
        self._label_bounds: Bounds | None = None
        check_source(source, columns, labels=labels, session=session)
        check_vocabularies(columns, source)
        if isinstance(source, StreamGroups):
            _check_stream(source, rule, lanes)
            HeldOutRows(rule, self.opened())  # it checks the rule
        else:
            self._held = HeldOutRows(rule, source)
            self._held.counts  # noqa: B018 - a column that cannot be read raises here

    def with_label_bounds(self, bounds: Bounds) -> RowPasses:
        """Return the passes with a check of labels; see `read_label`."""
        other = copy(self)
        other._label_bounds = bounds
        return other

    @property
    def typed_columns(self) -> Columns:
        """The roles with the types of the source's ids."""
        return typed(self._columns, self.source)

    @property
    def is_stream(self) -> bool:
        """True if the number of rows is unknown before a pass ends."""
        return isinstance(self.source, StreamGroups)

    @property
    def total_rows(self) -> int:
        """Rows of the source; of a stream, those of the last complete pass, and 0 before it."""
        return self.source.rows if isinstance(self.source, StreamGroups) else sum(self.source.group_rows)

    @property
    def held_out_rows(self) -> int:
        """Rows of the source that are held out; not of a stream."""
        return sum(self._held.counts)

    def opened(self, keys: Sequence[str] = ()) -> RowGroups:
        """Return the source as row groups; of a stream, a new pass that reads the columns and `keys`."""
        return opened(self.source, self._names(keys))

    def held_in(self, groups: RowGroups) -> HeldOutRows:
        """Return the held-out rows of row groups that `opened` has returned."""
        return HeldOutRows(self._rule, groups) if self.is_stream else self._held

    def shares(
        self, batch_size: int, epoch: int, rank: int, world_size: int, start: int
    ) -> tuple[Iterator[RankParts], BatchPart]:
        """Return a rank's parts of the global batches of a pass, and a part without rows; see `PassReader`."""
        check_lanes(self._lanes, world_size)
        groups: RowGroups
        order: BatchOrder
        if isinstance(self.source, StreamGroups):
            order = stream = StreamOrder(
                self.source, self._names(), self._rule, seed=self._seed, epoch=epoch,
                shuffle_rows=self._shuffle_rows, start=start,
            )  # fmt: skip
            groups, held = stream.groups, stream.held
        else:
            groups, held = self.source, self._held
            counts = [rows - out for rows, out in zip(groups.group_rows, held.counts, strict=True)]
            order = PassOrder(counts, seed=self._seed, epoch=epoch, shuffle_rows=self._shuffle_rows, lanes=self._lanes)
        loader = self._loader(groups, held, session=self._session)
        return _closing(PassReader(order, loader, batch_size, rank, world_size, start), groups), loader.no_rows()

    def held_out(self, batch_size: int) -> Iterator[OrderedParts]:
        """Yield the held-out rows in the order of the source, in batches."""
        groups = self.opened()
        held = self.held_in(groups)
        return _closing(ordered_parts(groups, self._loader(groups, held), batch_size, held=held), groups)

    def rows(self, batch_size: int, keys: Sequence[str] = ()) -> Iterator[OrderedParts]:
        """Yield all rows in the order of the source, in batches, with the columns `keys`."""
        for name in keys:
            check_exists(self.source, name, "keys")
        self.source.check_columns(keys)
        groups = self.opened(keys)
        return _closing(ordered_parts(groups, self._loader(groups, None), batch_size, keys=keys), groups)

    def _loader(self, groups: RowGroups, held: HeldOutRows | None, *, session: str = "") -> WindowLoader:
        return WindowLoader(
            groups, self._columns, held, session=session, labels=self._labels, label_bounds=self._label_bounds
        )

    def _names(self, keys: Sequence[str] = ()) -> list[str]:
        """Return the columns that passes read; a source without labels may lack theirs."""
        return [*self._columns.names, self._session, self._rule.column, *keys]


def _closing(parts: Iterable[_P], groups: RowGroups) -> Iterator[_P]:
    """Yield the parts; then end the pass over the row groups, also if the parts are not read to their end."""
    try:
        yield from parts
    finally:
        groups.close()


def _check_stream(source: StreamGroups, rule: HoldOut, lanes: int) -> None:
    if lanes > 1:
        raise ConfigError(
            f"lanes: got {lanes} for {source.name}, which is read in its order; expected 1. Leave it out, or write the "
            "samples to Parquet files."
        )
    if rule.every and source.reorders():
        raise ConfigError(
            f"hold_out.every: got {rule.every} for {source.name}, whose set_epoch changes the order of its samples, "
            "so a sample would be held out in one epoch and trained on in another; expected a rule by the samples "
            "themselves. Set hold_out.column, or pass held_out_data."
        )
