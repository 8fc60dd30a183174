"""The planner's result for a request with its independent price, and checks that every plan must satisfy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np
from planner_check_price import Placement, Price, Pricing, Table, World, table_of

from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.make_plan import make_plan
from tilerec.planner.pins import named_table
from tilerec.planner.planner_error import PlannerError
from tilerec.planner.report.plan_report import PlanReport
from tilerec.planner.request import PlanRequest
from tilerec.spec.plan import HOST_KERNELS, ParameterSharding, ShardingPlan, ShardingType
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology


class Planned:
    """A request, the planner's result for it, and the independent price of the result."""

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.topology = request, request.topology
        self.plan: ShardingPlan | None = None
        self.error: PlannerError | None = None
        self.world = World(self.topology)
        try:
            self.plan = make_plan(request)
        except PlannerError as error:
            self.error = error

    @cached_property
    def placed(self) -> Mapping[str, ParameterSharding]:
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
        return self.pricing.price({key: placement_of(sharding) for key, sharding in self.placed.items()})

    def in_host_memory(self, key: str) -> bool:
        """Return True if the table's rows are in host memory, behind a device cache or without one."""
        return self.placed[key].kernel in HOST_KERNELS

    @cached_property
    def reserved(self) -> list[int]:
        """Reserved bytes of each rank, in the memory that holds tables."""
        own = self.request
        always = own.reserved + own.reserved_batches * own.input_bytes()
        return [always + int(np.ceil(cap * own.reserved_part)) for cap in self.topology.memory_caps]


def placement_of(sharding: ParameterSharding) -> Placement:
    """Return the placement of a sharding. Hosts sum rows before sending unless the table has one id per bag."""
    sums = sharding.ids_per_bag is None or sharding.ids_per_bag > 1
    return Placement(tiling_of(sharding), sharding.kernel in HOST_KERNELS, sums)


def tiling_of(sharding: ParameterSharding) -> Tiling:
    assert sharding.tiling is not None
    return sharding.tiling


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
            if not tile.owners or len(set(tile.owners)) < len(tile.owners) or not set(tile.owners) <= set(range(ranks)):
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
    """Yield a violation if the sharding type does not match the tiling."""
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
        other = tiling_of(planned.placed[named_table(planned.request, limits.with_table, key)])
        fewer = min(len(ranks), len(other.ranks()))
        # In a split by rows, a table with fewer rows than ranks lies on the first of them.
        few_rows = min(tiling.rows, other.rows) == fewer
        if other.ranks() != ranks and not (few_rows and other.ranks()[:fewer] == ranks[:fewer]):
            yield f"it lies on {ranks}, and with_table on {other.ranks()}"
    kernels = limits.kernels_allowed()
    cached = sharding.kernel in HOST_KERNELS
    if limits.enforce_hbm and cached:
        yield "enforce_hbm, and its rows lie in host memory"
    may_cache = not kernels or bool(set(HOST_KERNELS) & set(kernels))
    must_cache = bool(kernels) and set(kernels) <= set(HOST_KERNELS)
    if topology.compute_device != "cpu" and ((cached and not may_cache) or (must_cache and not cached)):
        yield f"its kernel is {sharding.kernel}, allowed are {[k.value for k in kernels]}"


def over_cap(planned: Planned) -> tuple[str, float] | None:
    """Return the rank and memory most over the cap, and the excess as a part of the cap; None if all fit."""
    price, caps = planned.price, planned.topology.caps
    found: tuple[str, float] | None = None
    for rank in range(planned.world.ranks):
        for tier, name in enumerate(("device", "host")):
            reserved = planned.reserved[rank] if tier == planned.world.tier else 0
            need, cap = price.memory[rank, tier] + reserved, caps[rank][tier]
            off = need / max(cap, 1) - 1.0
            if need > cap + price.pieces and (found is None or off > found[1]):
                found = (f"rank {rank} needs {need:,.0f} bytes of {name} memory, its cap is {cap:,}", off)
    return found
