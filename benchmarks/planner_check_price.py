"""An independent implementation of the price of a plan: seconds by stage, bytes by rank and memory tier.

`planner_check.py` compares it with the planner's report. It shares no code with the planner's cost model or search. It
reads tables, tilings and topologies (`tilerec.spec`) and follows docs/planner-cost.md, with loops over tables and
ranks.

Terms
  part        rows [r0, r1) of a table on one set of owners; ids of a feature are sent to a part
  unit        a rectangle of a part; rows are returned per unit
  home        the rank whose batch it is;  reader: the owner of a part that reads it for a home
  exchange    a collective that sends bytes between ranks; EXCHANGES lists them

In each exchange a rank sends `a` bytes to ranks of its host and receives `b`. The time is max(a link_out, b link_in) on
full-duplex links, else the sum. Between hosts, network_out and network_in take the place of link_out and link_in. If
each device has a network card, the rank's own bytes count, as a part of the stage. If ranks of a host share a card, the
mean over these ranks counts, as a separate stage.

Legend: R ranks, U distinct rows, q share of a table's ids, L ids per bag.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.tables import PlannedTable
from tilerec.spec.cache import DEFAULT_LOAD_FACTOR
from tilerec.spec.plan import EmbeddingComputeKernel, ParameterSharding, Wire
from tilerec.spec.speeds import WIDTHS
from tilerec.spec.table import DataType, data_type_to_dtype
from tilerec.spec.tile import Tile, Tiling, rectangles
from tilerec.spec.topology import Topology

Array = npt.NDArray[np.float64]

STAGES = ("ids", "lookup", "rows", "gradients", "update")
EXCHANGES = (
    "header", "ids", "rows in host", "rows", "gradients", "gradients in host", "row sums", "replicas",
)  # fmt: skip
STAGE_OF = {
    "header": "ids", "ids": "ids", "rows in host": "rows", "rows": "rows", "gradients": "gradients",
    "gradients in host": "gradients", "row sums": "update", "replicas": "update",
}  # fmt: skip
WIRE_BYTES = {"fp32": (4, 0), "fp16": (2, 0), "bf16": (2, 0), "int8": (1, 4), "fp8": (1, 4)}
BAGS, ROWS, DENSE, BARE, SHARES = range(5)  # forms in which replicas exchange gradients
SORT_BYTES, CACHE_LINE_BYTES, CACHE_ROW_BYTES, CACHE_SET = 16, 17, 4, 32
HOT_ID, HOT_FEATURE = 8e-9, 6e-5  # seconds to look for hot ids: per id on CPUs, per feature on GPUs
MOST_COPIES = 8  # replicas that send all their gradients to each other
DEPTH = 1  # batches routed ahead, besides the current one
OUT, IN = 0, 1


# ------------------------------------------------------------------------------------------------ chances


def missed(share: float, draws: float) -> float:
    """Return the probability that none of `draws` ids is in a `share` of the ids.

    Fractional draws interpolate: 2.5 draws are 2 or 3 with probability 1/2 each.
    """
    whole = math.floor(draws)
    none = (1.0 if whole == 0 else 0.0) if share >= 1.0 else math.exp(whole * math.log1p(-share))
    return none * (1.0 - (draws - whole) * share)


def _hit(share: float, draws: float) -> float:
    """Return 1 - `missed`, without cancellation for tiny shares."""
    whole = math.floor(draws)
    if share >= 1.0:
        return 1.0 - missed(share, draws)
    log = whole * math.log1p(-share)
    rest = (draws - whole) * share
    return -math.expm1(log) + math.exp(log) * rest


class Zipf:
    """Zipf's law over `distinct` ids, in buckets: ids one by one at first, then buckets that grow by a quarter."""

    def __init__(self, distinct: int, exponent: float) -> None:
        self.buckets: list[tuple[float, float, float]] = []  # first id, number of ids, share of one id
        low = 1.0
        found = []
        while low <= distinct:
            high = max(low + 1.0, math.floor(low * 1.25))
            count = min(distinct + 1.0 - low, high - low)
            found.append((low, count, (low + (count - 1.0) / 2.0) ** -exponent))
            low = high
        total = math.fsum(count * weight for _, count, weight in found)
        self.buckets = [(low, count, weight / total) for low, count, weight in found]

    def distinct(self, draws: float) -> float:
        return min(draws, math.fsum(count * _hit(share, draws) for _, count, share in self.buckets))

    def distinct_below(self, draws: float, row: int, hot: int = 0) -> float:
        """Return the distinct ids below a row, without the first `hot` ones."""
        found = math.fsum(n * _hit(share, draws) for n, share in self._cold(row, hot))
        every = math.fsum(count * _hit(share, draws) for _, count, share in self.buckets)
        return found * min(1.0, draws / every) if every else 0.0

    def below(self, row: int, hot: int = 0) -> float:
        """Return the share of the reads of ids below a row, without the first `hot` ones."""
        return math.fsum(n * share for n, share in self._cold(row, hot))

    def _cold(self, row: int, hot: int) -> Iterator[tuple[float, float]]:
        """Yield (ids below the row that are not hot, share of one id) of each bucket, whose hot ids are anywhere."""
        for low, count, share in self.buckets:
            below, warm = (min(max(end + 1.0 - low, 0.0), count) for end in (row, hot))
            yield below * (1.0 - warm / count), share


# ------------------------------------------------------------------------------------------------ inputs


@dataclass(frozen=True)
class Feature:
    """A feature: bags of one home in a step, ids per bag, and whether ids have weights."""

    bags: float
    length: float
    weighted: bool


@dataclass(frozen=True)
class Table:
    """A table: sizes in cells and bytes, and the features that read it. hot: first rows that are hot rows.

    Copies of hot rows are rows [rows, rows + hot) in `found` and `share`.
    """

    key: str
    rows: int
    dim: int
    element: int  # bytes of a cell
    attached: bool  # its optimizer updates it in the backward pass
    cell_state: int  # bytes of optimizer state (or of a dense gradient) of a cell
    row_state: int  # and of a row
    sums: int  # numbers per row that column blocks send each other
    phases: int  # exchanges of such sums
    features: tuple[Feature, ...]
    forward: tuple[int, int]  # bytes of a cell and of a row on the wire
    backward: tuple[int, int]
    collection: str
    fp64: bool
    pooled: bool
    zipf: Zipf | None
    ordered: bool
    load_factor: float
    distinct_wire: bool | None  # `Wire.distinct`
    hot: int = 0
    known: dict[float, float] = field(default_factory=dict, compare=False)

    @property
    def ids(self) -> float:
        return sum(f.bags * f.length for f in self.features)

    def distinct(self, ranks: float) -> float:
        """Return U, the expected number of distinct rows among the ids of the batches of `ranks` ranks."""
        if ranks not in self.known:
            self.known[ranks] = self.found(self.ids * ranks, 0, self.rows + self.hot)
        return self.known[ranks]

    def found(self, draws: float, r0: int, r1: int) -> float:
        """Return the expected number of distinct rows in [r0, r1) among so many ids of the table."""
        if self.zipf is None:
            whole = min(draws, self.rows * _hit(1.0 / self.rows, draws))
        elif self.ordered:
            zipf, rows = self.zipf, self.rows
            cold = [zipf.distinct_below(draws, min(row, rows), self.hot) for row in (r0, r1)]
            copies = zipf.distinct_below(draws, rows) - zipf.distinct_below(draws, rows, self.hot)
            return cold[1] - cold[0] + copies * (max(r1 - rows, 0) - max(r0 - rows, 0)) / max(self.hot, 1)
        else:
            whole = self.zipf.distinct(draws)
        return whole * (r1 - r0) / self.rows

    def share(self, r0: int, r1: int) -> float:
        """Return the share of the table's ids in rows [r0, r1)."""
        if self.ordered and (self.hot or (r0, r1) != (0, self.rows)):
            assert self.zipf is not None
            cold = [self.zipf.below(min(row, self.rows), self.hot) for row in (r0, r1)]
            copies = (max(r1 - self.rows, 0) - max(r0 - self.rows, 0)) / max(self.hot, 1)
            return cold[1] - cold[0] + copies * self.zipf.below(self.hot)
        return (r1 - r0) / self.rows

    def weights(self, rows: float, width: int) -> float:
        """Return the bytes of a rectangle with its optimizer state, or its dense gradient."""
        return rows * (width * (self.element + self.cell_state) + self.row_state)

    def misses(self, ranks: int, r0: int, r1: int) -> float:
        """Return the rows of a step that an LRU cache of rows [r0, r1) with `load_factor` lines per row misses."""

        def distinct(steps: float) -> float:
            return self.found(self.ids * steps, r0, r1)

        lines, step = self.load_factor * (r1 - r0), distinct(ranks)
        if distinct(ranks * 2.0**40) <= lines:
            return 0.0  # all rows that ever occur fit
        if step >= lines:
            return step
        # The cache holds the rows of the last s steps: U(s R) = lines. s by doubling, then 12 halvings.
        low = 1.0
        while distinct(2.0 * low * ranks) < lines:
            low *= 2.0
        high = 2.0 * low
        for _ in range(12):
            middle = (low + high) / 2.0
            low, high = (middle, high) if distinct(middle * ranks) < lines else (low, middle)
        return min(max(distinct((low + 1.0) * ranks) - distinct(low * ranks), 0.0), step)


def table_of(planned: PlannedTable, limits: ParameterConstraints | None, batch_size: int) -> Table:
    """Return the `Table` for a planned table; its constraints supply facts about its ids."""
    given = limits or ParameterConstraints()
    count = max(1, len(planned.features))

    def each(values: Sequence[float] | None, default: float) -> list[float]:
        if values is None:
            return [default] * count
        return [float(v) for v in values] * (count if len(values) == 1 else 1)

    weighted = (planned.weighted or given.is_weighted) and planned.pooled
    features = []
    for samples, lookups, length in zip(
        each(given.batch_sizes, batch_size),
        each(given.num_poolings, 1.0),
        each(given.pooling_factors, 1.0),
        strict=True,
    ):
        bags = samples * lookups
        # Rows that are not pooled: each id is a bag.
        features.append(Feature(bags, length, weighted) if planned.pooled else Feature(bags * length, 1.0, weighted))
    element = data_type_to_dtype(planned.data_type).itemsize
    state = 8 if planned.data_type is DataType.FP64 else 4
    spec = planned.optimizer
    if not planned.trained:
        cell, row, partials = 0, 0, ()
    elif spec is None:
        cell, row, partials = element, 0, ()
    else:
        cell = state * sum(slot.per == "element" for slot in spec.slots)
        row = state * sum(slot.per == "row" for slot in spec.slots)
        partials = spec.partials
    pin = given.sharding if isinstance(given.sharding, ParameterSharding) else None
    wire = (pin.wire if pin is not None else None) or planned.wire or Wire()
    skew = given.skew
    return Table(
        planned.key, planned.rows, planned.dim, element, spec is not None or not planned.trained, cell, row,
        sum(partials), len(partials), tuple(features), WIRE_BYTES[wire.forward], WIRE_BYTES[wire.backward],
        planned.names[0][0], planned.data_type is DataType.FP64, planned.pooled,
        None if skew is None else Zipf(skew.distinct, skew.exponent), skew is not None and skew.ordered,
        _load_factor(planned, given, pin), wire.distinct,
    )  # fmt: skip


def _load_factor(planned: PlannedTable, given: ParameterConstraints, pin: ParameterSharding | None) -> float:
    """Return the cache lines per row of a cached table; 0 for rows in host memory without a cache."""
    kernels = given.kernels_allowed() if pin is None else (pin.kernel,)
    caching, bare = EmbeddingComputeKernel.FUSED_UVM_CACHING, EmbeddingComputeKernel.FUSED_UVM
    if bare in kernels and caching not in kernels:
        return 0.0
    params = given.cache_params if pin is None else pin.cache
    if params is not None:
        return float(params.load_factor)
    return DEFAULT_LOAD_FACTOR if planned.cached is None else planned.cached


class World:
    """Ranks, hosts and speeds."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.ranks = topology.world_size
        self.host = [topology.host_of(r) for r in range(self.ranks)]
        self.local = [topology.local_rank(r) for r in range(self.ranks)]
        self.size = Counter(self.host)  # ranks of each host
        self.several = topology.host_count > 1
        self.speeds = speeds_of(topology)
        self.tier = 1 if topology.compute_device == "cpu" else 0
        self.shared_nic = topology.nic == "host"
        self.call = self.speeds.call + self.speeds.call_peer * max(0, self.ranks - 2)
        self.to_host = 1.0 / (1000.0 * topology.hbm_to_ddr_mem_bw)

    def rate(self, name: str, width: float) -> float:
        """Return seconds per row: linear between measured widths, constant below, proportional above them."""
        widths, rates = self.speeds.widths, getattr(self.speeds, name)
        if width <= widths[0]:
            return float(rates[0])
        if width > widths[-1]:
            return float(rates[-1] / widths[-1] * width)
        i = next(i for i in range(1, len(widths)) if width <= widths[i])
        slope = (rates[i] - rates[i - 1]) / (widths[i] - widths[i - 1])
        return float(rates[i - 1] + (width - widths[i - 1]) * slope)

    def reader(self, owners: Sequence[int], home: int) -> int:
        """Return the owner that reads for a home: the home itself, else one on its host, else any, in turn."""
        if home in owners:
            return home
        near = [o for o in owners if self.host[o] == self.host[home]] or list(owners)
        return near[self.local[home] % len(near)]


def speeds_of(topology: Topology) -> Any:
    """Return the topology's speeds, or the defaults derived from its bandwidths."""
    if topology.speeds is not None:
        return topology.speeds
    cpu = topology.compute_device == "cpu"
    memory = 1000.0 * (topology.ddr_mem_bw / 8.0 if cpu else topology.hbm_mem_bw)
    far = [4.0 * w / (memory * e) for w, e in zip(WIDTHS, (0.25, 0.4, 0.6, 0.75, 0.85), strict=True)]
    near = [s / (4.0 if cpu else 3.0) for s in far]
    stream = [4.0 * w / memory for w in WIDTHS]
    link, network = 1.0 / (1000.0 * topology.intra_host_bw), 1.0 / (1000.0 * topology.inter_host_bw)
    if cpu:
        link, network = max(link, 1.0 / memory), max(network, 1.0 / memory)
    per_id = 2e-8 if cpu else 2e-10
    return SimpleNamespace(
        widths=WIDTHS, lookup_far=far, lookup_near=near, lookup_bag=stream, update_far=[2.0 * s for s in far],
        update_near=[2.0 * s for s in near], update_id=[per_id + s for s in near], update_bag=stream,
        place=[2.0 * s for s in stream], pick=[2.0 * s for s in stream], route=per_id, copy=1.0 / memory,
        link_in=link, link_out=link, network_in=network, network_out=network,
        call=5e-4 if cpu else 3e-5, call_peer=2e-5 if cpu else 5e-7,
        step=1e-3 if cpu else 0.0, part=1e-5 if cpu else 1e-8,
        replica=1e-4 if cpu else 1e-5, row_sum=3e-4 if cpu else 1e-5, cache=(1 if cpu else 32) * 2**20,
        duplex=not cpu, hot_id=None,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ prices


class Placement(NamedTuple):
    """Placement of a table.

    cached: its rows are in host memory, behind a cache. sums_in_hosts: rows from ranges on one host are summed there
    before they are sent to other hosts.
    """

    tiling: Tiling
    cached: bool = False
    sums_in_hosts: bool = True


@dataclass
class Sums:
    """Sums over tables.

    local: [stage, R] seconds of work on a rank. near, far: [exchange, out or in, R] bytes within and between hosts.
    memory: [R, 2] bytes. The other fields determine which collectives run.
    """

    local: Array
    near: Array
    far: Array
    memory: Array
    output: float = 0.0
    travels: bool = False
    merges: bool = False
    partly_filled: Array | bool = False  # [R]: the output begins as zeros
    forms: frozenset[int] = frozenset()
    phases: int = 0
    pieces: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.local + other.local, self.near + other.near, self.far + other.far, self.memory + other.memory,
            self.output + other.output, self.travels or other.travels, self.merges or other.merges,
            np.logical_or(self.partly_filled, other.partly_filled), self.forms | other.forms,
            max(self.phases, other.phases),
            self.pieces + other.pieces,
        )  # fmt: skip


@dataclass(frozen=True)
class Price:
    """Price of a plan.

    stages: [R] seconds by stage. calls: seconds of fixed costs of collectives. memory: [R, 2] bytes (device, host).
    pieces: number of memory figures that were added, each of which may be rounded up.
    """

    stages: Mapping[str, Array]
    calls: float
    memory: Array
    pieces: int

    @property
    def seconds(self) -> float:
        return sum(float(s.max()) for s in self.stages.values()) + self.calls


class Pricing:
    """Prices of plans for the same tables on the same machines."""

    def __init__(self, tables: Sequence[Table], world: World) -> None:
        self.tables, self.world = tuple(tables), world
        self.collections = max(1, len({t.collection for t in tables}))
        self.wide = 8 if any(t.fp64 for t in tables) else 4
        touched = sum(t.distinct(world.ranks) * t.dim * (t.element + t.cell_state) for t in tables) / world.ranks
        # Part of the touched bytes that is still in a rank's processor cache in the next step.
        self.resident = min(1.0, world.speeds.cache / touched) if touched > 0 else 1.0

    def price(self, plan: Mapping[str, Placement]) -> Price:
        """Return the price of a plan, given placements by the tables' keys."""
        total = self.nothing()
        wide = any(t.r1 - t.r0 >= 2**31 for placed in plan.values() for t in placed.tiling.tiles())
        for table in self.tables:
            total = total + self.of_table(table, plan[table.key], 8.0 if wide else 4.0)
        return self.finished(total)

    def nothing(self) -> Sums:
        ranks = self.world.ranks
        exchange = (len(EXCHANGES), 2, ranks)
        return Sums(np.zeros((len(STAGES), ranks)), np.zeros(exchange), np.zeros(exchange), np.zeros((ranks, 2)))

    # -------------------------------------------------------------------------------------------- all tables

    def finished(self, total: Sums) -> Price:
        """Return the price of all tables together."""
        world, speeds = self.world, self.world.speeds
        near, far = total.near.copy(), total.far.copy()
        # Every rank sends every other one a number in the header.
        header = EXCHANGES.index("header")
        for rank in range(world.ranks):
            own = world.size[world.host[rank]]
            near[header, :, rank] += 4.0 * (own - 1)
            far[header, :, rank] += 4.0 * (world.ranks - own)
        stages = {name: seconds.copy() for name, seconds in zip(STAGES, total.local, strict=True)}
        stages["ids"] += speeds.step * self.collections
        # Bags may have no row: the output begins as zeros.
        stages["gradients"] += np.where(total.partly_filled, 0.5 * total.output * speeds.copy, 0.0)
        for x, name in enumerate(EXCHANGES):
            stage, between = STAGE_OF[name], far[x]
            stages[stage] += self._seconds(near[x], speeds.link_out, speeds.link_in)
            if world.several and world.shared_nic:
                between, stage = self._mean_of_hosts(between), f"{stage} between hosts"
            stages.setdefault(stage, np.zeros(world.ranks))
            stages[stage] += self._seconds(between, speeds.network_out, speeds.network_in)
        calls = 1 + 3 * total.travels + 2 * total.merges + total.phases
        if total.forms:
            # Counts; ids and gradients; an all-reduce; of shares the numbers of rows, counts, ids and gradients.
            calls += bool(total.forms - {BARE}) + 2 * bool(total.forms & {BAGS, ROWS, SHARES})
            calls += bool(total.forms & {DENSE, BARE}) + 4 * (SHARES in total.forms)
        memory = total.memory.copy()
        memory[:, world.tier] += 2.0 * total.output  # the output and its gradient
        return Price(stages, calls * world.call * self.collections, memory, total.pieces + 2)

    def _seconds(self, both: Array, out_rate: float, in_rate: float) -> Array:
        """Return [R] seconds of one exchange: the slower direction if links are full duplex, else the sum of both."""
        out, into = both[OUT] * out_rate, both[IN] * in_rate
        return np.maximum(out, into) if self.world.speeds.duplex else out + into

    def _mean_of_hosts(self, both: Array) -> Array:
        """Return the means over the ranks of each host, which share its network card."""
        host, found = self.world.host, np.zeros_like(both)
        for rank in range(self.world.ranks):
            same = [r for r in range(self.world.ranks) if host[r] == host[rank]]
            found[:, rank] = both[:, same].sum(1) / len(same)
        return found

    # -------------------------------------------------------------------------------------------- one table

    def of_table(self, table: Table, placed: Placement, id_bytes: float = 4.0) -> Sums:
        """Return the sums of one table."""
        return _OfTable(self, table, placed, id_bytes).result()


class _OfTable:
    def __init__(self, pricing: Pricing, table: Table, placed: Placement, id_bytes: float) -> None:
        self.pricing, self.world, self.table = pricing, pricing.world, table
        self.tiling, self.cached, self.sums_in_hosts = placed
        if self.tiling.head is not None:  # the planner's hot rows are first rows here: no case names ids
            hot = self.tiling.head.hot.ids
            assert table.ordered
            assert hot[-1] == len(hot) - 1
            self.table = table = replace(table, hot=len(hot), known={})
            self.tiling = self.tiling.held
        self.speeds, self.wide, self.id_bytes = self.world.speeds, pricing.wide, id_bytes
        self.everyone = range(self.world.ranks)
        self.found = pricing.nothing()
        self.every = table.distinct(self.world.ranks)
        # Ids and bags that an owner of a part reads for all its homes.
        self.reads: defaultdict[Any, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.units: defaultdict[tuple[int, int, tuple[int, ...]], list[Tile]] = defaultdict(list)
        for tile in rectangles(self.tiling):
            self.units[(tile.r0, tile.r1, tile.owners)].append(tile)
        for feature in table.features:
            self._feature(feature)
        self._rectangles()
        self._replicas()
        self._row_sums()

    def result(self) -> Sums:
        found, table = self.found, self.table
        found.output = sum(f.bags for f in table.features) * table.dim * float(self.wide)
        cut = any((r0, r1) != (0, table.rows) for r0, r1, _ in self.units)
        empty = any(f.length < 1.0 for f in table.features)
        found.partly_filled = np.array(
            [empty or (cut and not all(self._once(f, home) for f in table.features)) for home in self.everyone]
        )
        return found

    def _send(self, exchange: str, source: int, target: int, count: float) -> None:
        """Add `count` bytes from one rank to another."""
        if source == target:
            return
        x = EXCHANGES.index(exchange)
        to = self.found.near if self.world.host[source] == self.world.host[target] else self.found.far
        to[x, OUT, source] += count
        to[x, IN, target] += count

    def _hold(self, rank: int, count: float) -> None:
        self.found.memory[rank, self.world.tier] += count
        self.found.pieces += 1

    def _work(self, stage: str, rank: int, seconds: float) -> None:
        self.found.local[STAGES.index(stage), rank] += seconds

    # ---------------------------------------------------------------------------------------- a feature's ids and rows

    def _routes(self) -> list[list[tuple[int, int, tuple[int, ...]]]]:
        """Return parts by route.

        Column blocks with other row ranges or owners need a separate route for the parts that no earlier route feeds.
        """
        routes, fed, seen = [], set(), set()
        for block in self.tiling.blocks:
            if (block.cuts, block.owners) in seen:
                continue
            seen.add((block.cuts, block.owners))
            ranges = zip(block.cuts, block.cuts[1:], block.owners, strict=False)
            parts = [part for part in ranges if part not in fed]
            fed.update(parts)
            if parts:
                routes.append(parts)
        return routes

    def _bytes_of_row(self, wire: tuple[int, int], units: Sequence[Tile]) -> float:
        cell = self.wide if wire[0] == 4 else wire[0]
        return float(sum(cell * (u.c1 - u.c0) + wire[1] for u in units))

    def _feature(self, feature: Feature) -> None:
        routes = self._routes()
        groups = [group for route in routes for group in self._groups(route)]
        merged = {part for _, group in groups for part in group}
        for home in self.everyone if self.table.hot else ():
            each = HOT_ID if self.speeds.hot_id is None else self.speeds.hot_id
            on_cpu = self.world.topology.compute_device == "cpu"
            self._work("ids", home, feature.bags * feature.length * each if on_cpu else HOT_FEATURE)
        for route in routes:
            for home in self.everyone:
                self._work("ids", home, feature.bags * feature.length * self.speeds.route)
            for part in route:
                self._part(feature, part, part in merged)
        for host, group in groups:
            self._merge(feature, host, group)

    def _part(self, feature: Feature, part: tuple[int, int, tuple[int, ...]], merged: bool) -> None:
        """Add ids from every home to the part, rows back, and gradients to the part."""
        world, speeds, table = self.world, self.speeds, self.table
        r0, r1, owners = part
        units = self.units[part]
        width = sum(u.c1 - u.c0 for u in units)
        forward, backward = (self._bytes_of_row(wire, units) for wire in (table.forward, table.backward))
        element = table.element
        if len(owners) < world.ranks:
            self.found.travels = True
        for home in self.everyone:
            owner = world.reader(owners, home)
            far = world.host[owner] != world.host[home]
            bags, ids = self._counts(feature, r0, r1, home)
            written = self._counts(feature, r0, r1, None)[0]  # rows of repeated ids are copied to all their bags
            lengths = bags if ids - bags > 0.5 else 0.0  # if each bag has one id, lengths are not sent
            payload = ids * (self.id_bytes + self.wide * feature.weighted) + 4.0 * lengths
            for i, count in enumerate((ids, bags)):
                self.reads[part, owner][i] += count
            self._send("header", home, owner, 8.0)
            self._send("ids", home, owner, payload)
            if not (merged and far):
                self._send("rows", owner, home, bags * forward)
                self._send("gradients", home, owner, bags * backward)
                self._work("gradients", home, written * (world.rate("place", width) + world.rate("pick", width)))
            # Work of the owner for this home. Rows read from memory are added in `_rectangles`.
            for unit in units:
                own = unit.c1 - unit.c0
                self._work("lookup", owner, ids * world.rate("lookup_near", own * element / 4.0))
                self._work("lookup", owner, bags * world.rate("lookup_bag", own))
            self._work("lookup", owner, payload * speeds.copy)
            self._work("ids", owner, speeds.part)
            self._hold(owner, payload * (1 + DEPTH) + bags * width * self.wide + ids * SORT_BYTES)
            # Work of the home.
            self._work("ids", home, 2.0 * payload * speeds.copy + speeds.part)
            self._hold(home, bags * width * self.wide + payload * (1 + DEPTH))

    def _counts(self, feature: Feature, r0: int, r1: int, home: int | None) -> tuple[float, float]:
        """Return bags and ids of a home's batch in rows [r0, r1); of home None, with all repetitions."""
        if home is not None and self._once(feature, home):
            distinct = self.table.found(feature.bags * feature.length, r0, r1)
            return distinct, distinct
        q = self.table.share(r0, r1)
        return feature.bags * _hit(q, feature.length), feature.bags * feature.length * q

    def _once(self, feature: Feature, home: int) -> bool:
        """Return True if a home sends each distinct id of a feature once."""
        forced, table = self.table.distinct_wire, self.table
        if feature.weighted or feature.length > 1.0 or forced is False:
            return False
        if self.world.topology.compute_device != "cpu" and not forced:
            return False
        away = sum(
            (r1 - r0) * sum(u.c1 - u.c0 for u in units)
            for (r0, r1, owners), units in self.units.items()
            if self.world.reader(owners, home) != home
        ) / ((table.rows + table.hot) * table.dim)
        if forced or not away:
            return away > 0.0
        if away <= 0.07:
            return False
        distinct = table.found(feature.bags * feature.length, 0, table.rows + table.hot)
        return 100.0 * distinct <= feature.bags * int(100 * (1 - 0.07 / away))

    # ---------------------------------------------------------------------------------------- sums inside hosts

    def _groups(
        self, route: Sequence[tuple[int, int, tuple[int, ...]]]
    ) -> list[tuple[int, list[tuple[int, int, tuple[int, ...]]]]]:
        """Return (host, parts) for parts whose rows are summed on the host before they are sent to other hosts."""
        if not (self.world.several and self.sums_in_hosts and self.table.pooled):
            return []
        found: defaultdict[Any, list[Any]] = defaultdict(list)
        for part in route:
            if len(part[2]) == 1:
                columns = tuple((u.c0, u.c1) for u in self.units[part])
                found[(self.world.host[part[2][0]], columns)].append(part)
        return [(host, parts) for (host, _), parts in found.items() if len({p[2] for p in parts}) > 1]

    def _merge(self, feature: Feature, host: int, group: Sequence[tuple[int, int, tuple[int, ...]]]) -> None:
        world, table = self.world, self.table
        self.found.merges = True
        units = self.units[group[0]]
        width = sum(u.c1 - u.c0 for u in units)
        shares = [table.share(r0, r1) for r0, r1, _ in group]
        owners = sorted({part[2][0] for part in group})
        place, pick = world.rate("place", width), world.rate("pick", width)
        elsewhere = [home for home in self.everyone if world.host[home] != host]
        for turn, home in enumerate(elsewhere):  # to ranks of the same host, rows are sent without sums: `_part`
            proxy = owners[turn % len(owners)]
            bags = [self._counts(feature, r0, r1, home)[0] for r0, r1, _ in group]
            union = feature.bags * _hit(min(1.0, math.fsum(shares)), feature.length)
            if self._once(feature, home):
                union = sum(bags)
            positions = 4.0 * sum(p for p in bags if union - p > 0.5)
            self._send("header", home, proxy, 4.0 * (1 + len(group)))
            self._send("ids", home, proxy, positions)
            self._send("rows", proxy, home, union * self._bytes_of_row(table.forward, units))
            self._send("gradients", home, proxy, union * self._bytes_of_row(table.backward, units))
            written = feature.bags * _hit(min(1.0, math.fsum(shares)), feature.length)
            self._work("gradients", home, written * (place + pick))
            self._work("rows", proxy, sum(bags) * place)
            self._work("gradients", proxy, sum(bags) * pick)
            for part, present in zip(group, bags, strict=True):
                self._send("rows in host", part[2][0], proxy, present * width * self.wide)
                self._send("gradients in host", proxy, part[2][0], present * width * self.wide)

    # ---------------------------------------------------------------------------------------- rectangles and updates

    def _update(self, ids: float, bags: float, distinct: float, width: int) -> float:
        """Add the update: sort ids, sum the gradients of bags, change each distinct row and its state."""
        world, table = self.world, self.table
        row = width * (table.element + (table.cell_state if table.attached else 0)) / 4.0
        far = distinct * (1.0 - self.pricing.resident)
        line = 0.5 * world.rate("update_far", 0.0) if table.row_state else 0.0
        return (
            ids * world.rate("update_id", width)
            + bags * world.rate("update_bag", width)
            + far * (world.rate("update_far", row) + line)
            + (distinct - far) * world.rate("update_near", row)
        )

    def _rectangles(self) -> None:
        """Add rows read from memory, updates, weights and state."""
        world, table = self.world, self.table
        twice = table.distinct(2 * world.ranks)
        again = (2.0 * self.every - twice) / max(self.every, 1e-9)  # read in the step before, too
        stays = self.pricing.resident * min(max(again, 0.0), 1.0)
        for (r0, r1, owners), units in self.units.items():
            every = table.found(table.ids * world.ranks, r0, r1)
            homes = Counter(world.reader(owners, home) for home in self.everyone)
            for owner in owners:
                reads = homes[owner]
                from_memory = table.found(table.ids * reads, r0, r1) * (1.0 - stays) if reads else 0.0
                for unit in units:
                    width, rows = unit.c1 - unit.c0, r1 - r0
                    row = width * table.element / 4.0
                    dearer = max(world.rate("lookup_far", row) - world.rate("lookup_near", row), 0.0)
                    self._work("lookup", owner, from_memory * dearer)
                    if len(owners) == 1:
                        ids, bags = self.reads[(r0, r1, owners), owner]
                        self._work("update", owner, self._update(ids, bags, every, width))
                    if not table.attached:
                        self._work("update", owner, 3.0 * rows * width * table.element * self.speeds.copy)
                    if self.cached and r0 < table.rows:  # copies of hot rows are on the device
                        self._behind_a_cache(owner, r0, r1, every, width)
                    else:
                        self._hold(owner, table.weights(rows, width))

    def _behind_a_cache(self, owner: int, r0: int, r1: int, every: float, width: int) -> None:
        """Add host memory for rows, device memory for lines, and transfers: rows missed, and as many rows evicted."""
        table, rows = self.table, r1 - r0
        weights = table.weights(rows, width)
        self.found.memory[owner, 1] += weights
        held = CACHE_SET * math.ceil(table.load_factor * rows / CACHE_SET)
        spare = max(every - held, 0.0)
        self._hold(owner, (held + spare) * (weights / rows + CACHE_LINE_BYTES) + rows * CACHE_ROW_BYTES)
        moved = table.misses(self.world.ranks, r0, r1) * 2.0 * weights / rows
        self._work("lookup", owner, moved * self.world.to_host)

    # ---------------------------------------------------------------------------------------- copies

    def _form(self, rows: int, dim: int, bags: float, ids: float, copies: int) -> int:
        """Return the form in which replicas exchange gradients: the one that sends the fewest bytes.

        Args:
            rows, dim: of the rectangle. bags, ids: of each copy.
        """
        if not self.table.attached:
            return BARE
        others = copies - 1.0
        as_bags = others * copies * (4.0 * dim * round(bags) + 4.0 * round(ids))
        as_rows = others * copies * (4.0 * dim + 4.0) * min(round(ids), rows)
        as_dense = 8.0 * (dim + 1.0) * rows * others
        touched = min(round(ids), rows)
        together = rows * (1.0 - missed(touched / max(rows, 1), copies))
        as_shares = others * (4.0 * dim + 4.0) * (touched + together)
        weighted = any(f.weighted for f in self.table.features)
        direct = min(as_rows, math.inf if weighted else as_bags) if copies <= MOST_COPIES else math.inf
        if copies == self.world.ranks and as_dense < direct and as_dense <= as_shares:
            return DENSE
        if as_shares < direct:
            return SHARES
        return BAGS if direct == as_bags and direct < as_rows else ROWS

    def _replicas(self) -> None:
        """Add the exchange of gradients between owners of copies; each owner applies all gradients."""
        world, table, speeds, wide = self.world, self.table, self.speeds, self.wide
        for tile in rectangles(self.tiling):
            copies = len(tile.owners)
            if copies == 1:
                continue
            rows, dim, homes = tile.r1 - tile.r0, tile.c1 - tile.c0, world.ranks / copies
            part = (tile.r0, tile.r1, tile.owners)
            all_ids, all_bags = (sum(self.reads[part, owner][i] for owner in tile.owners) for i in (0, 1))
            ids, bags = all_ids / copies, all_bags / copies
            form = self._form(rows, dim, bags, ids, copies)
            self.found.forms |= {form}
            own, every = (table.found(table.ids * count, tile.r0, tile.r1) for count in (homes, world.ranks))
            word = 4.0 if rows < 2**31 else 8.0
            # Bytes to each other copy, and bytes that an all-reduce adds up.
            numbers = {BAGS: (2.0 * len(table.features) * homes + bags + ids) * word, ROWS: own * word}.get(form, 0.0)
            gradients = {BAGS: bags, ROWS: own}.get(form, 0.0) * dim * wide
            sent = numbers + gradients + 32.0 * (form != BARE)
            sent += (32.0 + 8.0 + 2.0 * word) * (form == SHARES)
            # In shares: own rows with length and number to the replicas that add them up, then the sums to all.
            shared = (2.0 * own + every) * word + (own + every) * dim * wide
            reduced = {
                DENSE: (dim + 1.0) * rows * wide, BARE: float(dim * rows * table.element), SHARES: shared / 2.0
            }.get(form, 0.0)  # fmt: skip
            summed = bags * world.rate("update_bag", dim) + ids * world.rate("update_id", dim)
            summed += 2.0 * own * dim * wide * speeds.copy
            seconds = numbers * copies * speeds.copy + speeds.replica
            if form == SHARES:
                seconds += summed + own * (world.rate("update_bag", dim) + world.rate("update_id", dim))
                seconds += 2.0 * reduced * speeds.copy
            else:
                seconds += 6.0 * reduced * speeds.copy
            seconds += bags * world.rate("pick", dim) if form == BAGS else 0.0
            seconds += summed if form in (ROWS, DENSE) else 0.0
            update_ids = {BAGS: all_ids, ROWS: own * copies}.get(form, every)
            update = self._update(update_ids, all_bags if form == BAGS else update_ids, every, dim)
            others = copies - 1.0
            ring = 2.0 * reduced / copies  # to each other copy
            for owner in tile.owners:
                self._work("update", owner, seconds + update)
                self._hold(owner, 2.0 * (sent * others + reduced))
                for other in tile.owners:
                    self._send("replicas", owner, other, sent + ring)

    # ---------------------------------------------------------------------------------------- column blocks

    def _row_sums(self) -> None:
        """Add the exchange of sums between column blocks, for optimizers that need sums over whole rows."""
        table, blocks = self.table, self.tiling.blocks
        if not table.phases or len({b.owners for b in blocks}) == 1:
            return
        self.found.phases = table.phases
        different = {block.owners: block for block in reversed(blocks)}
        for block in blocks:
            others = [other for owners, other in different.items() if owners != block.owners]
            for r0, r1, owners in zip(block.cuts, block.cuts[1:], block.owners, strict=False):
                for owner in owners:
                    distinct = table.found(table.ids * self.world.ranks, r0, r1)
                    cells = distinct * (block.c1 - block.c0) * self.wide
                    self._work("update", owner, self.speeds.row_sum + 6.0 * cells * self.speeds.copy)
                    for other in others:
                        for s0, s1, peers in zip(other.cuts, other.cuts[1:], other.owners, strict=False):
                            rows = table.found(table.ids * self.world.ranks, max(r0, s0), max(r0, s0, min(r1, s1)))
                            # The additional number is the flag that the row is finite.
                            count = rows * 4.0 * (table.sums + 1.0)
                            for peer in peers:
                                self._send("row sums", owner, peer, count / len(peers))
