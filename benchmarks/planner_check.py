"""Does the planner keep its word? Random instances, each checked against a price computed a second time.

    python benchmarks/planner_check.py [--count 500] [--seed 0] [--kind NAME ...] [--check NAME ...]

Every instance is planned; CHECKS names what must hold. Instances of the kinds "small", "small_plain" and "infeasible" are
also compared with all arrangements: every option of every table on every combination of ranks. The own price
(`planner_check_price.py`) shares no code with the planner's. Violations are counted by check and listed with the
command that runs each case alone; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from planner_check_cases import KINDS, Case, case_of
from planner_check_price import Price, Pricing, Sums, Table, World, table_of

from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.price import price as planners_price
from tilerec.planner.cost.ways import Limits, Option, Way, enumerate_options, is_of
from tilerec.planner.cost.workload import Workload
from tilerec.planner.infeasible import PlannerError
from tilerec.planner.planner import make_plan
from tilerec.planner.report import PlanReport
from tilerec.planner.request import PlanRequest
from tilerec.planner.variation import varied
from tilerec.sharding.strategies import column_wise, grid, row_wise
from tilerec.spec.plan import (
    HOST_KERNELS,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
)
from tilerec.spec.speeds import Speeds
from tilerec.spec.tile import Block, Tiling
from tilerec.spec.topology import Topology

DEFINITION = "new" if "duplex" in {f.name for f in fields(Speeds)} else "old"
CLOSE = 1e-6  # of a step
MOST_ARRANGEMENTS = 40_000
FEW_TABLES = 12  # of cases that are planned again in other ways
Placed = Mapping[str, ParameterSharding]


@dataclass(frozen=True)
class Violation:
    """factor: how far off, as a part of what is right (0 where there is no number)."""

    check: str
    case: Case
    text: str
    factor: float = 0.0


class Planned:
    """A request, what the planner made of it, and what that costs by the own price."""

    def __init__(self, request: PlanRequest, definition: str = DEFINITION) -> None:
        self.request, self.topology = request, request.topology
        self.plan: ShardingPlan | None = None
        self.error: PlannerError | None = None
        self.world = World(self.topology, definition)
        try:
            self.plan = make_plan(request)
        except PlannerError as error:
            self.error = error

    @cached_property
    def placed(self) -> Placed:
        assert self.plan is not None
        return {t.key: self.plan.plan[t.names[0][0]][t.names[0][1]] for t in self.request.tables}

    @property
    def report(self) -> PlanReport:
        assert self.plan is not None
        assert isinstance(self.plan.report, PlanReport)
        return self.plan.report

    @cached_property
    def tables(self) -> list[Table]:
        request = self.request
        return [table_of(t, request.constraints.get(t.key), request.batch_size) for t in request.tables]

    @cached_property
    def pricing(self) -> Pricing:
        return Pricing(self.tables, self.world)

    @cached_property
    def price(self) -> Price:
        return self.pricing.price(
            {
                key: (tiling_of(sharding), sharding.kernel in HOST_KERNELS)
                for key, sharding in self.placed.items()
            }
        )

    @cached_property
    def reserved(self) -> list[int]:
        """Bytes of each rank that tables may not have, in the memory that they lie in."""
        own = self.request
        return [own.reserved + int(np.ceil(cap * own.reserved_part)) for cap in self.topology.memory_caps]


def tiling_of(sharding: ParameterSharding) -> Tiling:
    assert sharding.tiling is not None
    return sharding.tiling


# ------------------------------------------------------------------------------------------------ cover, constraints


def check_cover(case: Case, planned: Planned) -> Iterator[Violation]:
    """Every cell of each table exactly once, on ranks of the world, as constraints allow."""
    for text in wrong_cover(planned):
        yield Violation("cover", case, text)


def wrong_cover(planned: Planned) -> Iterator[str]:
    ranks = planned.topology.world_size
    assert planned.plan is not None
    if planned.plan.world_size != ranks:
        yield f"the plan is for {planned.plan.world_size} ranks, the topology has {ranks}"
    for table in planned.request.tables:
        sharding = planned.placed[table.key]
        tiles = tiling_of(sharding).tiles()
        for tile in tiles:
            if not (0 <= tile.r0 < tile.r1 <= table.rows and 0 <= tile.c0 < tile.c1 <= table.dim):
                yield f"{table.key}: {tile} is outside of {table.rows} x {table.dim}"
            if (
                not tile.owners
                or len(set(tile.owners)) < len(tile.owners)
                or not set(tile.owners) <= set(range(ranks))
            ):
                yield f"{table.key}: {tile} has owners {tile.owners}"
        for one, other in itertools.combinations(tiles, 2):
            if one.r0 < other.r1 and other.r0 < one.r1 and one.c0 < other.c1 and other.c0 < one.c1:
                yield f"{table.key}: {one} and {other} overlap"
        cells = sum((t.r1 - t.r0) * (t.c1 - t.c0) for t in tiles)
        if cells != table.rows * table.dim:
            yield f"{table.key}: tiles have {cells} cells, the table has {table.rows * table.dim}"
        for text in _wrong_kind(sharding, planned.topology):
            yield f"{table.key}: {text}"
        limits = planned.request.constraints.get(table.key)
        if limits is not None:
            for text in _against_constraints(table.key, sharding, limits, planned):
                yield f"{table.key}: {text}"


def _wrong_kind(sharding: ParameterSharding, topology: Topology) -> Iterator[str]:
    """Whether the sharding type is a name of the tiling."""
    tiling, kind = tiling_of(sharding), sharding.kind
    owners = {tile.owners for tile in tiling.tiles()}
    one_host = len({topology.host_of(r) for r in tiling.ranks()}) == 1
    single, full_rows = all(len(o) == 1 for o in owners), all(len(b.owners) == 1 for b in tiling.blocks)
    right = {
        ShardingType.DATA_PARALLEL: len(tiling.tiles()) == 1,
        ShardingType.TABLE_WISE: len(owners) == 1 and single,
        ShardingType.COLUMN_WISE: full_rows and single,
        ShardingType.TABLE_COLUMN_WISE: full_rows and single and one_host,
        ShardingType.ROW_WISE: len(tiling.blocks) == 1 and single,
        ShardingType.TABLE_ROW_WISE: len(tiling.blocks) == 1 and single and one_host,
        ShardingType.GRID_SHARD: single,
        ShardingType.EXPLICIT: True,
    }
    if not right[kind]:
        yield f"{kind.value} does not describe {[str(t) for t in tiling.tiles()][:6]}"


def _against_constraints(
    key: str, sharding: ParameterSharding, limits: ParameterConstraints, planned: Planned
) -> Iterator[str]:
    tiling, topology, ranks = tiling_of(sharding), planned.topology, tiling_of(sharding).ranks()
    if limits.sharding is not None:
        pin = limits.sharding if isinstance(limits.sharding, Tiling) else limits.sharding.tiling
        if pin is not None and pin != tiling:
            yield "the pinned tiling was changed"
        given = None if isinstance(limits.sharding, Tiling) else limits.sharding
        if given is not None and given.kind is not sharding.kind:
            yield f"pinned as {given.kind.value}, planned as {sharding.kind.value}"
        if given is not None and given.ranks is not None and not set(ranks) <= set(given.ranks):
            yield f"pinned to ranks {given.ranks}, planned on {ranks}"
        return
    allowed = limits.types_allowed()
    if allowed and sharding.kind not in allowed and topology.world_size > 1:
        yield f"{sharding.kind.value} is not among {[k.value for k in allowed]}"
    split = any((b.c0, b.c1) != (0, tiling.dim) for b in tiling.blocks)
    narrow = min(b.c1 - b.c0 for b in tiling.blocks)
    if split and narrow < (32 if limits.min_partition is None else limits.min_partition):
        yield f"a column tile has {narrow} columns, min_partition is {limits.min_partition}"
    if limits.ranks is not None and not set(ranks) <= set(limits.ranks):  # type: ignore[arg-type]
        yield f"it lies on {ranks}, allowed are {limits.ranks}"
    if limits.hosts is not None and not {topology.host_of(r) for r in ranks} <= set(limits.hosts):  # type: ignore[arg-type]
        yield f"it lies on {ranks}, allowed are hosts {limits.hosts}"
    if limits.max_ranks is not None and len(ranks) > limits.max_ranks:
        yield f"it lies on {len(ranks)} ranks, max_ranks is {limits.max_ranks}"
    if limits.with_table is not None:
        other = planned.placed[planned.request.named(limits.with_table, key)]
        if tiling_of(other).ranks() != ranks:
            yield f"it lies on {ranks}, and with_table on {tiling_of(other).ranks()}"
    kernels = limits.kernels_allowed()
    cached = sharding.kernel in HOST_KERNELS
    if limits.enforce_hbm and cached:
        yield "enforce_hbm, and its rows lie in host memory"
    may_cache = not kernels or bool(set(HOST_KERNELS) & set(kernels))
    must_cache = bool(kernels) and set(kernels) <= set(HOST_KERNELS)
    if topology.compute_device != "cpu" and ((cached and not may_cache) or (must_cache and not cached)):
        yield f"its kernel is {sharding.kernel}, allowed are {[k.value for k in kernels]}"


# ------------------------------------------------------------------------------------------------ memory, price


def check_memory(case: Case, planned: Planned) -> Iterator[Violation]:
    """Own bytes and reserved ones are within the cap of every rank, in both memories."""
    for text, factor in over_cap(planned):
        yield Violation("memory", case, text, factor)


def over_cap(planned: Planned) -> Iterator[tuple[str, float]]:
    price, caps = planned.price, planned.topology.caps
    for rank in range(planned.world.ranks):
        for tier, name in enumerate(("device", "host")):
            reserved = planned.reserved[rank] if tier == planned.world.tier else 0
            need, cap = price.memory[rank, tier] + reserved, caps[rank][tier]
            if need > cap + price.pieces:
                yield (
                    f"rank {rank} needs {need:,.0f} bytes of {name} memory, its cap is {cap:,}",
                    need / max(cap, 1) - 1.0,
                )


def check_price(case: Case, planned: Planned) -> Iterator[Violation]:
    """The planner's own `price` of the plan equals the own price."""
    works = [
        replace(work, cached=planned.placed[work.name].kernel in HOST_KERNELS)
        for work in planned.request.works()
    ]
    found = planners_price(
        [tiling_of(planned.placed[w.name]) for w in works], Model(Workload(works), planned.topology)
    )
    own = planned.price
    if abs(found.seconds - own.seconds) > CLOSE * own.seconds:
        stages = {
            name: (float(s.max()), float(own.stages[name].max()))
            for name, s in found.stages.items()
            if name in own.stages
        }
        text = ", ".join(
            f"{name} {a:.9g} for {b:.9g}"
            for name, (a, b) in stages.items()
            if abs(a - b) > CLOSE * own.seconds
        )
        yield Violation(
            "price", case, f"price() is {found.seconds:.9g} s, own {own.seconds:.9g} s ({text}; calls {found.calls:.9g} "
            f"for {own.calls:.9g})", found.seconds / own.seconds - 1.0,
        )  # fmt: skip
    off = np.abs(found.memory - own.memory).max()
    if off > own.pieces:
        yield Violation(
            "price memory",
            case,
            f"price() has {off:,.0f} bytes more or less than the own price",
            float(off / own.memory.max()),
        )


def check_report(case: Case, planned: Planned) -> Iterator[Violation]:
    """Seconds, stages and bytes of the report are those of the own price."""
    report, own = planned.report, planned.price
    if abs(report.cost_s - own.seconds) > CLOSE * own.seconds:
        yield Violation(
            "report", case, f"the report says {report.cost_s:.9g} s, own {own.seconds:.9g} s",
            report.cost_s / own.seconds - 1.0,
        )  # fmt: skip
    loads = report.load_ps / 1e12
    worst, name = 0.0, ""
    for s, stage in enumerate(report.stages):
        wanted = own.stages.get(stage, np.zeros(planned.world.ranks))
        # Collectives as such may be counted with the first stage.
        found = loads[:, s] - (loads[:, s].max() - wanted.max() if s == 0 else 0.0)
        off = float(np.abs(found - wanted).max())
        if off > worst:
            worst, name = off, stage
    if worst > CLOSE * own.seconds:
        yield Violation(
            "report stages",
            case,
            f"stage '{name}' is {worst:.3g} s off on a rank of a step of {own.seconds:.3g} s",
            worst / own.seconds,
        )
    memory = own.memory.copy()
    memory[:, planned.world.tier] += planned.reserved
    off = np.abs(report.memory - memory)
    if off.max() > own.pieces:
        rank = int(off.max(1).argmax())
        yield Violation(
            "report memory", case,
            f"the report says {report.memory[rank].tolist()} bytes of rank {rank}, own {[round(m) for m in memory[rank]]}",
            float(off.max() / max(memory[rank].max(), 1.0)),
        )  # fmt: skip


def check_bound(case: Case, planned: Planned) -> Iterator[Violation]:
    """The bound is not above the plan's price."""
    bound, own = planned.report.bound_s, planned.price.seconds
    if bound > own * (1.0 + CLOSE):
        yield Violation(
            "bound", case, f"the bound is {bound:.9g} s, the plan takes {own:.9g} s", bound / own - 1.0
        )


# ------------------------------------------------------------------------------------------------ all arrangements


class Everything:
    """All arrangements of a small case: the options that limits allow, on all combinations of ranks."""

    def __init__(self, planned: Planned, offload: bool = False) -> None:
        self.planned, self.topology = planned, planned.topology
        request = planned.request
        pins = request.pins()
        limits = request.limits(pins, offload)
        cached = any(limit.cached for limit in limits.values())
        options = enumerate_options(self.topology, [t.dim for t in request.tables], cached)
        self.found: list[list[tuple[Tiling, bool]]] = []
        for table in planned.tables:
            if table.key in pins:
                pin = pins[table.key]
                self.found.append([(tiling_of(pin), pin.kernel in HOST_KERNELS)])
                continue
            limit = limits.get(table.key, Limits())
            most = request.constraints.get(table.key, ParameterConstraints()).max_ranks or planned.world.ranks
            several = [(tiling, o.cached) for o in options for tiling in self._tilings(table, o, limit)]
            self.found.append([each for each in dict.fromkeys(several) if len(each[0].ranks()) <= most])

    @property
    def count(self) -> int:
        return int(np.prod([len(each) for each in self.found]))

    def _tilings(self, table: Table, option: Option, limit: Limits) -> Iterator[Tiling]:
        topology, ranks = self.topology, self.topology.world_size
        way, pieces, width, cached = option
        if limit.types and not is_of(option, limit.types, ranks, topology.host_count):
            return
        if (cached and not (limit.cached and table.attached)) or (not cached and not limit.on_device):
            return
        allowed = range(ranks) if limit.ranks is None else sorted(set(limit.ranks))
        if width == ranks > 1 and len(allowed) < ranks:
            return
        least = 32 if limit.min_partition is None else limit.min_partition
        if way in (Way.COLUMNS, Way.GRID) and (table.dim % pieces or table.dim // pieces < least):
            return
        parts = width if way is Way.GRID else pieces * width
        if way in (Way.ROWS, Way.GRID) and -(-table.rows // -(-table.rows // parts)) != parts:
            if not (limit.types and width > 1):
                return
        if way is Way.COPIES:
            yield Tiling(
                table.rows, table.dim, (Block(0, table.dim, (0, table.rows), (tuple(range(ranks)),)),)
            )
        elif way is Way.WHOLE:
            for rank in allowed:
                yield Tiling(table.rows, table.dim, (Block(0, table.dim, (0, table.rows), ((rank,),)),))
        elif way is Way.COLUMNS:
            for some in _combinations(allowed, pieces):
                yield column_wise(table.key, table.rows, table.dim, some, topology)
        elif way is Way.GRID:
            hosts = [h for h in topology.host_ranks if len(h) == width and set(h) <= set(allowed)]
            for some in itertools.combinations(hosts, pieces):
                yield grid(
                    table.key, table.rows, table.dim, [r for host in some for r in sorted(host)], topology
                )
        elif width == 1:
            order = itertools.permutations if table.ordered else _combinations
            for some in order(allowed, pieces):
                yield self._rows(table, some)
        elif width == ranks:
            yield self._rows(table, range(ranks))
        else:
            for host in topology.host_ranks:
                if len(host) == width and set(host) <= set(allowed):
                    yield self._rows(table, sorted(host))

    def _rows(self, table: Table, ranks: Sequence[int]) -> Tiling:
        sizes = None
        if table.ordered:
            # Cut where share of ids + share of rows is 2 / k.
            cuts = [0]
            for i in range(1, len(ranks)):
                low, high = 0, table.rows
                while low < high:
                    middle = (low + high) // 2
                    enough = table.share(0, middle) + middle / table.rows >= i * 2.0 / len(ranks)
                    low, high = (low, middle) if enough else (middle + 1, high)
                cuts.append(low)
            sizes = np.diff([*cuts, table.rows]).tolist()
        elif len(set(ranks)) < len(ranks):
            sizes = np.diff(np.arange(len(ranks) + 1) * table.rows // len(ranks)).tolist()
        if sizes is not None:
            ranks = [rank for rank, size in zip(ranks, sizes, strict=True) if size]
            sizes = [size for size in sizes if size]
        return row_wise(table.key, table.rows, table.dim, ranks, self.topology, sizes=sizes)

    def best(self) -> tuple[float, tuple[tuple[Tiling, bool], ...]] | None:
        """The least own price within memory, and the arrangement; None: none fits."""
        pricing, world = self.planned.pricing, self.planned.world
        caps = np.array(self.topology.caps, np.float64)
        caps[:, world.tier] -= self.planned.reserved
        each = [
            [(pricing.of_table(table, *placed), placed) for placed in several]
            for table, several in zip(pricing.tables, self.found, strict=True)
        ]
        output = np.zeros_like(caps)
        found: tuple[float, tuple[tuple[Tiling, bool], ...]] | None = None

        def go(t: int, so_far: Sums, chosen: tuple[tuple[Tiling, bool], ...]) -> None:
            nonlocal found
            output[:, world.tier] = 2.0 * so_far.output
            if (so_far.memory + output > caps).any():
                return
            if t == len(each):
                seconds = pricing.finished(so_far).seconds
                if found is None or seconds < found[0]:
                    found = (seconds, chosen)
                return
            for sums, placed in each[t]:
                go(t + 1, so_far + sums, (*chosen, placed))

        go(0, pricing.nothing(), ())
        return found


def _combinations(ranks: Sequence[int], pieces: int) -> Iterator[tuple[int, ...]]:
    """Different ranks where there are enough, else each as often as another or once more."""
    times, rest = divmod(pieces, len(ranks))
    for some in itertools.combinations(ranks, rest):
        yield tuple(sorted([*ranks] * times + list(some)))


def check_all(case: Case, planned: Planned, above: list[float]) -> Iterator[Violation]:
    """The bound is not above the best of all arrangements; an answer without a plan is right."""
    limits = planned.request.constraints.values()
    if any(limit.with_table is not None for limit in limits):
        return
    everything = Everything(planned)
    if everything.count > MOST_ARRANGEMENTS:
        return
    best = everything.best()
    if best is None and planned.request.may_offload():
        everything = Everything(planned, offload=True)
        if everything.count > MOST_ARRANGEMENTS:
            return
        best = everything.best()
    if planned.plan is None:
        assert planned.error is not None
        if best is not None:
            proved = planned.error.proved
            what = " | ".join(str(tiling.tiles()[0]) + " …" for tiling, _ in best[1])
            yield Violation(
                "infeasible" if proved else "missed", case,
                f"{'no plan exists' if proved else 'no plan was found'}, and this fits: {what}",
            )  # fmt: skip
        return
    own, bound = planned.price.seconds, planned.report.bound_s
    if best is None:
        # Only uneven rows fit.
        return
    least = min(best[0], own)
    above.append(own / least - 1.0)
    if bound > least * (1.0 + CLOSE):
        yield Violation(
            "bound of all",
            case,
            f"the bound is {bound:.9g} s, the best of all arrangements {least:.9g} s",
            bound / least - 1.0,
        )
    even = all(
        (tiling_of(planned.placed[t.key]), planned.placed[t.key].kernel in HOST_KERNELS) in several
        for t, several in zip(planned.tables, everything.found, strict=True)
    )
    if even and best[0] > own * (1.0 + CLOSE):
        yield Violation(
            "all", case, f"the plan takes {own:.9g} s, less than the best of all, {best[0]:.9g} s"
        )


# ------------------------------------------------------------------------------------------------ planned again

_PLACEMENT = {
    "sharding_types": None, "forbidden_types": (), "ranks": None, "hosts": None, "max_ranks": None, "with_table": None,
    "min_partition": None, "sharding": None,
}  # fmt: skip


def check_pins(case: Case, planned: Planned) -> Iterator[Violation]:
    """The plan given back by hand is accepted as it is, at the same price."""
    constraints = {key: replace(limits, **_PLACEMENT) for key, limits in case.constraints.items()}
    try:
        planner = case.planner(fixed=planned.plan, constraints=constraints)
        again = planner.plan(list(case.tables))
    except ConfigError as error:
        yield Violation("pins", case, f"the plan was refused as fixed=: {_line(error)}")
        return
    for path, name, sharding in again.tables():
        assert planned.plan is not None
        if tiling_of(sharding) != tiling_of(planned.plan.plan[path][name]):
            yield Violation("pins", case, f"'{name}' moved though it was pinned")
    report, first = again.report, planned.report
    assert isinstance(report, PlanReport)
    if abs(report.cost_s - first.cost_s) > CLOSE * first.cost_s:
        yield Violation(
            "pins price",
            case,
            f"{report.cost_s:.9g} s as pins, {first.cost_s:.9g} s as planned",
            report.cost_s / first.cost_s - 1.0,
        )
    off = np.abs(report.memory - first.memory).max()
    if off > planned.price.pieces:
        yield Violation(
            "pins memory", case, f"{off:,} bytes more or less as pins", float(off / first.memory.max())
        )


def check_order(case: Case, planned: Planned) -> Iterator[Violation]:
    """The same tables in another order have the same plan."""
    again = Planned(replace(planned.request, tables=planned.request.tables[::-1]))
    if (again.plan is None) != (planned.plan is None) or (
        again.plan is not None
        and any(again.placed[key] != sharding for key, sharding in planned.placed.items())
    ):
        yield Violation("order", case, "another order of tables has another plan")


def check_what_if(case: Case, planned: Planned) -> Iterator[Violation]:
    """A varied request is the request of the varied case, and its plan too."""
    cap = "ddr_cap" if case.topology.compute_device == "cpu" else "hbm_cap"
    more = 2 * case.topology.memory_cap
    whats: list[tuple[dict[str, Any], Callable[[], Case]]] = [
        ({"batch_size": 2 * case.batch_size}, lambda: replace(case, batch_size=2 * case.batch_size)),
        ({cap: more}, lambda: replace(case, topology=replace(case.topology, **{cap: more, f"{cap}s": None}))),
        (
            {"data_type": "bf16"},
            lambda: replace(case, tables=tuple(replace(t, data_type=_BF16) for t in case.tables)),
        ),
        ({"hosts": 2, "ranks_per_host": 2}, lambda: replace(case, topology=_world(case.topology, 2, 2))),
    ]
    what, other = whats[case.seed % len(whats)]
    results = []
    for make in (lambda: varied(planned.request, **what), lambda: other().request()):
        try:
            request = make()
            results.append((request, Planned(request)))
        except ConfigError as error:
            results.append((None, _line(error)))
    (first, one), (second, two) = results
    if (first is None) != (second is None):
        yield Violation(
            "what-if", case, f"{what}: one of what-if and plan raises: {one if first is None else two}"
        )
    if first is None or second is None:
        return
    assert isinstance(one, Planned)
    assert isinstance(two, Planned)
    if first.digest() != second.digest():
        a, b = first.to_json(), second.to_json()
        differ = {key: (a[key], b[key]) for key in a if a[key] != b[key]}
        yield Violation(
            "what-if", case, f"{what} gives another request than planning it: {str(differ)[:300]}"
        )
    elif (one.plan is None) != (two.plan is None) or (one.plan is not None and one.placed != two.placed):
        yield Violation("what-if", case, f"{what}: two plans of one request differ")


def _world(topology: Topology, hosts: int, size: int) -> Topology:
    return Topology(
        hosts * size, topology.compute_device, hbm_cap=topology.hbm_cap, ddr_cap=topology.ddr_cap,
        local_world_size=size, intra_host_bw=topology.intra_host_bw, inter_host_bw=topology.inter_host_bw,
        speeds=topology.speeds, **({"nic": topology.nic} if hasattr(topology, "nic") else {}),
    )  # fmt: skip


def check_remedies(case: Case, planned: Planned) -> Iterator[Violation]:
    """What an answer without a plan offers gives a plan that covers its tables within memory."""
    assert planned.error is not None
    for remedy in planned.error.remedies:
        again = Planned(remedy.request)
        if again.plan is None:
            yield Violation("remedies", case, f"'{remedy.text}' was tried and gives no plan")
            continue
        for text in wrong_cover(again):
            yield Violation("remedies", case, f"'{remedy.text}': {text}")
        for text, factor in over_cap(again):
            yield Violation("remedies memory", case, f"'{remedy.text}': {text}", factor)


_BF16 = next(d for d in type(case_of("plain", 0).tables[0].data_type) if d.value == "BF16")


def _line(error: Exception) -> str:
    return str(error).replace("\n", " ")[:300]


# ------------------------------------------------------------------------------------------------ a case


@dataclass
class Result:
    """What became of a case."""

    case: Case
    violations: list[Violation]
    outcome: str  # "planned", "no plan", "refused"
    above: float | None = None  # how far the plan is above the best of all arrangements
    gap: float | None = None  # above the bound, by the own price


def check(case: Case, definition: str = DEFINITION, only: Sequence[str] = ()) -> Result:
    """Plan a case and check everything.

    Args:
        definition: "new" or "old": how the own price turns bytes into seconds.
        only: names of checks (`CHECKS`); () for all.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            planned = Planned(case.request(), definition)
        except ConfigError:
            return Result(case, [], "refused")
        found: list[Violation] = []
        above: list[float] = []
        small = case.kind in ("small", "small_plain", "infeasible")
        few = len(case.tables) <= FEW_TABLES
        checks: list[tuple[str, Callable[[Case, Planned], Iterator[Violation]]]] = []
        if planned.plan is not None:
            checks += [
                ("cover", check_cover), ("memory", check_memory), ("price", check_price), ("report", check_report),
                ("bound", check_bound), ("pins", check_pins),
            ]  # fmt: skip
            checks += [("order", check_order), ("what-if", check_what_if)] if few else []
        else:
            checks += [("remedies", check_remedies)]
        if small:
            checks += [("all", lambda case, planned: check_all(case, planned, above))]
        for name, function in checks:
            if not only or name in only:
                found += function(case, planned)
        if planned.plan is None:
            return Result(case, found, "no plan")
        bound = planned.report.bound_s
        gap = planned.price.seconds / bound - 1.0 if bound else None
        return Result(case, found, "planned", above[0] if above else None, gap)


CHECKS = ("cover", "memory", "price", "report", "bound", "pins", "order", "what-if", "remedies", "all")


# ------------------------------------------------------------------------------------------------ the command


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500, help="how many cases")
    parser.add_argument("--seed", type=int, default=0, help="of the first case of each kind")
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=list(KINDS), help="what cases stress")
    parser.add_argument("--check", nargs="*", choices=CHECKS, default=[], help="only these checks")
    parser.add_argument("--definition", choices=("new", "old"), default=DEFINITION, help="of links' seconds")
    parser.add_argument("--show", type=int, default=3, help="violations to list of each check")
    given = parser.parse_args()
    kinds, begun = list(given.kind), time.perf_counter()
    results: list[Result] = []
    try:
        for i in range(given.count):
            case = case_of(kinds[i % len(kinds)], given.seed + i // len(kinds))
            results.append(check(case, given.definition, given.check))
            broken = sum(bool(r.violations) for r in results)
            if sys.stderr.isatty() or (i + 1) % 25 == 0 or i + 1 == given.count:
                end = "\r" if sys.stderr.isatty() else "\n"
                took = time.perf_counter() - begun
                print(
                    f"{i + 1}/{given.count} cases, {broken} with violations, {took:.0f} s  ",
                    end=end,
                    file=sys.stderr,
                )
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
    print(summary(results, given.show))
    return int(any(result.violations for result in results))


def summary(results: Sequence[Result], show: int = 3) -> str:
    """Counts by outcome and check, and of each check the simplest violations."""
    outcomes = defaultdict(int)
    by_check: dict[str, list[Violation]] = defaultdict(list)
    for result in results:
        outcomes[result.outcome] += 1
        for violation in result.violations:
            by_check[violation.check].append(violation)
    lines = ["", f"{len(results)} cases: " + ", ".join(f"{n} {what}" for what, n in sorted(outcomes.items()))]
    above = [r.above for r in results if r.above is not None]
    if above:
        best = sum(a <= CLOSE for a in above)
        lines.append(
            f"{len(above)} compared with all arrangements: {best} plans are the best, median {100 * statistics.median(above):.2f} % "
            f"above it, worst {100 * max(above):.1f} %"
        )
    gaps = [r.gap for r in results if r.gap is not None]
    if gaps:
        lines.append(
            f"plans above their bounds: median {100 * statistics.median(gaps):.2f} %, worst {100 * max(gaps):.1f} %"
        )
    for name, violations in sorted(by_check.items(), key=lambda item: -len(item[1])):
        cases = {(v.case.kind, v.case.seed) for v in violations}
        worst = max(violations, key=lambda v: abs(v.factor))
        lines.append(f"\n{name}: {len(cases)} cases, worst {100 * worst.factor:+.3g} % ({worst.case.once})")
        simplest = sorted(
            violations, key=lambda v: (len(v.case.tables) * v.case.topology.world_size, v.case.seed)
        )
        for violation in simplest[:show]:
            lines.append(f"  {violation.case.once}\n    {violation.text}")
    if not by_check:
        lines.append("no violations")
    return "\n".join(lines)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
