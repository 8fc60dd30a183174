"""Checks of the planner on random instances, against an independent implementation of the price.

    python benchmarks/planner_check.py [--count 500] [--seed 0] [--kind NAME ...] [--check NAME ...]

CHECKS lists the checked properties. Instances of the kinds "small", "small_plain" and "infeasible" are also compared
with all arrangements: every option of every table on every combination of ranks. The independent price
(`planner_check_price.py`) shares no code with the planner's. The script counts violations by check, and lists the
simplest ones with commands that run them alone. The exit status is 1 if there are violations.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
from planner_check_arrangements import Arrangements
from planner_check_cases import KINDS, SMALL_KINDS, Case, case_of
from planner_check_planned import Planned, over_cap, tiling_of, wrong_cover

from tilerec.errors import ConfigError
from tilerec.planner.plan_price import price_plan
from tilerec.planner.report.plan_report import PlanReport
from tilerec.planner.report.variation import with_changes
from tilerec.planner.request import PlanRequest
from tilerec.planner.table_limits import may_offload
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.table import DataType
from tilerec.spec.topology import Topology
from tilerec.testing import run_virtual_ranks

CLOSE = 1e-6  # of a step
MOST_ARRANGEMENTS = 40_000
FEW = 4  # tables x ranks of cases that each rank of two groups plans
MANY = 32  # ranks of a remedy beyond which its memory is not priced
SMALL = 64  # tables x ranks of cases that are planned again in other ways


@dataclass(frozen=True)
class Violation:
    """A failed check. factor: error relative to the correct number; 0 if the check has no number."""

    check: str
    case: Case
    text: str
    factor: float = 0.0


@dataclass
class Result:
    """A checked case.

    Args:
        outcome: "planned", "no plan" or "refused" (the request contradicts itself).
        above: relative distance of the plan above the best arrangement, by the independent price; None if unknown.
        above_walk: relative distance above the end of a downhill walk from the plan; None if unknown.
        gap: relative distance above the bound; None if unknown.
    """

    case: Case
    violations: list[Violation]
    outcome: str
    above: float | None = None
    above_walk: float | None = None
    gap: float | None = None


# ------------------------------------------------------------------------------------------------ of a plan


def check_cover(case: Case, planned: Planned) -> Iterator[Violation]:
    """Check that tiles cover each table exactly once, on ranks of the world, as constraints allow."""
    for text in wrong_cover(planned):
        yield Violation("cover", case, text)


def check_memory(case: Case, planned: Planned) -> Iterator[Violation]:
    """Check that computed and reserved bytes are within the cap of every rank, in both memories."""
    found = over_cap(planned)
    if found is not None:
        yield Violation("memory", case, *found)


def check_price(case: Case, planned: Planned) -> Iterator[Violation]:
    """Check that the planner's `price` of the plan equals the independent price."""
    assert planned.plan is not None
    priced, own = price_plan(planned.request, planned.plan), planned.price
    found = priced.price
    if _differ(found.seconds, own.seconds):
        stages = [
            f"{name} {own.stages[name].max():.6g} -> {seconds.max():.6g}"
            for name, seconds in found.stages.items()
            if name in own.stages and abs(seconds.max() - own.stages[name].max()) > CLOSE * own.seconds
        ]
        text = f"price() is {found.seconds:.9g} s, the own price {own.seconds:.9g} s ({', '.join(stages)})"
        yield Violation("price", case, text, found.seconds / own.seconds - 1.0)
    off = float(np.abs(found.memory - own.memory).max())
    if off > own.pieces:
        yield Violation("price memory", case, f"price() has {off:,.0f} bytes more or less", off / own.memory.max())


def check_report(case: Case, planned: Planned) -> Iterator[Violation]:
    """Check that seconds, stages and bytes of the report equal those of the independent price."""
    report, own = planned.report, planned.price
    if _differ(report.cost_s, own.seconds):
        text = f"the report has {report.cost_s:.9g} s, the own price {own.seconds:.9g} s"
        yield Violation("report", case, text, report.cost_s / own.seconds - 1.0)
    worst, name = 0.0, ""
    for s, stage in enumerate(report.stages):
        found, wanted = report.load_ps[:, s] / 1e12, own.stages.get(stage, np.zeros(planned.world.ranks))
        if s == 0:
            # Fixed costs of collectives may be counted with the first stage.
            found = found - found.max() + wanted.max()
        off = float(np.abs(found - wanted).max())
        if off > worst:
            worst, name = off, stage
    if worst > CLOSE * own.seconds:
        text = f"stage '{name}' is {worst:.3g} s off on a rank, of a step of {own.seconds:.3g} s"
        yield Violation("report stages", case, text, worst / own.seconds)
    memory = own.memory.copy()
    memory[:, planned.world.tier] += planned.reserved
    off = np.abs(report.memory - memory).max(1)
    if off.max() > own.pieces:
        rank = int(off.argmax())
        sizes = [round(size) for size in memory[rank].tolist()]
        text = f"the report has {report.memory[rank].tolist()} bytes of rank {rank}, the own price {sizes}"
        yield Violation("report memory", case, text, float(off[rank]) / max(sizes))


def check_bound(case: Case, planned: Planned) -> Iterator[Violation]:
    """Check that the bound is not above the plan's price."""
    bound, own = planned.report.bound_s, planned.price.seconds
    if bound > own * (1.0 + CLOSE):
        text = f"the bound is {bound:.9g} s, and the plan takes {own:.9g} s"
        yield Violation("bound", case, text, bound / own - 1.0)


# ------------------------------------------------------------------------------------------------ planned again

_PLACEMENT = {
    "sharding_types": None, "forbidden_types": (), "ranks": None, "hosts": None, "max_ranks": None, "with_table": None,
    "min_partition": None, "sharding": None,
}  # fmt: skip


def check_pins(case: Case, planned: Planned) -> Iterator[Violation]:
    """Check that the plan, given as pins, results in the same plan at the same price."""
    constraints = {key: replace(limits, **_PLACEMENT) for key, limits in case.constraints.items()}
    try:
        again = case.planner(fixed=planned.plan, constraints=constraints).plan(list(case.tables))
    except ConfigError as error:
        yield Violation("pins", case, f"the plan was refused as fixed=: {_line(error)}")
        return
    assert planned.plan is not None
    for path, name, sharding in again.tables():
        if tiling_of(sharding) != tiling_of(planned.plan.plan[path][name]):
            yield Violation("pins", case, f"'{name}' moved though it was pinned")
    report, first = again.report, planned.report
    assert isinstance(report, PlanReport)
    if _differ(report.cost_s, first.cost_s):
        text = f"{report.cost_s:.9g} s as pins, {first.cost_s:.9g} s as planned"
        yield Violation("pins price", case, text, report.cost_s / first.cost_s - 1.0)
    off = int(np.abs(report.memory - first.memory).max())
    if off > planned.price.pieces:
        yield Violation("pins memory", case, f"{off:,} bytes more or less as pins", off / int(first.memory.max()))


def check_order(case: Case, planned: Planned) -> Iterator[Violation]:
    """Check that the same tables in another order get the same plan."""
    other = _plan_of(replace(planned.request, tables=planned.request.tables[::-1]))
    if other != (None if planned.plan is None else dict(planned.placed)):
        yield Violation("order", case, "the same tables in another order get another plan")


def check_file(case: Case, planned: Planned) -> Iterator[Violation]:
    """Check that the plan and its report are unchanged after writing and reading."""
    assert planned.plan is not None
    read = ShardingPlan.from_json(json.loads(json.dumps(planned.plan.to_json())))
    if read != planned.plan:
        yield Violation("file", case, "the plan differs from what its file gives")
    report = planned.report.to_json()
    if PlanReport.from_json(json.loads(json.dumps(report))).to_json() != report:
        yield Violation("file", case, "the report differs from what its file gives")


def check_group(case: Case, planned: Planned) -> Iterator[Violation]:
    """Check that the ranks of two sharding groups together get the same plan as one group alone."""
    planner, tables = case.planner(), list(case.tables)
    plans = run_virtual_ranks(2 * planned.world.ranks, lambda group: planner.collective_plan(tables, pg=group))
    if any(plan != planned.plan for plan in plans):
        yield Violation("group", case, "collective_plan gives another plan than plan")


def check_what_if(case: Case, planned: Planned) -> Iterator[Violation]:
    """Check that a varied request equals the request of the varied case, and gets its plan."""
    topology, cap = case.topology, "ddr_cap" if case.topology.compute_device == "cpu" else "hbm_cap"
    more = 2 * topology.memory_cap
    ways: list[tuple[dict[str, Any], Callable[[], Case]]] = [
        ({"batch_size": 2 * case.batch_size}, lambda: replace(case, batch_size=2 * case.batch_size)),
        ({cap: more}, lambda: replace(case, topology=replace(topology, **{cap: more, f"{cap}s": None}))),
        (
            {"data_type": "bf16"},
            lambda: replace(case, tables=tuple(replace(t, data_type=DataType.BF16) for t in case.tables)),
        ),
    ]
    if topology.hbm_caps is None and topology.ddr_caps is None:
        ways.append(({"hosts": 2, "ranks_per_host": 2}, lambda: replace(case, topology=_two_by_two(topology))))
    what, other = ways[case.seed % len(ways)]
    first, second = (
        _request(lambda: with_changes(planned.request, **what)),
        _request(lambda: other().request()),
    )
    if isinstance(first, str) or isinstance(second, str):
        if not (isinstance(first, str) and isinstance(second, str)):
            which, error = ("what-if", first) if isinstance(first, str) else ("planning it", second)
            yield Violation("what-if", case, f"{what}: {which} raises, the other does not: {error}")
        return
    if first.digest() != second.digest():
        one, two = first.to_json(), second.to_json()
        differ = {key: (one[key], two[key]) for key in one if one[key] != two[key]}
        yield Violation("what-if", case, f"{what} gives another request than planning it: {str(differ)[:200]}")
    elif _plan_of(first) != _plan_of(second):
        yield Violation("what-if", case, f"{what}: one request got two plans")


def check_remedies(case: Case, planned: Planned) -> Iterator[Violation]:
    """Check that each remedy of a `PlannerError` gives a plan that covers its tables within memory."""
    assert planned.error is not None
    for remedy in planned.error.remedies:
        again = Planned(remedy.request)
        if again.plan is None:
            yield Violation("remedies", case, f"'{remedy.text}' gives no plan")
            continue
        for text in wrong_cover(again):
            yield Violation("remedies", case, f"'{remedy.text}': {text}")
        # The independent price loops over every home of every part, which is slow for many ranks.
        over = over_cap(again) if again.world.ranks <= MANY else None
        if over is not None:
            yield Violation("remedies memory", case, f"'{remedy.text}': {over[0]}", over[1])


# ------------------------------------------------------------------------------------------------ all arrangements


def check_all(case: Case, planned: Planned, result: Result) -> Iterator[Violation]:
    """Check that the bound is not above the best arrangement; without a plan, that no arrangement fits."""
    if any(limits.with_table is not None for limits in planned.request.constraints.values()):
        return
    best = None
    for offload in (False, True)[: 1 + may_offload(planned.request)]:
        arrangements = Arrangements(planned, offload)
        if arrangements.count > MOST_ARRANGEMENTS:
            return
        best = best or arrangements.best()
    if planned.plan is None:
        assert planned.error is not None
        if best is not None:
            fits = "; ".join(", ".join(str(tile) for tile in placed.tiling.tiles()[:4]) for placed in best[1])
            what = "no plan exists" if planned.error.proved else "no plan was found"
            yield Violation("infeasible" if planned.error.proved else "missed", case, f"{what}, and this fits: {fits}")
        return
    if best is None:
        return  # only uneven ranges of rows fit
    own, bound = planned.price.seconds, planned.report.bound_s
    least = min(best[0], own)  # a plan may have uneven ranges of rows, which the arrangements do not contain
    result.above = own / least - 1.0
    if bound > least * (1.0 + CLOSE):
        text = f"the bound is {bound:.9g} s, and the best of all arrangements takes {least:.9g} s"
        yield Violation("bound of all", case, text, bound / least - 1.0)


def check_downhill(case: Case, planned: Planned, result: Result) -> Iterator[Violation]:
    """Check that the bound is not above an arrangement found by a downhill walk from the plan."""
    constraints = planned.request.constraints.values()
    if any(limits.with_table is not None for limits in constraints):
        return
    offload = any(planned.in_host_memory(table.key) for table in planned.tables)
    least = Arrangements(planned, offload, random.Random(case.seed)).downhill()
    bound = planned.report.bound_s
    result.above_walk = planned.price.seconds / least - 1.0
    if bound > least * (1.0 + CLOSE):
        text = f"the bound is {bound:.9g} s, and a walk downhill from the plan finds {least:.9g} s"
        yield Violation("bound downhill", case, text, bound / least - 1.0)


# ------------------------------------------------------------------------------------------------ a case

_OF_A_PLAN = MappingProxyType(
    {
        "cover": check_cover,
        "memory": check_memory,
        "price": check_price,
        "report": check_report,
        "bound": check_bound,
        "pins": check_pins,
        "order": check_order,
        "file": check_file,
        "group": check_group,
        "what-if": check_what_if,
    }
)
CHECKS: Mapping[str, str] = MappingProxyType(
    {
        **{name: str(check.__doc__).strip() for name, check in _OF_A_PLAN.items()},
        "remedies": str(check_remedies.__doc__).strip(),
        "all": str(check_all.__doc__).strip(),
        "downhill": str(check_downhill.__doc__).strip(),
    }
)
"""Every check and what must hold."""


def check(case: Case, only: Sequence[str] = ()) -> Result:
    """Plan a case and run the checks.

    Args:
        only: names of the checks to run; () for all.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            planned = Planned(case.request())
        except ConfigError:
            return Result(case, [], "refused")
        result = Result(case, [], "no plan" if planned.plan is None else "planned")
        skipped = set() if case.size <= SMALL else {"order", "what-if", "group", "downhill"}
        skipped |= set() if case.kind == "groups2d" and case.size <= FEW else {"group"}
        skipped |= {"downhill"} if case.kind in SMALL_KINDS else {"all"}
        for name in CHECKS:
            if name in skipped or name not in (only or CHECKS):
                continue
            try:
                if name == "all":
                    result.violations += check_all(case, planned, result)
                elif name == "downhill" and planned.plan is not None:
                    result.violations += check_downhill(case, planned, result)
                elif name == "remedies" and planned.plan is None:
                    result.violations += check_remedies(case, planned)
                elif name in _OF_A_PLAN and planned.plan is not None:
                    result.violations += _OF_A_PLAN[name](case, planned)
            except Exception as error:
                result.violations.append(Violation("crash", case, f"{name}: {type(error).__name__}: {_line(error)}"))
        if planned.plan is not None and planned.report.bound_s:
            result.gap = planned.price.seconds / planned.report.bound_s - 1.0
        return result


def _differ(found: float, wanted: float) -> bool:
    return abs(found - wanted) > CLOSE * wanted


def _line(error: Exception) -> str:
    return str(error).replace("\n", " ")[:300]


def _request(make: Callable[[], PlanRequest]) -> PlanRequest | str:
    """Return the request of a case, or the message of the error that building it raised."""
    try:
        return make()
    except ConfigError as error:
        return _line(error)


def _plan_of(request: PlanRequest) -> Any:
    """Return shardings by table; None if there is no plan; the message if the request raised an error."""
    try:
        planned = Planned(request)
    except ConfigError as error:
        return _line(error)
    return None if planned.plan is None else dict(planned.placed)


def _two_by_two(topology: Topology) -> Topology:
    """Return a topology of two hosts of two ranks, with the speeds of the given one."""
    return replace(topology, world_size=4, local_world_size=2, hosts=[[0, 1], [2, 3]])


# ------------------------------------------------------------------------------------------------ the command


def summary(results: Sequence[Result], show: int = 3) -> str:
    """Return counts by outcome and check, and the simplest violations of each check."""
    outcomes = Counter(result.outcome for result in results)
    lines = [f"{len(results)} cases: " + ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))]
    for field, what in (
        ("above", "the best of all arrangements"), ("above_walk", "the end of a walk downhill"), ("gap", "their bounds")
    ):  # fmt: skip
        parts = [(part, r.case.once) for r in results if (part := getattr(r, field)) is not None]
        if parts:
            equal, median = (
                sum(part <= CLOSE for part, _ in parts),
                statistics.median(part for part, _ in parts),
            )
            worst, once = max(parts)
            lines.append(
                f"{len(parts)} plans beside {what}: {equal} at it, median {100 * median:.2f} % above, worst "
                f"{100 * worst:.1f} % ({once})"
            )
    by_check: defaultdict[str, list[Violation]] = defaultdict(list)
    for result in results:
        for violation in result.violations:
            by_check[violation.check].append(violation)
    for name, violations in sorted(by_check.items(), key=lambda item: -len(item[1])):
        cases = {(v.case.kind, v.case.seed) for v in violations}
        worst_one = max(violations, key=lambda v: abs(v.factor))
        worst_text = f", worst {100 * worst_one.factor:+.3g} % ({worst_one.case.once})" if worst_one.factor else ""
        lines.append(f"\n{name}: {len(cases)} cases{worst_text}")
        for violation in sorted(violations, key=lambda v: v.case.size)[:show]:
            lines += [f"  {violation.case.once}", f"    {violation.text}"]
    return "\n".join(lines if by_check else [*lines, "no violations"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500, help="how many cases, of each kind in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the first case of each kind")
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=[], help="kinds of cases; all if left out")
    parser.add_argument("--check", nargs="*", choices=list(CHECKS), default=[], help="all if left out")
    parser.add_argument("--show", type=int, default=3, help="violations to list of each check")
    given = parser.parse_args()
    kinds, begun = given.kind or list(KINDS), time.perf_counter()
    results: list[Result] = []
    try:
        for i in range(given.count):
            case = case_of(kinds[i % len(kinds)], given.seed + i // len(kinds))
            results.append(check(case, given.check))
            live = sys.stderr.isatty()
            if live or (i + 1) % 25 == 0 or i + 1 == given.count:
                broken, took = sum(bool(r.violations) for r in results), time.perf_counter() - begun
                text = f"{i + 1}/{given.count} cases, {broken} with violations, {took:.0f} s"
                print(text, end="\r" if live else "\n", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
    print("\n" + summary(results, given.show))
    return int(any(result.violations for result in results))


if __name__ == "__main__":
    sys.exit(main())
