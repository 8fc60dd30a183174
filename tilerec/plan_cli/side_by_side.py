"""A table that compares the reports of several plans."""

from __future__ import annotations

from collections.abc import Sequence

from tilerec.planner.report.plan_report import PlanReport
from tilerec.planner.report.report_text import format_columns, gap_text, time_text
from tilerec.spec.plan_table import bytes_text
from tilerec.spec.topology import Topology


def side_by_side(names: Sequence[str], reports: Sequence[PlanReport]) -> str:
    def row(what: str, values: Sequence[str]) -> tuple[str, ...]:
        return (what, *values)

    stages = list(dict.fromkeys(name for report in reports for name in report.stages))
    rows = [
        row("machines", [_machines(r.topology) for r in reports]),
        row("samples per rank", [f"{r.batch_size:,}" for r in reports]),
        row("step", [time_text(r.cost_ps) for r in reports]),
        row("samples per second", [_rate(r) for r in reports]),
        row("lower bound", [time_text(r.bound_ps) for r in reports]),
        row("gap", [gap_text(r.gap) for r in reports]),
        row("fullest rank", [bytes_text(r.memory_per_rank[r.fullest_rank]) for r in reports]),
        row("its capacity", [bytes_text(int(r.cap[r.fullest_rank, r.tier])) for r in reports]),
    ]  # fmt: skip
    for stage in stages:
        rows.append(
            row(stage, [time_text(r.stage_s[stage] * 1e12) if stage in r.stage_s else "" for r in reports])
        )
    kinds = sorted({entry.sharding_type for report in reports for entry in report.tables})
    for kind in kinds:
        rows.append(
            row(f"tables {kind}", [str(sum(e.sharding_type == kind for e in r.tables)) for r in reports])
        )
    return format_columns(("", *names), rows, right=range(1, len(names) + 1))


def _machines(topology: Topology) -> str:
    size = topology.local_world_size or "?"
    return f"{topology.host_count} x {size} {topology.compute_device}"


def _rate(report: PlanReport) -> str:
    return f"{report.batch_size * report.topology.world_size / report.cost_s:,.0f}" if report.cost_ps else ""
