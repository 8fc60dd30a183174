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

from typing import Any

import typer

from tilerec.command_group import CommandGroup
from tilerec.option_file import with_config
from tilerec.plan_cli.diff import diff
from tilerec.plan_cli.make import make
from tilerec.plan_cli.show import explain_table, show
from tilerec.plan_cli.whatif import whatif


class _Commands(CommandGroup):
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

plan_app.command()(with_config(make))
plan_app.command()(with_config(show))
plan_app.command("explain")(explain_table)
plan_app.command()(diff)
plan_app.command()(with_config(whatif))
