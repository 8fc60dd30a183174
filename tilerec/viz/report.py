"""A plan and its report as one HTML file that opens offline.

`page/` holds a template, a style sheet and scripts; the page combines them with the report's numbers as JSON. It loads
nothing: its content security policy allows only its own style and script. The same plan and report give the same bytes.
Table names are stored as JSON text and displayed as text, whatever characters they contain.

Explanations of the tables' tilings and the what-ifs need additional searches (planner/report).
Both need the report's request. The page explains the `EXPLAINED` tables that add most, so its size is bounded.

Legend: T tables, S stages, M tiers, R ranks.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Hashable, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from tilerec.atomic_file import write_file
from tilerec.errors import ConfigError
from tilerec.planner.report.bottleneck import BALANCED
from tilerec.planner.report.explanation import Explainer, Explanation
from tilerec.planner.report.plan_report import TIERS, PlanReport, TableEntry
from tilerec.planner.report.report_text import (
    balance_text,
    banner_text,
    bottleneck_text,
    gap_text,
    percent_text,
)
from tilerec.planner.report.what_if import WhatIf
from tilerec.spec.plan import ParameterSharding, ShardingPlan
from tilerec.spec.plan_table import bytes_text
from tilerec.spec.ranks import ranks_to_text

EXPLAINED = 100
"""Maximum number of tables that a page explains; if there are more, those that add most to the step."""
# In order of execution: later scripts use definitions of earlier ones.
_SCRIPTS = ("model", "draw", "list", "ranks", "tables", "machines", "main")


def write_report(plan: ShardingPlan | None, report: PlanReport, path: str | Path, *, what_ifs: bool = True) -> None:
    """Write `report_html` to a file.

    Raises:
        ConfigError: the plan has other tables than the report.
        FileError: the file cannot be written; an existing file is unchanged.
    """
    write_file(path, report_html(plan, report, what_ifs=what_ifs), "Report page")


def report_html(plan: ShardingPlan | None, report: PlanReport, *, what_ifs: bool = True) -> str:
    """Return the report as an HTML page.

    Args:
        plan: adds kernels, wires and the plan's fingerprint; None: the report alone.
        report: the report of that plan.
        what_ifs: include the changes that would help, if the report's request is known; each takes a search.

    Raises:
        ConfigError: the plan has other tables than the report.
    """
    about, fingerprint = _about(plan, report)
    script, style = _script(), _file("page.css")
    policy = f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'"
    topology = report.topology
    bound = _time(report.bound_ps) if report.bound_ps else "no bound"
    footer = " · ".join(text for text in (report.planner, fingerprint) if text)
    ranks = _count(topology.world_size, f"{topology.compute_device} rank")
    machines = f"{ranks} of {_count(topology.host_count, 'host')}"
    tables = _count(len(report.tables), "table")
    shown = {
        "policy": policy,
        "title": f"Plan report: {tables}, {_count(topology.world_size, 'rank')}",
        "summary": f"{tables} on {machines}, {_count(report.batch_size, 'sample')} on each rank",
        "cost": _time(report.cost_ps),
        "bound": bound,
        "gap": gap_text(report.gap) if report.bound_ps else "unknown",
        "balance": "balanced" if report.bottleneck.balanced else "",
        "slowest": str(report.slowest_rank),
        "slowest_of": _slowest(report),
        "bottleneck": _sentence(bottleneck_text(report, _time)),
        "ranks_say": balance_text(report, _time),
        "banner": banner_text(report) if report.speeds_are_default else "",
        "measured": "" if report.speeds_are_default else f"Speeds: {report.speeds_origin}.",
        "fullest": bytes_text(int(report.memory[report.fullest_rank, report.tier])),
        "fullest_of": _fullest(report),
        "machines": str(topology) if topology.host_count <= 16 else machines,
        "footer": footer,
    }
    plain = {name: html.escape(text, quote=True) for name, text in shown.items()}
    # The policy has quotes and is inserted into a quoted attribute, so it is escaped as well.
    return Template(_file("page.html")).substitute(
        plain,
        style=style,
        script=script,
        no_banner="" if shown["banner"] else "hidden",
        helps=_helps(report, what_ifs),
        data=_json(_data(report, about, _explanations(report))),
    )


def _slowest(report: PlanReport) -> str:
    found = report.bottleneck
    load = _time(int(report.load_ps[found.rank].sum()))
    if report.topology.world_size == 1:
        return f"{load} in all stages"
    return f"{load} in all stages, {percent_text(found.above)} above the mean"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _helps(report: PlanReport, wanted: bool) -> str:
    """Return the changes that would help, as HTML."""
    if report.request is None or not wanted:
        why = "were left out" if report.request is not None else "need the request of the plan"
        return f"<p>What-ifs {why}: tilerec plan show --html includes them, and tilerec plan whatif tries one.</p>"
    found = report.what_would_help()
    if not found:
        return "<p>None of the changes that tilerec tries applies to this plan.</p>"
    rows = "".join(_help(one) for one in found)
    return (
        '<div class="scroll"><table id="helps"><thead><tr><th>change</th><th class="n">saves</th>'
        f'<th class="n spare">step then</th><th class="spare">how</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _help(one: WhatIf) -> str:
    step = "–" if one.step_ps is None else _time(one.step_ps)
    return (
        f'<tr><td>{html.escape(one.change)}</td><td class="{"n" if one.step_ps is not None else ""}">'
        f"{html.escape(one.outcome)}</td>"
        f'<td class="n spare">{step}</td><td class="spare">{html.escape(one.how)}</td></tr>'
    )


def _explanations(report: PlanReport) -> tuple[list[tuple[int, Explanation]], str]:
    """Return explanations with their tables' numbers, and the reason why other tables have none."""
    if report.request is None:
        return [], "The reason for this tiling is not known, as the page was made without the plan's request."
    explainer = Explainer(report.request, _explained(report))
    if explainer.step_ps != report.cost_ps:
        return [], "The reason for this tiling is not known, as the plan was made by another release."
    known = set(explainer.tables)
    found = []
    for t, entry in enumerate(report.tables):
        key = _key(entry)
        if key in explainer.wanted and key in known:
            found.append((t, explainer.explanation(key)))
    if len(report.tables) > EXPLAINED:
        why = f"This page explains the {EXPLAINED} tables that add most; of this one: tilerec plan explain"
    else:
        why = "It was given by hand, or is placed with a table that was, so no other tiling was considered."
    return found, why


def _key(entry: TableEntry) -> str:
    return f"{entry.path}.{entry.name}" if entry.path else entry.name


def _explained(report: PlanReport) -> list[str]:
    order = sorted(report.tables, key=lambda e: (-sum(e.owner_ps) - sum(e.home_ps), e.path, e.name))
    return [_key(entry) for entry in order[:EXPLAINED]]


def _data(
    report: PlanReport, about: Sequence[str], explained: tuple[list[tuple[int, Explanation]], str]
) -> dict[str, Any]:
    """Return the data that the page's scripts read (page/model.js)."""
    tables = report.tables
    paths, words, tilings = _Interned(), _Interned(), _Interned()
    return {
        "why": {str(t): _why(one, words) for t, one in explained[0]},
        "why_not": explained[1],
        "balanced": BALANCED,
        "ranks": report.topology.world_size,
        "hosts": [ranks_to_text(host) for host in report.topology.host_ranks],
        "stages": list(report.stages),
        "load": report.load_ps.reshape(-1).tolist(),
        "bound": report.bound_ps,
        "charge": report.charge_ps,
        "tiers": list(TIERS),
        "tier": report.tier,
        "memory": report.memory.reshape(-1).tolist(),
        "cap": report.cap.reshape(-1).tolist(),
        "names": [entry.name for entry in tables],
        "path": [paths.place(entry.path, entry.path) for entry in tables],
        "rows": [entry.rows for entry in tables],
        "dims": [entry.dim for entry in tables],
        "bytes": [entry.bytes for entry in tables],
        "type": [words.place(entry.data_type, entry.data_type) for entry in tables],
        "kind": [words.place(entry.sharding_type, entry.sharding_type) for entry in tables],
        "option": [words.place(entry.option, entry.option) for entry in tables],
        "tiling": [_place(tilings, entry) for entry in tables],
        "own": [list(entry.owner_ps) for entry in tables],
        "home": [list(entry.home_ps) for entry in tables],
        "about": list(about),
        "paths": paths.values,
        "words": words.values,
        "tilings": tilings.values,
        "topology": _topology(report),
        "notes": list(report.notes),
    }


def _why(one: Explanation, words: _Interned) -> list[Any]:
    """Return the reason, the notes, the considered ways, the curve of reads, `ordered`, and the number of hot rows.

    Each way has: option, pieces, width, bytes of a piece, ps on owners, ps on all ranks, ps of the step, verdict.
    """
    ways = []
    for way in one.considered:
        verdict = one.verdict(way, _time)
        figures = (way.pieces, way.width, way.piece_bytes, way.owner_ps, way.home_ps, way.step_ps)
        ways.append([words.place(way.option, way.option), *figures, words.place(verdict, verdict)])
    hot = 0 if one.tiling is None or one.tiling.head is None else len(one.tiling.head.hot)
    curve = [list(point) for point in one.curve]
    return [_sentence(one.reason(_time)), list(one.notes), ways, curve, one.ordered, hot]


class _Interned:
    """List of distinct values, which the page refers to by index."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[Hashable, int] = {}

    def place(self, key: Hashable, value: Any) -> int:
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(value)
        return self._places[key]


def _place(tilings: _Interned, entry: TableEntry) -> int:
    """Return the index of a table's tiling in plan notation, which tables of different sizes may share."""
    blocks = entry.tiling.to_json()
    return tilings.place(json.dumps(blocks), blocks)


def _about(plan: ShardingPlan | None, report: PlanReport) -> tuple[list[str], str]:
    """Return per table of the report the details that only the plan has, and the plan's fingerprint."""
    if plan is None:
        return [""] * len(report.tables), ""
    planned = {(path, table): sharding for path, table, sharding in plan.tables()}
    reported = {(entry.path, entry.name) for entry in report.tables}
    for one, other, where in ((planned, reported, "report"), (reported, planned, "plan")):
        stray = sorted(set(one) - set(other))
        if stray:
            path, table = stray[0]
            raise ConfigError(
                f"Table '{table}' of module '{path}' is not in the {where}: plan and report are not of one search. "
                "Pass the report of the plan (plan.report)."
            )
    return (
        [_plan_details(planned[entry.path, entry.name]) for entry in report.tables],
        f"plan {plan.fingerprint():016x}",
    )


def _plan_details(sharding: ParameterSharding) -> str:
    parts = [] if sharding.kernel is None else [f"kernel {sharding.kernel.value}"]
    if sharding.wire is not None and sharding.wire.rounds:
        parts.append(f"rows are sent as {sharding.wire.forward}, gradients as {sharding.wire.backward}")
    return ", ".join(parts)


def _fullest(report: PlanReport) -> str:
    rank = report.fullest_rank
    held, cap = int(report.memory[rank, report.tier]), int(report.cap[rank, report.tier])
    return f"rank {rank}, {100 * held // cap} % of {bytes_text(cap)}" if cap else f"rank {rank}"


def _topology(report: PlanReport) -> list[tuple[str, str]]:
    """Return names and values of the topology, in the order of the topology file."""
    entries: list[tuple[str, str]] = []
    for name, value in report.topology.to_json().items():
        if value is None:
            continue
        if name.endswith("_cap"):
            entries.append((name, bytes_text(value)))
        elif name.endswith("_bw"):
            entries.append((name, f"{value * 1000 / 2**30:,.4g} GiB/s"))
        elif name == "hosts":
            more = f" | … {len(value)} hosts" if len(value) > 16 else ""
            entries.append((name, " | ".join(value[:16]) + more))
        elif isinstance(value, dict):
            entries += [(f"{name}.{key}", _figure(one)) for key, one in value.items()]
        else:
            entries.append((name, str(value)))
    return entries


def _time(ps: int) -> str:
    """Return a time as text, formatted as in the page's scripts (`time` in page/model.js)."""
    for size, unit in ((10**12, "s"), (10**9, "ms"), (10**6, "µs"), (10**3, "ns")):
        if ps >= size:
            value = ps / size
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{ps} ps" if ps else "0"


def _figure(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(_figure(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + "s" * (count != 1)


def _json(data: dict[str, Any]) -> str:
    """Return JSON that is safe inside a script element: it contains no `<`."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _file(name: str) -> str:
    return resources.files("tilerec.viz").joinpath("page").joinpath(name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    """Return all scripts as one function."""
    parts = "\n".join(_file(f"{name}.js") for name in _SCRIPTS)
    assert "</script" not in parts.lower(), "a script must not contain </script"
    return f'"use strict";(() => {{\n{parts}\n}})();'


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
