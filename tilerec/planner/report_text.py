"""A `PlanReport` as text that people read: cost and bound, stages, memory, the slowest rank, the heaviest tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tilerec.planner.search.instance import Ints
from tilerec.planner.table_entry import TableEntry
from tilerec.spec.plan_table import bytes_text
from tilerec.spec.ranks import ranks_to_text
from tilerec.spec.topology import Topology

_MOST_TABLES = 20
_UNITS = ((10**12, "s"), (10**9, "ms"), (10**6, "us"), (10**3, "ns"), (1, "ps"))


class Reported(Protocol):
    """What is read of a `PlanReport`, whose text this is."""

    @property
    def tables(self) -> Sequence[TableEntry]: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def cost_ps(self) -> int: ...
    @property
    def bound_ps(self) -> int: ...
    @property
    def charge_ps(self) -> int: ...
    @property
    def gap(self) -> float: ...
    @property
    def stages(self) -> Sequence[str]: ...
    @property
    def load_ps(self) -> Ints: ...
    @property
    def memory(self) -> Ints: ...
    @property
    def cap(self) -> Ints: ...
    @property
    def slowest_rank(self) -> int: ...
    @property
    def notes(self) -> Sequence[str]: ...
    def weighs_most(self, rank: int, most: int) -> list[tuple[TableEntry, float]]: ...


def fullest(held: Ints, cap: Ints) -> int:
    """The rank that holds most of what it may hold; of equals, the lowest."""
    return int((held / cap.clip(1)).argmax())


def time_text(ps: int | float) -> str:
    """`1_234_000_000` (ps) -> `"1.23 ms"`."""
    for size, unit in _UNITS:
        if ps >= size:
            value = ps / size
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return "0"


def gap_text(gap: float) -> str:
    """`0.0213` -> `"2.1 %"`."""
    return "unknown" if gap == float("inf") else f"{100 * gap:.1f} %"


def report_text(report: Reported) -> str:
    """The text of `str(report)`; ends without a newline."""
    bound = (
        f"no plan takes less than {time_text(report.bound_ps)} (gap {gap_text(report.gap)})"
        if report.bound_ps
        else "no bound is known"
    )
    parts = [
        f"{len(report.tables)} table{'s' * (len(report.tables) != 1)} on "
        f"{report.topology.world_size} {report.topology.compute_device} "
        f"rank{'s' * (report.topology.world_size != 1)} of {report.topology.host_count} "
        f"host{'s' * (report.topology.host_count != 1)}, {report.batch_size} samples each: "
        f"{time_text(report.cost_ps)} a step; {bound}",
        _stages(report),
        _memory(report),
        _slowest(report),
        _tables(report),
        *(f"note: {note}" for note in report.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def _stages(report: Reported) -> str:
    rows = []
    for s, name in enumerate(report.stages):
        load = report.load_ps[:, s]
        most = int(load.max())
        rows.append((name, time_text(most), time_text(int(load.sum()) // len(load)), str(int(load.argmax()))))
    if report.charge_ps:
        rows.append(("collectives as such", time_text(report.charge_ps), "", ""))
    return aligned(("stage", "slowest", "mean", "rank"), rows, right=(1, 2, 3))


def _memory(report: Reported) -> str:
    rows = []
    for m, tier in enumerate(("device", "host")):
        held, cap = report.memory[:, m], report.cap[:, m]
        if not held.any():
            continue
        full = fullest(held, cap)
        rows.append(
            (
                tier,
                bytes_text(int(held[full])),
                bytes_text(int(held.sum()) // len(held)),
                bytes_text(int(cap[full])),
                f"{100 * int(held[full]) // max(1, int(cap[full]))} %",
                str(full),
            )
        )
    return aligned(("memory", "fullest", "mean", "of", "full", "rank"), rows, right=(1, 2, 3, 4, 5))


def _slowest(report: Reported) -> str:
    rank = report.slowest_rank
    load = int(report.load_ps[rank].sum())
    heavy = report.weighs_most(rank, 5)
    if not heavy:
        return f"rank {rank} has the most to do: {time_text(load)}"
    shown = ", ".join(f"{_name(entry)} {time_text(seconds * 1e12)}" for entry, seconds in heavy)
    return f"rank {rank} has the most to do: {time_text(load)}. What weighs most there: {shown}"


def _tables(report: Reported) -> str:
    order = sorted(report.tables, key=lambda e: (-sum(e.owner_ps) - sum(e.home_ps), e.path, e.name))
    rows = []
    for entry in order[:_MOST_TABLES]:
        ranks = ranks_to_text(entry.ranks)
        rows.append(
            (
                _name(entry),
                f"{entry.rows:,} x {entry.dim}",
                entry.data_type,
                bytes_text(entry.bytes),
                entry.sharding_type,
                ranks if len(ranks) <= 24 else f"{len(entry.ranks)} ranks",
                time_text(sum(entry.owner_ps)) if entry.owner_ps else "?",
                time_text(sum(entry.home_ps)) if entry.owner_ps else "?",
            )
        )
    head = ("table", "rows x dim", "type", "bytes", "cut", "ranks", "adds on owners", "on all ranks")
    more = len(order) - _MOST_TABLES
    tail = f"\n… and {more} tables that add less" if more > 0 else ""
    return aligned(head, rows, right=(1, 3, 6, 7)) + tail


def _name(entry: TableEntry) -> str:
    return f"{entry.path}.{entry.name}" if entry.path else entry.name


def aligned(names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Columns as wide as their widest entry; those numbered in `right` end on one line."""
    widths = [max([len(name), *(len(row[i]) for row in rows)]) for i, name in enumerate(names)]
    lines = []
    for row in (names, *rows):
        cells = [
            f"{c:>{w}}" if i in right else f"{c:<{w}}"
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
