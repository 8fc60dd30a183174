"""`WhatIf`: the step time of a new plan after one change of the request; and the changes that a report tries.

    request  ──varied──►  request with one change  ──decide──►  seconds of a step, or no plan

Changes are compared by time per sample, so that larger batches and more ranks are comparable with the original. Each
what-if is a separate search. For problems of more than `LARGE` tables x ranks, `FEW` changes are tried, in device
memory only, as a search over host memory takes minutes there. The other changes are listed as left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tilerec.errors import ConfigError
from tilerec.planner.constraints import FREE_PLACEMENT
from tilerec.planner.decision import decide
from tilerec.planner.report.variation import with_changes
from tilerec.planner.request import PlanRequest
from tilerec.planner.table_limits import may_offload
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.plan_table import bytes_text
from tilerec.spec.table import DataType

LARGE = 1 << 19
"""Tables x ranks. On one core of an AMD EPYC, 10,000 tables on 128 ranks take 2 s for one search in device memory."""
FEW = 3
NO_GAIN = 0.005
"""Part of the time per sample. A smaller gain is reported as no gain, as plans differ by as much within their gaps."""
LEFT_OUT = "left out for a problem of this size: try tilerec plan whatif"
FULL = 0.9
"""Part of a rank's memory. If the plan uses more, a change with more memory is tried."""


@dataclass(frozen=True)
class WhatIf:
    """One change of a request, and its effect on the step time.

    Args:
        change: description of the change.
        how: options or code with which the user can make the change.
        step_ps: time of a step after the change; None if there is no plan, or if the change was not tried.
        gain: saved part of the time per sample, over all ranks; negative if the change costs time, 0.0 if `step_ps`
            is None.
        per_sample: True if the change alters the number of samples per step, so that `gain` is not a part of the step.
        trouble: reason why `step_ps` is None.
    """

    change: str
    how: str
    step_ps: int | None
    gain: float
    per_sample: bool = False
    trouble: str = ""

    @property
    def outcome(self) -> str:
        """ "12.3 % of the step", "12.3 % per sample", "no gain", or why there is no figure."""
        if self.step_ps is None:
            return self.trouble
        if self.gain < NO_GAIN:
            return "no gain"
        return f"{100 * self.gain:.1f} % {'per sample' if self.per_sample else 'of the step'}"


def what_ifs(request: PlanRequest, step_ps: int, fullest: float = 0.0, cached: bool = False) -> tuple[WhatIf, ...]:
    """Make a plan for each change that applies to a request; return the largest gain first, changes without plan last.

    Args:
        request: the request of the plan.
        step_ps: time of its step.
        fullest: part of its memory that the plan uses on the fullest rank.
        cached: True if the plan has rows in host memory behind caches.
    """
    large = len(request.tables) * request.topology.world_size > LARGE
    tried = (0 if cached else FEW) if large else None
    found = []
    for number, change in enumerate(_changes(request, fullest)):
        if tried is None or number < tried:
            found.append(change.planned(request, step_ps, large))
        else:
            found.append(replace(change.without_plan, trouble=LEFT_OUT))
    return tuple(sorted(found, key=lambda one: (one.step_ps is None, -one.gain)))


@dataclass(frozen=True)
class _Change:
    what: str
    how: str
    made: Callable[[], PlanRequest]
    per_sample: bool = False

    @property
    def without_plan(self) -> WhatIf:
        return WhatIf(self.what, self.how, None, 0.0, self.per_sample)

    def planned(self, request: PlanRequest, step_ps: int, on_device: bool) -> WhatIf:
        try:
            then = self.made()
            decision = decide(_on_device(then) if on_device else then)
        except ConfigError as error:
            return replace(self.without_plan, trouble=f"not possible: {error}")
        if decision.priced is None:
            where = "device memory alone" if on_device and may_offload(then) else "the memory there is"
            return replace(self.without_plan, trouble=f"no plan within {where}")
        cost = decision.priced.cost_ps
        samples = (then.batch_size * then.topology.world_size) / (request.batch_size * request.topology.world_size)
        gain = 1.0 - cost / samples / step_ps if step_ps else 0.0
        return replace(self.without_plan, step_ps=cost, gain=gain)


def _changes(request: PlanRequest, fullest: float) -> Iterator[_Change]:
    """Yield the changes that have an effect on a request, the most useful first."""
    topology = request.topology
    exact = [table for table in request.tables if table.wire is None or not table.wire.rounds]
    if topology.world_size > 1 and exact:
        yield _Change(
            "bf16 on the wire",
            "QCommsConfig(CommType.BF16, CommType.BF16) in the sharders; --wire bf16",
            lambda: with_changes(request, wire="bf16"),
        )
    wide = [table.key for table in request.tables if table.data_type is DataType.FP32]
    if wide:
        yield _Change(
            f"bf16 rows in {_tables(len(wide))}",
            "data_type=DataType.BF16 in the tables' configs; --dtype bf16",
            lambda: request.with_tables(wide, data_type=DataType.BF16),
        )
    yield _Change(
        f"twice the batch, {2 * request.batch_size:,} samples of a rank",
        f"--batch-size {2 * request.batch_size}",
        lambda: with_changes(request, batch_size=2 * request.batch_size),
        per_sample=True,
    )
    if topology.local_world_size is not None and topology.hbm_caps is None and topology.ddr_caps is None:
        hosts = topology.host_count + 1
        yield _Change(
            f"one more host, {hosts} x {topology.local_world_size} ranks",
            f"--hosts {hosts}",
            lambda: with_changes(request, hosts=hosts),
            per_sample=True,
        )
    bare = [table.key for table in request.tables if table.trained and table.optimizer is None]
    if bare:
        yield _Change(
            f"an optimizer in the backward pass for {_tables(len(bare))}",
            "apply_optimizer_in_backward(RowWiseAdagrad, ...)",
            lambda: request.with_tables(bare, optimizer=RowWiseAdagrad()),
        )
    if fullest > FULL and topology.hbm_caps is None and topology.ddr_caps is None:
        cap, name = 2 * topology.memory_cap, "ddr" if topology.compute_device == "cpu" else "hbm"
        yield _Change(
            f"twice the memory, {bytes_text(cap)} of a rank",
            f"--{name} {cap / 2**30:g}GiB",
            lambda: with_changes(request, **{f"{name}_cap": cap}),  # type: ignore[arg-type]
        )
    free = {**FREE_PLACEMENT, "with_table": None, "min_partition": None, "sharding": None}
    bound = [key for key, limits in request.constraints.items() if replace(limits, **free) != limits]
    if bound:
        yield _Change(
            f"no constraints on the placement of {_tables(len(bound))}",
            "leave out sharding_types, ranks, hosts, max_ranks, with_table, min_partition and pins",
            lambda: request.with_constraints(bound, **free),
        )


def _on_device(request: PlanRequest) -> PlanRequest:
    """Return the request with tables kept in device memory, unless constraints choose the memory of their rows."""
    if not may_offload(request):
        return request
    limits = {t.key: request.limits_of(t.key) for t in request.tables if t.cached is None}
    free = (key for key, own in limits.items() if not own.kernels_allowed() and own.sharding is None)
    return request.with_constraints(free, enforce_hbm=True)


def _tables(count: int) -> str:
    return f"{count:,} table{'s' * (count != 1)}"
