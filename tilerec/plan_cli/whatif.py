"""`tilerec plan whatif`: the plan of the same tables with other machines, batches or formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilerec.plan_cli.errors import exit_on_error
from tilerec.plan_cli.options import Batch, Ddr, DType, Hbm, Hosts, PerHost, PlanFile, WireFormat
from tilerec.progress import LOADING, command_phase
from tilerec.terminal import print_plain


def whatif(
    plan: PlanFile = Path("plan.json"),
    hosts: Hosts = None,
    ranks_per_host: PerHost = None,
    hbm: Hbm = None,
    ddr: Ddr = None,
    batch_size: Batch = None,
    dtype: DType = None,
    wire: WireFormat = None,
    out: Annotated[Path | None, typer.Option(help="Write the varied plan to this file.")] = None,
) -> None:
    """Plan again with other machines, batches, data types or wire formats, and compare."""
    with command_phase(LOADING):
        from tilerec.plan_cli.comparison import side_by_side
        from tilerec.plan_cli.plan_files import check_outputs, files_of, load_request, save_plan
        from tilerec.planner.make_plan import make_plan
        from tilerec.planner.planner_error import PlannerError
        from tilerec.planner.report.variation import with_changes
        from tilerec.spec.byte_text import bytes_of

    with exit_on_error():
        check_outputs(out, None, {"--plan": files_of(plan)})
        request = load_request(plan)
        other = with_changes(
            request,
            hosts=hosts,
            ranks_per_host=ranks_per_host,
            hbm_cap=None if hbm is None else bytes_of("--hbm", hbm),
            ddr_cap=None if ddr is None else bytes_of("--ddr", ddr),
            batch_size=batch_size,
            data_type=dtype,
            wire=wire,
        )
        with command_phase("plan with the changes"):
            then = make_plan(other)
        try:
            with command_phase("plan without them"):
                now = make_plan(request)
            text = side_by_side(["now", "then"], [now.report, then.report])
        except PlannerError as error:
            text = f"now: {error}\n\n{then.report}"
        print_plain(text)
        if out is not None:
            save_plan(then, other, out)
