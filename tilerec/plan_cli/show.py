"""`tilerec plan show` and `tilerec plan explain`: a plan, and the options of one of its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilerec.errors import ConfigError
from tilerec.plan_cli.errors import exit_on_error
from tilerec.plan_cli.options import Html, PlanFile, WhatIfs
from tilerec.progress import command_phase
from tilerec.terminal import print_plain, print_warning


def show(
    plan: Annotated[Path, typer.Argument(help="A plan's file.")] = Path("plan.json"),
    tables: Annotated[bool, typer.Option("--tables", help="Print the placement of every table.")] = False,
    request: Annotated[
        Path | None,
        typer.Option(help="Estimate the plan's cost for this request: tables, machines and batch."),
    ] = None,
    html: Html = None,
    what_ifs: WhatIfs = True,
) -> None:
    """Show a plan: cost, bound, bottleneck, suggestions, stages, memory, the most expensive tables."""
    from tilerec.plan_cli.plan_files import (
        beside,
        check_outputs,
        files_of,
        load_report,
        with_request_beside,
        write_page,
    )
    from tilerec.planner.plan_price import price_plan
    from tilerec.planner.request import PlanRequest
    from tilerec.spec.plan import ShardingPlan

    with exit_on_error():
        check_outputs(None, html, {"PLAN": files_of(plan), "--request": [request or ""]})
        found = ShardingPlan.load(plan)
        report = load_report(plan, found, "it is not shown. Plan again.")
        if request is not None:
            report = None  # the report beside the plan may be for other machines
        if html is not None and report is None:
            why = "the report of another plan" if beside(plan, "report").exists() else "no such file"
            raise ConfigError(
                f"{beside(plan, 'report')}: got {why}; expected the report of {plan}, which --html draws. Plan again."
            )
        if tables or report is None:
            print_plain(str(found))
        if report is not None:
            report = with_request_beside(report, plan)
            with command_phase("plan what would help"):
                text = report.text(what_would_help=what_ifs)
            print_plain(("\n" if tables else "") + text)
            if html is not None:
                write_page(found, report, html, what_ifs)
            return
        if not beside(plan, "report").exists():
            print_plain(f"\nno report: {beside(plan, 'report')} does not exist; `tilerec plan SOURCE` writes one")
        by = request or beside(plan, "request")
        if by.exists() or request is not None:
            print_plain(f"\n{price_plan(PlanRequest.load(by), found)}")


def explain_table(
    table: Annotated[str, typer.Argument(help="A table's name, or module.name.")],
    plan: PlanFile = Path("plan.json"),
) -> None:
    """Show each sharding of a table that was considered, its cost, and why one was chosen."""
    from tilerec.plan_cli.plan_files import load_request
    from tilerec.planner.report.explanation import explain
    from tilerec.spec.plan import ShardingPlan

    with exit_on_error():
        found = explain(load_request(plan), table)
        if plan.exists() and not found.is_in(ShardingPlan.load(plan)):
            print_warning(
                f"{plan}: got another placement of '{found.table}' than its request gives (the plan was edited, or "
                "another release made it). The explanation is of the placement that the request gives."
            )
        print_plain(str(found))
