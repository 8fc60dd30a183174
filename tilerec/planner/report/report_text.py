"""The text of a `PlanReport`: cost and bound, bottleneck, what-ifs, stages, memory, and the heaviest tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tilerec.planner.report.bottleneck import BALANCED, BETWEEN_HOSTS, COLLECTIVES
from tilerec.planner.report.table_entry import TableEntry
from tilerec.planner.report.time_text import time_text as time_text
from tilerec.planner.report.what_if import WhatIf
from tilerec.planner.search.instance import PICO, Ints
from tilerec.spec.plan_table import bytes_text, format_columns
from tilerec.spec.ranks import ranks_to_text

if TYPE_CHECKING:
    from tilerec.planner.report.plan_report import PlanReport

_MOST_TABLES, _MOST_ON_RANK, _MOST_NAMED = 20, 5, 8


def fullest(held: Ints, cap: Ints) -> int:
    """Return the rank with the largest part of its cap in use; the lowest such rank."""
    return int((held / cap.clip(1)).argmax())


def percent_text(share: float) -> str:
    """Return a part as a percentage: `0.0213` -> `"2.1 %"`, `0.213` -> `"21 %"`."""
    return f"{100 * share:.{0 if share >= 0.0995 else 1}f} %"


def gap_text(gap: float) -> str:
    """Return a gap as a percentage with one digit: `0.0213` -> `"2.1 %"`; "unknown" for infinity."""
    return "unknown" if gap == float("inf") else f"{100 * gap:.1f} %"


def report_text(report: PlanReport, what_ifs: Sequence[WhatIf] | None = None) -> str:
    """Return the text of a report, without a final newline.

    Args:
        report: the report.
        what_ifs: the what-ifs to list; None: leave the section out.
    """
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
        banner_text(report) if report.speeds_are_default else "",
        "\n".join((f"Bottleneck: {bottleneck_text(report)}", balance_text(report), _heaviest(report))),
        "" if what_ifs is None else _what_ifs(what_ifs),
        _stages(report),
        _memory(report),
        _tables(report),
        *(f"note: {note}" for note in report.notes),
    ]
    return "\n\n".join(part for part in parts if part)


def banner_text(report: PlanReport) -> str:
    """Return the warning that speeds are defaults: their values, and the command that measures them."""
    topology = report.topology
    device = topology.compute_device
    memory = topology.ddr_mem_bw if device == "cpu" else topology.hbm_mem_bw
    shown = [f"memory {_rate(memory)}", f"links {_rate(topology.intra_host_bw)}"]
    if topology.host_count > 1:
        shown.append(f"network {_rate(topology.inter_host_bw)} a rank")
    ranks = topology.local_world_size or max(len(host) for host in topology.host_ranks)
    return (
        f"SPEEDS ARE DEFAULTS, NOT MEASURED: times assume '{report.speeds_origin}' ({', '.join(shown)}). To "
        f"measure this machine: tilerec calibrate --nproc {ranks} --device {device} --out topology.json, then "
        "plan with --topology topology.json."
    )


def bottleneck_text(report: PlanReport, time: Callable[[int], str] = time_text) -> str:
    """Return `"network between hosts, 75 % of the step: rows 27 ms, ..."`; `time` formats picoseconds."""
    first, *others = report.bottleneck.resources
    text = f"{first.name}, {percent_text(first.share)} of the step ({time(first.ps)})"
    if len(first.stages) > 1:
        parts = sorted(((int(report.load_ps[:, s].max()), s) for s in first.stages), key=lambda one: -one[0])
        text += ": " + ", ".join(f"{report.stages[s]} {time(ps)}" for ps, s in parts if ps)
    then = [f"{one.name} {percent_text(one.share)}" for one in others if one.ps]
    return text + (f"; then {', '.join(then)}" if then else "") + "."


def balance_text(report: PlanReport, time: Callable[[int], str] = time_text) -> str:
    """Return a sentence on the slowest rank; ranks within 5 % of the mean are called balanced."""
    found, ranks = report.bottleneck, report.topology.world_size
    load = time(int(report.load_ps[found.rank].sum()))
    if ranks == 1:
        return f"The only rank has {load} of work."
    if not found.balanced:
        text = f"Rank {found.rank} has the most work: {load}, {percent_text(found.above)} above the mean."
    else:
        text = f"The ranks are balanced: none has more than {load} of work, {percent_text(found.above)} above the mean."
    if found.waits:
        text += (
            f" Ranks wait for the slowest of each stage for {percent_text(found.waiting)} of the step, longest in "
            f"'{report.stages[found.stage]}' for rank {found.stage_rank}, which takes "
            f"{percent_text(found.stage_above)} more than the mean there."
        )
    return text


def _heaviest(report: PlanReport) -> str:
    """Return the tables that take most time on the rank with the most work, and the number of other tables there."""
    rank = report.bottleneck.rank
    heavy = report.weighs_most(rank, None)
    if not heavy:
        return ""
    shown = ", ".join(f"{_name(entry)} {time_text(seconds * PICO)}" for entry, seconds in heavy[:_MOST_ON_RANK])
    others = heavy[_MOST_ON_RANK:]
    if others:
        rest = time_text(sum(seconds for _, seconds in others) * PICO)
        shown += f"; {_count(len(others), 'other table')} there, {rest} together"
    own = _of_no_table(report, rank, [entry for entry, _ in heavy])
    if own > BALANCED * report.cost_ps:
        shown += f"; {time_text(own)} for no single table (fixed costs, and collectives that every plan needs)"
    return f"The heaviest tables on rank {rank}: {shown}."


def _of_no_table(report: PlanReport, rank: int, here: Sequence[TableEntry]) -> int:
    """Return a rank's ps in stages inside hosts not due to its pieces or its own batch; 0 if unknown."""
    if not all(entry.owner_ps for entry in report.tables):
        return 0
    left = 0
    for s, name in enumerate(report.stages):
        if not name.endswith(BETWEEN_HOSTS):
            owned = sum(e.owner_ps[s] * e.ps_on(rank) // sum(e.owner_ps) for e in here)
            left += int(report.load_ps[rank, s]) - owned - sum(e.home_ps[s] for e in report.tables)
    return max(0, left)


def _what_ifs(found: Sequence[WhatIf]) -> str:
    if not found:
        return "What would help: no change applies to this plan."
    rows = [(one.change, "" if one.step_ps is None else time_text(one.step_ps), one.outcome, one.how) for one in found]
    return format_columns(("what would help", "step then", "saves", "how"), rows, right=(1,))


def _stages(report: PlanReport) -> str:
    rows = []
    for s, name in enumerate(report.stages):
        load = report.load_ps[:, s]
        most, mean = int(load.max()), int(load.sum()) // len(load)
        rank = str(int(load.argmax())) if most > (1.0 + BALANCED) * mean else "balanced"
        rows.append((name, _share(most, report), time_text(most), time_text(mean), rank if len(load) > 1 else "0"))
    if report.charge_ps:
        charge = report.charge_ps
        rows.append((COLLECTIVES, _share(charge, report), time_text(charge), time_text(charge), "all"))
    return format_columns(("stage", "of the step", "slowest", "mean", "slowest rank"), rows, right=(1, 2, 3, 4))


def _share(ps: int, report: PlanReport) -> str:
    return percent_text(ps / report.cost_ps) if report.cost_ps else ""


def _memory(report: PlanReport) -> str:
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
    return format_columns(("memory", "fullest", "mean", "of", "full", "rank"), rows, right=(1, 2, 3, 4, 5))


def _tables(report: PlanReport) -> str:
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
    return format_columns(head, rows, right=(1, 3, 6, 7)) + _others(order[_MOST_TABLES:])


def _others(entries: Sequence[TableEntry]) -> str:
    """Return a line on the tables that are not listed: their number, their bytes, and some of their names."""
    if not entries:
        return ""
    names = ", ".join(_name(entry) for entry in entries[:_MOST_NAMED])
    if len(entries) > _MOST_NAMED:
        names += f" … {_name(entries[-1])} (tilerec plan show --tables has them all)"
    size = bytes_text(sum(entry.bytes for entry in entries))
    return f"\n… and {_count(len(entries), 'table')} that add{'s' * (len(entries) == 1)} less, {size} together: {names}"


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _rate(bandwidth: float) -> str:
    """Return bytes per millisecond as text, in GiB per second."""
    return f"{bandwidth * 1000 / 2**30:,.4g} GiB/s"


def _name(entry: TableEntry) -> str:
    return f"{entry.path}.{entry.name}" if entry.path else entry.name
