"""`tilerec plan diff`: the differences of two plans."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilerec.plan_cli.errors import exit_on_error
from tilerec.plan_cli.plan_files import beside, load_report
from tilerec.plan_cli.side_by_side import side_by_side
from tilerec.planner.report.plan_diff import plan_diff
from tilerec.spec.plan import ShardingPlan
from tilerec.terminal import print_plain, print_warning


def diff(
    first: Annotated[Path, typer.Argument(help="A plan's file.")],
    second: Annotated[Path, typer.Argument(help="Another plan's file.")],
) -> None:
    """Show the differences of two plans, and the bytes that move from one to the other."""
    with exit_on_error():
        plans = [ShardingPlan.load(path) for path in (first, second)]
        found = plan_diff(*plans)
        reports = [load_report(path) for path in (first, second)]
        for path, plan, report in zip((first, second), plans, reports, strict=True):
            if report is not None and not report.is_of(plan):
                print_warning(
                    f"{beside(path, 'report')}: got the report of another plan (this one was edited, or the report "
                    "was copied); no reports are compared."
                )
                reports = [None, None]
        if reports[0] is not None and reports[1] is not None:
            print_plain(side_by_side([str(first), str(second)], [reports[0], reports[1]]) + "\n")
        print_plain(str(found))
