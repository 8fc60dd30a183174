"""The files of a plan: the plan, and its report and request beside it."""

from __future__ import annotations

import json
from pathlib import Path

from tilerec.atomic_file import write_file
from tilerec.errors import ConfigError
from tilerec.file_kind import PLAN, PLAN_PAGE, PLAN_REPORT, PLAN_REQUEST
from tilerec.output_path import Inputs, check_output, check_output_file
from tilerec.planner.report.plan_report import PlanReport
from tilerec.planner.request import PlanRequest
from tilerec.spec.plan import ShardingPlan
from tilerec.terminal import print_warning


def beside(plan: Path, what: str) -> Path:
    return plan.with_name(f"{plan.stem}.{what}.json")


def load_report(path: Path, plan: ShardingPlan, otherwise: str) -> PlanReport | None:
    """Return the report beside a plan's file; None if there is none, or (with a warning) if it is of another plan."""
    where = beside(path, "report")
    report = PlanReport.load(where) if where.exists() else None
    if report is None or report.is_of(plan):
        return report
    print_warning(
        f"{where}: got the report of another plan (this one was edited, or the report was copied); {otherwise}"
    )
    return None


def load_request(plan: Path) -> PlanRequest:
    path = beside(plan, "request")
    if not path.exists():
        raise ConfigError(
            f"{path}: got no such file; expected the request that {plan} was made from. Make the plan with tilerec "
            f"plan SOURCE --out {plan}."
        )
    return PlanRequest.load(path)


def save_plan(plan: ShardingPlan, request: PlanRequest, out: Path) -> None:
    """Write the plan, and its report and request to files beside it."""
    plan.save(out)
    plan.report.save(beside(out, "report"))
    write_file(beside(out, "request"), json.dumps(request.to_json()), "Plan request")


def with_request_beside(report: PlanReport, plan: Path) -> PlanReport:
    """Add the request beside the plan to the report, if the file exists and belongs to the plan."""
    path = beside(plan, "request")
    if not path.exists():
        return report
    try:
        return report.with_request(PlanRequest.load(path))
    except ConfigError as error:
        print_warning(f"{path}: got a request that cannot be used; reasons and suggestions are missing. {error}")
        return report


def write_page(plan: ShardingPlan, report: PlanReport, path: Path, what_ifs: bool) -> None:
    from tilerec.viz.report import write_report

    write_report(plan, report, path, what_ifs=what_ifs)


def files_of(plan: Path) -> list[Path]:
    """Return the files of a plan: the plan, its report and its request."""
    return [plan, beside(plan, "report"), beside(plan, "request")]


def check_outputs(plan: Path | None, page: Path | None, inputs: Inputs, shared: Inputs | None = None) -> None:
    """Raise before any work if the files of a plan (--out) or its page (--html) cannot be written.

    They replace files of their own kinds, and no inputs.
    """
    outputs = [] if page is None else [("--html", page, PLAN_PAGE)]
    if plan is not None:
        kinds = (PLAN, PLAN_REPORT, PLAN_REQUEST)
        outputs += [("--out", path, kind) for path, kind in zip(files_of(plan), kinds, strict=True)]
    for option, path, _ in outputs:
        check_output(option, path, inputs, shared=shared or {})
    for option, path, kind in outputs:
        check_output_file(option, path, kind)
