"""A table that compares the reports of several plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilerec.planner.report.plan_report import PlanReport
from tilerec.planner.report.report_text import gap_text
from tilerec.planner.report.time_text import time_text
from tilerec.spec.plan_table import bytes_text, format_columns
from tilerec.spec.topology import Topology


def side_by_side(names: Sequence[str], reports: Sequence[PlanReport]) -> str:
    """Return a table that compares the reports of several plans."""
    rows: list[tuple[str, Iterable[str]]] = [
        ("machines", (_machines(r.topology) for r in reports)),
        ("samples per rank", (f"{r.batch_size:,}" for r in reports)),
        ("step", (time_text(r.cost_ps) for r in reports)),
        ("samples per second", (_rate(r) for r in reports)),
        ("lower bound", (time_text(r.bound_ps) for r in reports)),
        ("gap", (gap_text(r.gap) for r in reports)),
        ("fullest rank", (bytes_text(r.memory_per_rank[r.fullest_rank]) for r in reports)),
        ("its capacity", (bytes_text(int(r.cap[r.fullest_rank, r.tier])) for r in reports)),
    ]
    for stage in dict.fromkeys(name for report in reports for name in report.stages):
        times = [time_text(r.stage_s[stage] * 1e12) if stage in r.stage_s else "" for r in reports]
        rows.append((stage, times))
    for kind in sorted({entry.sharding_type for report in reports for entry in report.tables}):
        counts = [str(sum(entry.sharding_type == kind for entry in r.tables)) for r in reports]
        rows.append((f"tables {kind}", counts))
    lines = [(what, *values) for what, values in rows]
    return format_columns(("", *names), lines, right=range(1, len(names) + 1))


def _machines(topology: Topology) -> str:
    size = topology.local_world_size or "?"
    return f"{topology.host_count} x {size} {topology.compute_device}"


def _rate(report: PlanReport) -> str:
    return f"{report.batch_size * report.topology.world_size / report.cost_s:,.0f}" if report.cost_ps else ""
