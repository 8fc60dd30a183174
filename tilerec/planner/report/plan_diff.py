"""Differences between two plans of the same tables, and the bytes that move from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilerec.spec.hot_rows import HotRows
from tilerec.spec.plan import ParameterSharding, ShardingPlan
from tilerec.spec.plan_table import bytes_text, format_columns
from tilerec.spec.ranks import ranks_to_text
from tilerec.spec.tile import Rectangle, Tiling


@dataclass(frozen=True)
class Change:
    """A table whose sharding differs between two plans.

    Args:
        path, name: path of the table's module, and the table's name.
        before, after: shardings in the first and second plan; None if the plan lacks the table.
        moved: cells that a rank holds in the second plan but not in the first, copies of hot rows included, summed over
            ranks; 0 if the table has different sizes in the plans.
    """

    path: str
    name: str
    before: ParameterSharding | None
    after: ParameterSharding | None
    moved: int = 0


@dataclass(frozen=True)
class PlanDiff:
    """Differences of two plans.

    Args:
        tables: number of tables in either plan.
        changes: the tables that differ.
    """

    tables: int
    changes: tuple[Change, ...]

    @property
    def others(self) -> int:
        """Number of tables that only one plan has, or whose sizes differ: a sign that the models differ."""
        return sum(_sizes(c.before) != _sizes(c.after) for c in self.changes)

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights that move from the first plan to the second; 4 bytes per cell if the type is unknown."""
        return sum(
            change.moved * ((change.after.element_bytes or 4) if change.after is not None else 0)
            for change in self.changes
        )

    def __str__(self) -> str:
        if not self.changes:
            return f"the same: {self.tables} tables have the same placement in both plans"
        rows = [
            (
                f"{change.path}.{change.name}" if change.path else change.name,
                _sharding_text(change.before, change.after),
                _sharding_text(change.after, change.before),
                bytes_text(change.moved * (change.after.element_bytes or 4))
                if change.after is not None and _sizes(change.before) == _sizes(change.after)
                else "",
            )
            for change in self.changes
        ]
        head = (
            f"{len(self.changes)} of {self.tables} tables differ; {bytes_text(self.moved_bytes)} of weights move "
            "from the first plan to the second"
        )
        if self.others:
            head += f"; {self.others} are in one plan only, or differ in size: are they plans of the same model?"
        return f"{head}\n\n" + format_columns(("table", "first", "second", "moves"), rows, right=(3,))


def plan_diff(first: ShardingPlan, second: ShardingPlan) -> PlanDiff:
    """Compare two plans: return the tables with different shardings."""
    before = {(path, name): sharding for path, name, sharding in first.tables()}
    after = {(path, name): sharding for path, name, sharding in second.tables()}
    changes = []
    names = list(dict.fromkeys([*before, *after]))
    for path, name in names:
        one, other = before.get((path, name)), after.get((path, name))
        if one is None or other is None:
            changes.append(Change(path, name, one, other))
        elif _compared_fields(one) != _compared_fields(other):
            alike = _sizes(one) is not None and _sizes(one) == _sizes(other)
            moved = 0
            if alike:
                assert one.tiling is not None
                assert other.tiling is not None
                ranks = second.world_size or max(other.tiling.ranks()) + 1
                moved = moved_cells(one.tiling, other.tiling) + copied_cells(one.hot, other.hot, other.tiling, ranks)
            changes.append(Change(path, name, one, other, moved))
    return PlanDiff(len(names), tuple(changes))


def moved_cells(first: Tiling, second: Tiling) -> int:
    """Return the cells that a rank holds in the second tiling but not in the first, summed over ranks.

    Example: a table of 4 x 2 cells, first on rank 0, then rows [0, 2) on rank 0 and rows [2, 4) on rank 1: 4 cells.
    """
    return sum(
        sum(r.cells for r in second.tiles_of(rank)) - _common(first.tiles_of(rank), second.tiles_of(rank))
        for rank in second.ranks()
    )


def copied_cells(first: HotRows | None, second: HotRows | None, tiling: Tiling, ranks: int) -> int:
    """Return the cells of rows that become hot, summed over the ranks that do not hold them by the new tiling.

    Example: row 3 of a table of 4 x 2 cells on rank 0 becomes hot on 3 ranks: 4 cells.
    """
    fresh = np.setdiff1d((second or HotRows()).ids, (first or HotRows()).ids)
    return sum(
        int(np.searchsorted(fresh, tile.r1) - np.searchsorted(fresh, tile.r0))
        * (tile.c1 - tile.c0)
        * (ranks - len(tile.owners))
        for tile in tiling.tiles()
    )


def _common(one: Sequence[Rectangle], other: Sequence[Rectangle]) -> int:
    total = 0
    for a in one:
        for b in other:
            rows = min(a.r1, b.r1) - max(a.r0, b.r0)
            columns = min(a.c1, b.c1) - max(a.c0, b.c0)
            total += max(0, rows) * max(0, columns)
    return total


def _compared_fields(sharding: ParameterSharding) -> tuple[object, ...]:
    """Return the fields that are compared between plans."""
    tiling = None if sharding.tiling is None else sharding.tiling.bare  # a plan from a file has hot rows beside it
    return (tiling, sharding.hot or HotRows(), sharding.kind, sharding.kernel, sharding.wire, sharding.data_type)


def _sizes(sharding: ParameterSharding | None) -> tuple[int, int] | None:
    tiling = None if sharding is None else sharding.tiling
    return None if tiling is None else (tiling.rows, tiling.dim)


def _sharding_text(sharding: ParameterSharding | None, other: ParameterSharding | None) -> str:
    """Return a sharding as text; table size, data type, wire and hot rows only if they differ from the other plan."""
    if sharding is None:
        return "not there"
    more = ""
    if other is not None:
        sizes = _sizes(sharding)
        if sizes is not None and sizes != _sizes(other):
            more += f", {sizes[0]:,} x {sizes[1]}"
        if sharding.data_type is not None and sharding.data_type != other.data_type:
            more += f", {sharding.data_type.value.lower()}"
        if sharding.wire != other.wire:
            wire = sharding.wire
            more += ", wire not set" if wire is None else f", wire {wire.forward} and {wire.backward}"
            if wire is not None and wire.distinct is not None:
                more += f", repeated ids travel {'once' if wire.distinct else 'each time'}"
        mine, theirs = sharding.hot or HotRows(), other.hot or HotRows()
        if mine != theirs:
            only = len(np.setdiff1d(mine.ids, theirs.ids))
            some = f" ({only:,} of them only here)" if len(theirs) and 0 < only < len(mine) else ""
            more += f", {len(mine):,} hot rows{some}" if len(mine) else ", no hot rows"
    ranks = ranks_to_text(sharding.ranks or ())
    kernel = "" if sharding.kernel is None else f" ({sharding.kernel.value})"
    shown = ranks if len(ranks) <= 24 else f"{len(set(sharding.ranks or ()))} ranks"
    return f"{sharding.kind.value} on {shown}{kernel}{more}"
