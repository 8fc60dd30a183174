"""What two plans of the same tables have in common, and how many bytes move from one to the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilerec.planner.report.text import aligned
from tilerec.spec.plan import ParameterSharding, ShardingPlan
from tilerec.spec.plan_table import bytes_text
from tilerec.spec.ranks import ranks_to_text
from tilerec.spec.tile import Rectangle, Tiling


@dataclass(frozen=True)
class Change:
    """A table that the plans treat differently; None where a plan lacks it.

    Args:
        moved: cells that a rank holds in the second plan and did not hold in the first, all ranks together; 0 where the
            plans have another size of table, of which nothing can move.
    """

    path: str
    name: str
    before: ParameterSharding | None
    after: ParameterSharding | None
    moved: int = 0


@dataclass(frozen=True)
class PlanDiff:
    """Args: tables: in either plan. changes: of those that differ."""

    tables: int
    changes: tuple[Change, ...]

    @property
    def others(self) -> int:
        """Tables that are not in both plans, or not of one size: signs of another model."""
        return sum(_sizes(c.before) != _sizes(c.after) for c in self.changes)

    @property
    def moved_bytes(self) -> int:
        """Weights that travel from the first plan to the second; 4 bytes a cell where the type is unknown."""
        return sum(
            change.moved * ((change.after.element_bytes or 4) if change.after is not None else 0)
            for change in self.changes
        )

    def __str__(self) -> str:
        if not self.changes:
            return f"the same: {self.tables} tables lie alike in both plans"
        rows = [
            (
                f"{change.path}.{change.name}" if change.path else change.name,
                _words(change.before, change.after),
                _words(change.after, change.before),
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
            head += (
                f"; {self.others} are not in both plans, or have other sizes: are they plans of one model?"
            )
        return f"{head}\n\n" + aligned(("table", "first", "second", "moves"), rows, right=(3,))


def plan_diff(first: ShardingPlan, second: ShardingPlan) -> PlanDiff:
    """Tables that two plans cut or place differently."""
    before = {(path, name): sharding for path, name, sharding in first.tables()}
    after = {(path, name): sharding for path, name, sharding in second.tables()}
    changes = []
    names = list(dict.fromkeys([*before, *after]))
    for path, name in names:
        one, other = before.get((path, name)), after.get((path, name))
        if one is None or other is None:
            changes.append(Change(path, name, one, other))
        elif _marks(one) != _marks(other):
            alike = _sizes(one) is not None and _sizes(one) == _sizes(other)
            assert not alike or (one.tiling is not None and other.tiling is not None)
            moved = moved_cells(one.tiling, other.tiling) if alike else 0  # type: ignore[arg-type]
            changes.append(Change(path, name, one, other, moved))
    return PlanDiff(len(names), tuple(changes))


def moved_cells(first: Tiling, second: Tiling) -> int:
    """Cells that a rank holds in the second tiling and not in the first, all ranks together.

    A table of 4 x 2 from rank 0 whole to rows [0, 2) on rank 0 and [2, 4) on rank 1: 4.
    """
    return sum(
        sum(r.cells for r in second.tiles_of(rank)) - _common(first.tiles_of(rank), second.tiles_of(rank))
        for rank in second.ranks()
    )


def _common(one: Sequence[Rectangle], other: Sequence[Rectangle]) -> int:
    total = 0
    for a in one:
        for b in other:
            rows = min(a.r1, b.r1) - max(a.r0, b.r0)
            columns = min(a.c1, b.c1) - max(a.c0, b.c0)
            total += max(0, rows) * max(0, columns)
    return total


def _marks(sharding: ParameterSharding) -> tuple[object, ...]:
    """What makes plans differ."""
    return (sharding.tiling, sharding.kind, sharding.kernel, sharding.wire, sharding.data_type)


def _sizes(sharding: ParameterSharding | None) -> tuple[int, int] | None:
    tiling = None if sharding is None else sharding.tiling
    return None if tiling is None else (tiling.rows, tiling.dim)


def _words(sharding: ParameterSharding | None, other: ParameterSharding | None) -> str:
    """A sharding; of size, type of data and wire only what the other plan has otherwise."""
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
            more += ", wire unsaid" if wire is None else f", wire {wire.forward} and {wire.backward}"
    ranks = ranks_to_text(sharding.ranks or ())
    kernel = "" if sharding.kernel is None else f" ({sharding.kernel.value})"
    shown = ranks if len(ranks) <= 24 else f"{len(set(sharding.ranks or ()))} ranks"
    return f"{sharding.kind.value} on {shown}{kernel}{more}"
