"""`tilerec plan`: make, show, explain, compare and vary sharding plans.

tilerec plan synthetic --ranks-per-host 8                 plan a recipe's model: writes plan.json,
                                                          plan.report.json and plan.request.json
tilerec plan tables.json --hosts 4 --ranks-per-host 8     plan a JSON or YAML list of tables
tilerec plan show plan.json --html report.html
tilerec plan explain user --plan plan.json                list the shardings considered for a table, and the reason
tilerec plan diff a.json b.json
tilerec plan whatif --hosts 4 --hbm 80GB --batch-size 8192 --dtype bf16
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from typer.core import TyperGroup

from tilerec.atomic_file import write_file
from tilerec.errors import ConfigError, TilerecError
from tilerec.json_document import JsonValue, read_json, read_text
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.make_plan import make_plan
from tilerec.planner.plan_price import price_plan
from tilerec.planner.planner import RESERVED, EmbeddingShardingPlanner
from tilerec.planner.planner_error import PlannerError
from tilerec.planner.report.explanation import explain
from tilerec.planner.report.plan_diff import plan_diff
from tilerec.planner.report.plan_report import PlanReport
from tilerec.planner.report.report_text import format_columns, gap_text, time_text
from tilerec.planner.report.variation import with_changes, world
from tilerec.planner.request import PlanRequest, read_tables
from tilerec.planner.reservation import HeuristicalStorageReservation
from tilerec.planner.tables import PlannedTable, tables_of
from tilerec.spec.gpu_presets import MACHINES
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.plan_table import bytes_text
from tilerec.spec.topology import Topology
from tilerec.terminal import print_error, print_plain, print_warning

_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
          "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip
_FILES = (".json", ".yaml", ".yml")
_MOST_YAML_BYTES = 2**22


class _Commands(TyperGroup):
    """Command group in which `tilerec plan SOURCE` is short for `tilerec plan make SOURCE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["make", *args]
        return super().parse_args(ctx, args)


plan_app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Plan the sharding: `tilerec plan SOURCE` makes a plan for a recipe or a list of tables.",
)

_Hosts = Annotated[int | None, typer.Option(help="Number of machines.", min=1)]
_PerHost = Annotated[int | None, typer.Option(help="Ranks per machine.", min=1)]
_Hbm = Annotated[str | None, typer.Option(help="Device memory per rank: 80GB, 79GiB, or bytes.")]
_Ddr = Annotated[str | None, typer.Option(help="Host memory per rank: 80GB, 79GiB, or bytes.")]
_Batch = Annotated[int | None, typer.Option(help="Samples per rank and step.", min=1)]
_Type = Annotated[str | None, typer.Option(help="Data type of all tables: fp32, bf16, fp16.")]
_Wire = Annotated[
    str | None,
    typer.Option(help="Wire format of rows and gradients: fp32, bf16, fp16, int8, fp8."),
]
_WhatIfs = Annotated[
    bool,
    typer.Option("--what-ifs/--no-what-ifs", help="Also plan a few changes, and show the savings of each."),
]
_Html = Annotated[Path | None, typer.Option(help="Write a report page that opens offline.")]
_Plan = Annotated[Path, typer.Option("--plan", help="A plan that `tilerec plan` wrote.")]


@plan_app.command()
def make(
    source: Annotated[
        str,
        typer.Argument(help="A recipe's name, module:function of yours, or a .json or .yaml list of tables."),
    ],
    data: Annotated[str | None, typer.Option(help="Path of the data, for recipes that read files.")] = None,
    topology: Annotated[
        Path | None, typer.Option(help="Topology file that `tilerec calibrate` wrote.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option(help=f"GPU by name, 8 per host by default: {', '.join(MACHINES)}.")
    ] = None,
    hosts: _Hosts = None,
    ranks_per_host: _PerHost = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda, or the topology's.")] = None,
    hbm: _Hbm = None,
    ddr: _Ddr = None,
    batch_size: _Batch = None,
    dtype: _Type = None,
    wire: _Wire = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="Optimizer of listed tables that name none: SGD, RowWiseAdagrad, Adam, …"),
    ] = None,
    stats: Annotated[
        Path | None, typer.Option(help="Statistics of the ids, written by `tilerec stats`.")
    ] = None,
    fixed: Annotated[
        Path | None, typer.Option(help="Plan of some tables, whose shardings are kept unchanged.")
    ] = None,
    reserve: Annotated[
        float, typer.Option(help="Fraction of the memory that tables may not use.")
    ] = RESERVED,
    cache: Annotated[Path | None, typer.Option(help="Folder that caches plans by their inputs.")] = None,
    effort: Annotated[int, typer.Option(help="Search effort: each step doubles the search.", min=1)] = 1,
    out: Annotated[Path, typer.Option(help="The plan's file.")] = Path("plan.json"),
    html: _Html = None,
    what_ifs: _WhatIfs = True,
) -> None:
    """Make a plan and write it."""
    with _exit_on_error():
        began = time.perf_counter()
        _check_writable("--out", out)
        _check_writable("--html", html)
        world = _topology(topology, machine, hosts, ranks_per_host, device, hbm, ddr)
        origin = (
            _file(Path(source), optimizer)
            if source.endswith(_FILES)
            else _recipe(source, data, optimizer, world)
        )
        constraints = origin.constraints
        if stats is not None:
            from tilerec.data.statistics import Statistics

            tables = [_StatisticsTable(t.key, t.rows, t.features) for t in origin.tables]
            constraints = Statistics.load(stats).constraints(tables, like=constraints)
        planner = EmbeddingShardingPlanner(
            world,
            batch_size or origin.batch_size,
            storage_reservation=HeuristicalStorageReservation(reserve),
            constraints=constraints,
            fixed=fixed,
            cache=cache,
            effort=effort,
        )
        request = with_changes(planner.request(origin.module or origin.tables), data_type=dtype, wire=wire)
        plan = planner.make(request)
        seconds = time.perf_counter() - began
        report = plan.report.with_request(request)
        try:
            _save(plan, request, out)
        finally:
            # Print the report even if a file cannot be written (the disk may be full). Write first: what-ifs take time.
            print_plain(report.text(what_would_help=what_ifs))
        if html is not None:
            _write_page(plan, report, html, what_ifs)
        written = f"{out}" if html is None else f"{out} and {html}"
        print_plain(f"\nplanned in {seconds:.2f} s; wrote {written}")


@plan_app.command()
def show(
    plan: Annotated[Path, typer.Argument(help="A plan's file.")] = Path("plan.json"),
    tables: Annotated[bool, typer.Option("--tables", help="Print the placement of every table.")] = False,
    request: Annotated[
        Path | None,
        typer.Option(help="Estimate the plan's cost for this request: tables, machines and batch."),
    ] = None,
    html: _Html = None,
    what_ifs: _WhatIfs = True,
) -> None:
    """Show a plan: cost, bound, bottleneck, suggestions, stages, memory, the most expensive tables."""
    with _exit_on_error():
        _check_writable("--html", html)
        found = ShardingPlan.load(plan)
        report = _load_report(plan)
        if report is not None and not report.is_of(found):
            print_warning(
                f"{_beside(plan, 'report')}: got the report of another plan (this one was edited, or the report was "
                "copied); it is not shown. Plan again."
            )
            report = None
        if request is not None:
            report = None  # the report beside the plan may be for other machines
        if html is not None and report is None:
            why = "the report of another plan" if _beside(plan, "report").exists() else "no such file"
            raise ConfigError(
                f"{_beside(plan, 'report')}: got {why}; expected the report of {plan}, which --html draws. Plan again."
            )
        if tables or report is None:
            print_plain(str(found))
        if report is not None:
            report = _with_request(report, plan)
            print_plain(("\n" if tables else "") + report.text(what_would_help=what_ifs))
            if html is not None:
                _write_page(found, report, html, what_ifs)
            return
        if not _beside(plan, "report").exists():
            print_plain(f"\nno report: {_beside(plan, 'report')} does not exist")
        by = request or _beside(plan, "request")
        if by.exists() or request is not None:
            print_plain(f"\n{price_plan(PlanRequest.load(by), found)}")


@plan_app.command("explain")
def explain_table(
    table: Annotated[str, typer.Argument(help="A table's name, or module.name.")],
    plan: _Plan = Path("plan.json"),
) -> None:
    """Show each sharding of a table that was considered, its cost, and why one was chosen."""
    with _exit_on_error():
        found = explain(_load_request(plan), table)
        if plan.exists() and not found.is_in(ShardingPlan.load(plan)):
            print_warning(
                f"{plan}: got another placement of '{found.table}' than its request gives (the plan was edited, or "
                "another release made it). The explanation is of the placement that the request gives."
            )
        print_plain(str(found))


@plan_app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="A plan's file.")],
    second: Annotated[Path, typer.Argument(help="Another plan's file.")],
) -> None:
    """Show the differences of two plans, and the bytes that move from one to the other."""
    with _exit_on_error():
        plans = [ShardingPlan.load(path) for path in (first, second)]
        found = plan_diff(*plans)
        reports = [_load_report(path) for path in (first, second)]
        for path, plan, report in zip((first, second), plans, reports, strict=True):
            if report is not None and not report.is_of(plan):
                print_warning(
                    f"{_beside(path, 'report')}: got the report of another plan (this one was edited, or the report "
                    "was copied); no reports are compared."
                )
                reports = [None, None]
        if reports[0] is not None and reports[1] is not None:
            print_plain(_side_by_side([str(first), str(second)], [reports[0], reports[1]]) + "\n")
        print_plain(str(found))


@plan_app.command()
def whatif(
    plan: _Plan = Path("plan.json"),
    hosts: _Hosts = None,
    ranks_per_host: _PerHost = None,
    hbm: _Hbm = None,
    ddr: _Ddr = None,
    batch_size: _Batch = None,
    dtype: _Type = None,
    wire: _Wire = None,
    out: Annotated[Path | None, typer.Option(help="Write the varied plan to this file.")] = None,
) -> None:
    """Plan again with other machines, batches, data types or wire formats, and compare."""
    with _exit_on_error():
        _check_writable("--out", out)
        request = _load_request(plan)
        other = with_changes(
            request,
            hosts=hosts,
            ranks_per_host=ranks_per_host,
            hbm_cap=None if hbm is None else _bytes("--hbm", hbm),
            ddr_cap=None if ddr is None else _bytes("--ddr", ddr),
            batch_size=batch_size,
            data_type=dtype,
            wire=wire,
        )
        now, then = _plan_or_error(request), make_plan(other)
        if isinstance(now, str):
            print_plain(f"now: {now}\n")
            print_plain(str(then.report))
        else:
            print_plain(_side_by_side(["now", "then"], [now.report, then.report]))
        if out is not None:
            _save(then, other, out)


# ---------------------------------------------------------------------------------------------------- sources of tables


@dataclass(frozen=True)
class _Source:
    """Tables to plan. `module` is the model that holds them; None for a list of tables."""

    tables: Sequence[PlannedTable]
    batch_size: int | None
    constraints: dict[str, ParameterConstraints]
    module: nn.Module | None = None


def _recipe(name: str, data: str | None, optimizer: str | None, world: Topology) -> _Source:
    """Build a recipe's model with tables on the meta device; return its tables, optimizer and batch size."""
    if optimizer is not None:
        raise ConfigError(
            f"--optimizer: got {optimizer} with a recipe; expected it only with a list of tables. Leave it out: a "
            "recipe has its own optimizer (tilerec train --show)."
        )
    from tilerec.recipes.registry import make_run
    from tilerec.train.optimizers import attach

    run = make_run(name, data)
    model = run.model.build(run.data.open(), torch.device("cpu"), torch.device("meta"))
    attach(model, run.train.embedding_optimizer)
    return _Source(tables_of(model), max(1, run.train.batch_size // world.world_size), {}, model)


def _file(path: Path, optimizer: str | None) -> _Source:
    content = _read(path)
    batch_size = None
    if isinstance(content.value, dict):
        found = content.record(("tables", "batch_size"), ("tables",))
        content = found["tables"]
        batch_size = found["batch_size"].whole(1) if "batch_size" in found else None
    tables, constraints = read_tables(content)
    if optimizer is not None:
        spec = OptimizerSpec.from_json({"optimizer": optimizer})
        tables = [t if t.optimizer is not None else replace(t, optimizer=spec) for t in tables]
    return _Source(tables, batch_size, constraints)


def _read(path: Path) -> JsonValue:
    if path.suffix == ".json":
        return read_json(path, "Tables")
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ImportError as error:
        raise ConfigError(
            f"{path}: got YAML without the package pyyaml; expected JSON, or pyyaml. Install tilerec[yaml], or write "
            "JSON."
        ) from error
    text = read_text(path, "Tables", _MOST_YAML_BYTES)
    try:
        # A few lines with nested aliases may expand to a billion items.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ConfigError(f"Tables: {path}: got an alias (*name); expected none. Write the value out.")
        nodes = [yaml.compose(text, yaml.SafeLoader)]
        for node in nodes:
            if isinstance(node, yaml.MappingNode):
                keys = [key.value for key, _ in node.value]
                twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
                if twice is not None:
                    raise ConfigError(
                        f"Tables: {path}: got the key {twice!r} twice in one mapping; expected it once. Remove one."
                    )
                nodes += [value for _, value in node.value]
            elif isinstance(node, yaml.SequenceNode):
                nodes += node.value
        return JsonValue.of(yaml.safe_load(text), f"Tables: {path}")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"Tables: {path}: got {error!s:.500}; expected valid YAML. Correct the file."
        ) from error


@dataclass(frozen=True)
class _StatisticsTable:
    """Table record that `Statistics.constraints` reads."""

    name: str
    num_embeddings: int
    feature_names: Sequence[str]


# ---------------------------------------------------------------------------------------------------------- machines


def _topology(
    path: Path | None, machine: str | None, hosts: int | None, per_host: int | None, device: str | None,
    hbm: str | None, ddr: str | None,
) -> Topology:  # fmt: skip
    caps = {
        name: _bytes(option, text)
        for name, option, text in (("hbm_cap", "--hbm", hbm), ("ddr_cap", "--ddr", ddr))
        if text is not None
    }
    if machine is not None:
        if path is not None or device == "cpu":
            other = "--device cpu" if path is None else f"--topology {path}"
            raise ConfigError(f"--machine: got {machine} and {other}; expected one of them. Leave one out.")
        return Topology.preset(machine, hosts or 1, per_host or 8, **caps)
    if path is not None:
        topology = Topology.load(path)
        if device not in (None, topology.compute_device):
            raise ConfigError(
                f"--device: got {device} with {path}; expected {topology.compute_device}, the topology's device. Leave "
                "one of them out."
            )
        topology = replace(topology, **caps, **dict.fromkeys((f"{name}s" for name in caps), None))  # type: ignore[arg-type]
        if hosts is None and per_host is None:
            return topology
        return world(topology, hosts or 1, per_host or topology.local_world_size or topology.world_size)
    if per_host is None:
        raise ConfigError(
            "Machines: got none of --machine, --ranks-per-host and --topology; expected one. Give --machine h100, or "
            "--ranks-per-host (and --hosts), or --topology with a file that tilerec calibrate wrote."
        )
    return Topology((hosts or 1) * per_host, device or "cuda", local_world_size=per_host, **caps)  # type: ignore[arg-type]


def _bytes(option: str, text: str) -> int:
    word = text.strip().lower().replace(" ", "")
    number = word.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = word[len(number) :]
    try:
        value = float(number) * _BYTES[unit]
        if not 0 <= value < 2**62:
            raise ValueError
    except (KeyError, ValueError):
        raise ConfigError(
            f"{option}: got {text!r}; expected a number of bytes. Write 80GB, 79GiB, or bytes."
        ) from None
    return int(value)


# ------------------------------------------------------------------------------------------------------------- files


def _beside(plan: Path, what: str) -> Path:
    return plan.with_name(f"{plan.stem}.{what}.json")


def _load_report(plan: Path) -> PlanReport | None:
    path = _beside(plan, "report")
    return PlanReport.load(path) if path.exists() else None


def _load_request(plan: Path) -> PlanRequest:
    path = _beside(plan, "request")
    if not path.exists():
        raise ConfigError(
            f"{path}: got no such file; expected the request that {plan} was made from. Make the plan with tilerec "
            f"plan SOURCE --out {plan}."
        )
    return PlanRequest.load(path)


def _save(plan: ShardingPlan, request: PlanRequest, out: Path) -> None:
    """Write the plan, and its report and request to files beside it."""
    plan.save(out)
    plan.report.save(_beside(out, "report"))
    write_file(_beside(out, "request"), json.dumps(request.to_json()), "Plan request")


def _with_request(report: PlanReport, plan: Path) -> PlanReport:
    """Add the request beside the plan to the report, if the file exists and belongs to the plan."""
    path = _beside(plan, "request")
    if not path.exists():
        return report
    try:
        return report.with_request(PlanRequest.load(path))
    except ConfigError as error:
        print_warning(
            f"{path}: got a request that cannot be used; reasons and suggestions are missing. {error}"
        )
        return report


def _write_page(plan: ShardingPlan, report: PlanReport, path: Path, what_ifs: bool) -> None:
    from tilerec.viz.report import write_report

    write_report(plan, report, path, what_ifs=what_ifs)


def _check_writable(option: str, path: Path | None) -> None:
    """Raise before any work if no file can be written to `path`."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ConfigError(
            f"{option}: got {path}; expected a file in an existing folder. Create {path.parent} first."
        )
    if path.is_dir():
        raise ConfigError(f"{option}: got the folder {path}; expected a file. Name a file in it.")


# ----------------------------------------------------------------------------------------------------------- printing


def _side_by_side(names: Sequence[str], reports: Sequence[PlanReport]) -> str:
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


def _plan_or_error(request: PlanRequest) -> ShardingPlan | str:
    try:
        return make_plan(request)
    except PlannerError as error:
        return str(error)


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """Print a `TilerecError` in one line and exit with status 1."""
    try:
        yield
    except TilerecError as error:
        print_error(str(error))
        raise typer.Exit(1) from None
