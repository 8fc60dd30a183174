"""`make_plan`: the plan of a request, with its report."""

from __future__ import annotations

from dataclasses import replace

from tilerec.gc_paused import gc_paused
from tilerec.planner.decision import decide
from tilerec.planner.planner_error import planner_error_of
from tilerec.planner.report.report_builder import build_report
from tilerec.planner.request import PlanRequest
from tilerec.spec.plan import ShardingPlan


@gc_paused()
def make_plan(request: PlanRequest) -> ShardingPlan:
    """Return the plan of a request, with its report.

    Raises:
        PlannerError: no plan fits the memory of every rank, or none was found.
        ConfigError: constraints leave a table without options.
    """
    decision = decide(request)
    if not decision.found:
        raise planner_error_of(decision)
    plan = decision.plan()
    return replace(plan, report=build_report(decision, plan))
