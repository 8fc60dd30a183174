"""`tilerec plan SOURCE`: make a plan and write it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from tilerec.plan_cli.errors import exit_on_error
from tilerec.plan_cli.options import Batch, Ddr, DType, Hbm, Hosts, Html, PerHost, WhatIfs, WireFormat
from tilerec.progress import LOADING, command_phase
from tilerec.spec.gpu_presets import MACHINES
from tilerec.spec.reserved_memory import RESERVED
from tilerec.terminal import print_plain


def make(
    source: Annotated[
        str,
        typer.Argument(help="A recipe's name, module:function of yours, or a .json or .yaml list of tables."),
    ],
    data: Annotated[str | None, typer.Option(help="Path of the data, for recipes that read files.")] = None,
    topology: Annotated[Path | None, typer.Option(help="Topology file that `tilerec calibrate` wrote.")] = None,
    machine: Annotated[
        str | None, typer.Option(help=f"GPU by name, 8 per host by default: {', '.join(MACHINES)}.")
    ] = None,
    hosts: Hosts = None,
    ranks_per_host: PerHost = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: cuda, or the topology's.")] = None,
    hbm: Hbm = None,
    ddr: Ddr = None,
    batch_size: Batch = None,
    dtype: DType = None,
    wire: WireFormat = None,
    optimizer: Annotated[
        str | None,
        typer.Option(help="Optimizer of listed tables that name none: SGD, RowWiseAdagrad, Adam, …"),
    ] = None,
    stats: Annotated[Path | None, typer.Option(help="Statistics of the ids, written by `tilerec stats`.")] = None,
    fixed: Annotated[Path | None, typer.Option(help="Plan of some tables, whose shardings are kept unchanged.")] = None,
    reserve: Annotated[float, typer.Option(help="Fraction of the memory that tables may not use.")] = RESERVED,
    cache: Annotated[Path | None, typer.Option(help="Folder that caches plans by their inputs.")] = None,
    effort: Annotated[int, typer.Option(help="Search effort: each step doubles the search.", min=1)] = 1,
    out: Annotated[Path, typer.Option(help="The plan's file.")] = Path("plan.json"),
    html: Html = None,
    what_ifs: WhatIfs = True,
) -> None:
    """Make a plan and write it."""
    with command_phase(LOADING):
        from tilerec.plan_cli.machines import topology_of
        from tilerec.plan_cli.plan_files import check_outputs, save_plan, write_page
        from tilerec.plan_cli.sources import TABLE_FILES, file_source, recipe_source, with_statistics
        from tilerec.planner.planner import EmbeddingShardingPlanner
        from tilerec.planner.report.variation import with_changes
        from tilerec.planner.reservation import HeuristicalStorageReservation

    with exit_on_error():
        began = time.perf_counter()
        given = {"SOURCE": source if source.endswith(TABLE_FILES) else "", "--topology": topology, "--stats": stats}
        given["--fixed"] = fixed
        inputs = {role: [path] for role, path in given.items() if path}
        check_outputs(out, html, inputs, shared={"--data": [data or ""]})
        world = topology_of(topology, machine, hosts, ranks_per_host, device, hbm, ddr)
        with command_phase(f"read the tables of {source}"):
            origin = (
                file_source(Path(source), optimizer)
                if source.endswith(TABLE_FILES)
                else recipe_source(source, data, optimizer, world)
            )
            constraints = origin.constraints if stats is None else with_statistics(origin, stats)
        planner = EmbeddingShardingPlanner(
            world,
            batch_size or origin.batch_size,
            storage_reservation=HeuristicalStorageReservation(reserve),
            constraints=constraints,
            fixed=fixed,
            cache=cache,
            effort=effort,
        )
        with command_phase("plan"):
            request = with_changes(planner.request(origin.module or origin.tables), data_type=dtype, wire=wire)
            plan = planner.make(request)
        seconds = time.perf_counter() - began
        report = plan.report.with_request(request)
        try:
            save_plan(plan, request, out)
        finally:
            # Print the report even if a file cannot be written (the disk may be full). Write first: what-ifs take time.
            with command_phase("plan what would help"):
                text = report.text(what_would_help=what_ifs)
            print_plain(text)
        if html is not None:
            write_page(plan, report, html, what_ifs)
        written = f"{out}" if html is None else f"{out} and {html}"
        print_plain(f"\nplanned in {seconds:.2f} s; wrote {written}")
