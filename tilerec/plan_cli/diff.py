"""`tilerec plan diff`: the differences of two plans, and of their reports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilerec.plan_cli.errors import exit_on_error
from tilerec.terminal import print_plain


def diff(
    first: Annotated[Path, typer.Argument(help="A plan's file.")],
    second: Annotated[Path, typer.Argument(help="Another plan's file.")],
) -> None:
    """Show the differences of two plans, and the bytes that move from one to the other."""
    from tilerec.plan_cli.comparison import side_by_side
    from tilerec.plan_cli.plan_files import load_report
    from tilerec.planner.report.plan_diff import plan_diff
    from tilerec.spec.plan import ShardingPlan

    with exit_on_error():
        plans = [ShardingPlan.load(path) for path in (first, second)]
        found = plan_diff(*plans)
        paths = (first, second)
        found_reports = (
            load_report(path, plan, "no reports are compared.") for path, plan in zip(paths, plans, strict=True)
        )
        reports = [report for report in found_reports if report is not None]
        if len(reports) == len(paths):
            print_plain(side_by_side([str(path) for path in paths], reports) + "\n")
        print_plain(str(found))
