"""What a planner knows of tables and of the ids that read them.

Nouns
  reads     one feature's ids on one rank in one step: bags, and ids per bag
  work      one table: its shape, optimizer, and reads
  skew      how unevenly ids are drawn; none: every row is as likely
  workload  many tables' works as arrays, one number per table

Ids of a rank and a bag are drawn one independently of another. Bags of 2.5 ids have two or three.

Legend: T tables, F features (reads).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilerec.comms.codec import codec
from tilerec.errors import ConfigError
from tilerec.planner.cost.portable import LN2, Floats, distinct_uniform, exponential, missed
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.spec.plan import Wire
from tilerec.spec.table import DataType, data_type_to_dtype

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_LONGEST = 40  # log2 of the steps after which a cache has seen all there is

LOAD_FACTOR = 0.2
"""Default share of a cached table's rows that its device cache has lines for."""


@dataclass(frozen=True)
class Skew:
    """How ids are spread over a table's rows.

    Args:
        distinct: how many different ids occur.
        exponent: s of Zipf's law: the k-th most frequent id has a share proportional to k ** -s; 0: all alike.
        ordered: ids are numbered by frequency, the most frequent first, so even ranges of rows have uneven traffic.
            Otherwise frequent ids lie anywhere (hashed).
    """

    distinct: int
    exponent: float = 0.0
    ordered: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.distinct, bool) or not isinstance(self.distinct, int) or self.distinct < 1:
            raise ConfigError(f"Skew: distinct is {self.distinct!r}; it must be a whole number from 1.")
        if not isinstance(self.exponent, (int, float)) or not 0 <= self.exponent <= 8:
            raise ConfigError(f"Skew: exponent is {self.exponent!r}; it must be a number from 0 to 8.")


@dataclass(frozen=True)
class Reads:
    """What one feature reads on one rank in one step.

    Args:
        bags: samples of a rank's batch, times lookups per sample.
        ids_per_bag: on average.
        weighted: ids have weights.
    """

    bags: float
    ids_per_bag: float = 1.0
    weighted: bool = False

    def __post_init__(self) -> None:
        for name in ("bags", "ids_per_bag"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
                raise ConfigError(f"Reads: {name} is {value!r}; it must be a number from 0 (below 10^12).")


@dataclass(frozen=True)
class TableWork:
    """One table, and what a step does with it.

    Args:
        name: different for each table.
        rows, dim, data_type: of the table.
        optimizer: attached to it; None: a dense gradient, as large as the table, goes to `.grad`.
        reads: one for each feature.
        skew: how its ids are spread; None: evenly over all rows.
        wire: number formats of rows and gradients.
        each_id: the table's rows are not pooled (a sequence collection).
        collection: the module it belongs to: tables of one share their collectives.
        sums_in_hosts: rows of ranges that share a host are added up there before they travel to others; None: where a
            bag has several ids.
        cached: rows and their state lie in host memory, behind a cache on the device; load_factor: the part of the rows
            that the cache has lines for (0: none, every row that is read travels).
    """

    name: str
    rows: int
    dim: int
    data_type: DataType = DataType.FP32
    optimizer: OptimizerSpec | None = None
    reads: Sequence[Reads] = (Reads(512),)
    skew: Skew | None = None
    wire: Wire = field(default_factory=Wire)
    each_id: bool = False
    collection: str = ""
    cached: bool = False
    load_factor: float = LOAD_FACTOR
    sums_in_hosts: bool | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(
                    f"Table '{self.name}': {name} is {value!r}; it must be a whole number from 1."
                )
        object.__setattr__(self, "reads", tuple(self.reads))
        if not isinstance(self.load_factor, (int, float)) or not 0 <= self.load_factor <= 1:
            raise ConfigError(
                f"Table '{self.name}': load_factor is {self.load_factor!r}; it must be a number from 0 to 1."
            )
        if self.skew is not None and self.skew.distinct > self.rows:
            raise ConfigError(
                f"Table '{self.name}': got a skew of {self.skew.distinct} different ids; expected at most {self.rows}, "
                "the number of its rows. Measure again with `tilerec stats`."
            )

    @property
    def ids_per_bag(self) -> float:
        """The largest of its features'."""
        return 1.0 if self.each_id else max((r.ids_per_bag for r in self.reads), default=0.0)

    @property
    def fan_in(self) -> float:
        """Ids per bag as `sharding/layout.py` takes them: above 1, rows are added up inside hosts."""
        if self.each_id or self.sums_in_hosts is None:
            return self.ids_per_bag
        return 2.0 if self.sums_in_hosts else 1.0


class Workload:
    """The works of many tables, as arrays.

    names: [T]; rows, dim, element (bytes of a cell), cell_state, row_state (bytes of optimizer state, or of a dense
    gradient, per cell and per row), sums (numbers per row that column blocks tell each other), talks (how often):
    [T] int64. wide: bytes of a cell of a sum. forward, backward: [2, T] bytes of a cell and of a row on the wire.
    table: [F] of each feature, its bags, ids per bag and weighted: [F]. fan_in: [T].
    """

    def __init__(self, tables: Sequence[TableWork]) -> None:
        self.tables = tuple(tables)
        self.names = tuple(t.name for t in self.tables)
        repeated = len(set(self.names)) < len(self.names)
        if repeated:
            seen: set[str] = set()
            twice = next(name for name in self.names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise ConfigError(f"Table '{twice}' is there twice; give every table a name of its own.")
        kinds: dict[tuple[Any, ...], tuple[tuple[int, ...], tuple[float, ...]]] = {}
        about = []
        for t in self.tables:
            mark = (id(t.optimizer), t.data_type, t.wire)
            if mark not in kinds:
                kinds[mark] = _bytes_of(t), (*wire_bytes(t.wire.forward), *wire_bytes(t.wire.backward))
            about.append(kinds[mark])
        columns = np.array([own for own, _ in about], np.int64).reshape(len(self.tables), 5).T
        self.element, self.cell_state, self.row_state, self.sums, self.talks = columns
        formats = np.array([own for _, own in about], np.float64).reshape(len(self.tables), 4).T
        self.forward, self.backward = formats[:2], formats[2:]
        self.rows = np.array([t.rows for t in self.tables], np.int64)
        self.dim = np.array([t.dim for t in self.tables], np.int64)
        self.wide = 8 if any(t.data_type is DataType.FP64 for t in self.tables) else 4
        self.attached = np.array([t.optimizer is not None for t in self.tables], np.bool_)
        self.fan_in = np.array([t.fan_in for t in self.tables], np.float64)
        self.cached = np.array([t.cached for t in self.tables], np.bool_)
        self.load_factor = np.array([t.load_factor for t in self.tables], np.float64)
        self.collections = max(1, len({t.collection for t in self.tables}))
        reads = [(i, t.each_id, r) for i, t in enumerate(self.tables) for r in t.reads]
        self.table = np.array([i for i, _, _ in reads], np.int64)
        self.bags = np.array([r.bags * (r.ids_per_bag if e else 1.0) for _, e, r in reads], np.float64)
        self.ids_per_bag = np.array([1.0 if e else r.ids_per_bag for _, e, r in reads], np.float64)
        self.weighted = np.array([r.weighted and not e for _, e, r in reads], np.bool_)
        # The k-th feature of every table that has one: sums over features in a fixed order.
        first = np.searchsorted(self.table, np.arange(len(self.tables)))
        place = np.arange(len(reads)) - first[self.table] if reads else np.zeros(0, np.int64)
        self.turns = [np.flatnonzero(place == k) for k in range(int(place.max()) + 1 if reads else 0)]
        self._skewed = np.array([t.skew is not None for t in self.tables], np.bool_)
        self.ordered = np.array([t.skew is not None and t.skew.ordered for t in self.tables], np.bool_)
        self.ids = self.per_table(self.bags * self.ids_per_bag)
        self._zipf: _Zipf | None = None

    def part(self, tables: Sequence[TableWork]) -> Workload:
        """Some of the tables, in steps of all of them: of as many collections, with sums as wide."""
        found = Workload(tables)
        found.collections, found.wide = self.collections, self.wide
        return found

    def per_table(self, per_feature: Floats) -> Floats:
        """[T] sums over features, in the features' order."""
        total = np.zeros(len(self.tables))
        for features in self.turns:
            total[self.table[features]] += per_feature[features]
        return total

    def present(self, share: Any, tables: Ints | None = None) -> tuple[Floats, Floats, Floats]:
        """Of a home's batch: bags with an id in a `share` of the rows ([T]), ids there, and lengths that travel.

        A part's lengths travel unless each of its bags has one id.
        """
        share = np.broadcast_to(np.asarray(share, np.float64), (len(self.tables),))[self.table]
        bags = self.bags * (1.0 - missed(share, self.ids_per_bag))
        ids = self.bags * self.ids_per_bag * share
        lengths = np.where(ids - bags > 0.5, bags, 0.0)
        return self.per_table(bags), self.per_table(ids), self.per_table(lengths)

    def positions(self, share: Any, whole: Any) -> Floats:
        """Of a home's batch, bags with an id in a `share` of the rows ([T]) that are fewer than those in the `whole`.

        Where a member's bags are not all of a host's sum, it is sent their positions.
        """
        shares = (
            np.broadcast_to(np.asarray(s, np.float64), (len(self.tables),))[self.table]
            for s in (share, whole)
        )
        bags, union = (self.bags * (1.0 - missed(s, self.ids_per_bag)) for s in shares)
        return self.per_table(np.where(union - bags > 0.5, bags, 0.0))

    @property
    def zipf(self) -> _Zipf:
        """The laws of the tables that have one."""
        if self._zipf is None:
            which = np.flatnonzero(self._skewed)
            skews = [self.tables[t].skew for t in which.tolist()]
            self._zipf = _Zipf(
                which,
                np.array([s.distinct for s in skews if s is not None], np.float64),
                np.array([s.exponent for s in skews if s is not None], np.float64),
            )
        return self._zipf

    def distinct(self, ranks: Any) -> Floats:
        """[T] expected distinct rows that the batches of so many ranks read (a number, or one for each table)."""
        draws = self.ids * ranks
        found = distinct_uniform(self.rows, draws)
        zipf = self.zipf
        if len(zipf.which):
            found[zipf.which] = zipf.distinct(draws[zipf.which])
        return found

    def missed(self, ranks: int) -> Floats:
        """[T] rows of a step of so many ranks that a cache of `load_factor` times the rows does not hold.

        A cache that lets the row go which was not used for longest holds the rows of the last s steps, where
        U(s W) = its lines; of this step's rows, U((s + 1) W) - U(s W) are not among them. A cache that cannot hold one
        step's rows holds none of them.

        1,000 rows, all alike, and half of them in the cache: half of a step's rows are missed.
        """
        lines = self.load_factor * self.rows
        step = self.distinct(ranks)
        # s from above by doubling, then halving: powers of two and their means are the same on every machine.
        low = np.ones(len(self.tables))
        for k in range(_LONGEST):
            low = np.where(self.distinct(ranks * 2.0**k) < lines, 2.0**k, low)
        high = 2.0 * low
        for _ in range(12):
            middle = (low + high) / 2.0
            fewer = self.distinct(ranks * middle) < lines
            low, high = np.where(fewer, middle, low), np.where(fewer, high, middle)
        found = self.distinct(ranks * (low + 1.0)) - self.distinct(ranks * low)
        found = np.where(step > lines, step, np.clip(found, 0.0, step))
        # Where all rows that ever occur fit, nothing is missed.
        return np.where(self.distinct(ranks * 2.0**_LONGEST) <= lines, 0.0, found)

    def share(self, table: Any, r0: Any, r1: Any) -> Floats:
        """The share of a table's traffic that falls on rows [r0, r1); arrays that broadcast."""
        table = np.asarray(table, np.int64)
        rows = self.rows[table].astype(np.float64)
        even = (np.asarray(r1, np.float64) - r0) / rows
        if not np.any(self.ordered[table]):
            return even
        position = np.full(len(self.tables), -1)
        position[self.zipf.which] = np.arange(len(self.zipf.which))
        law = self.zipf.below(position[table], r1) - self.zipf.below(position[table], r0)
        return np.where(self.ordered[table], law, even)


class _Zipf:
    """Zipf's law of some tables, on buckets of ranks [2 ** (j/2), 2 ** ((j+1)/2)), each with its mean frequency."""

    def __init__(self, which: Ints, distinct: Floats, exponent: Floats) -> None:
        self.which, self.size = which, distinct
        most = float(distinct.max()) if len(which) else 1.0
        edges = [1.0]
        while edges[-1] <= most:
            # The first ids one by one, then in buckets that grow by a quarter.
            edges.append(max(edges[-1] + 1.0, math.floor(edges[-1] * 1.25)))
        self.edges = edges
        self.weights: list[Floats] = []  # of one id of each bucket, then its share
        self.counts: list[Floats] = []
        total = np.zeros(len(which))
        for low, high in itertools.pairwise(edges):
            counts = np.clip(distinct + 1.0 - low, 0.0, high - low)
            middle = low + (np.maximum(counts, 1.0) - 1.0) / 2.0
            weights = exponential(-exponent * _log(middle))
            self.counts.append(counts)
            self.weights.append(weights)
            total = total + counts * weights
        self.weights = [weights / total for weights in self.weights]

    def distinct(self, draws: Floats) -> Floats:
        found = np.zeros(len(self.which))
        for counts, share in zip(self.counts, self.weights, strict=True):
            found = found + counts * (1.0 - missed(share, draws))
        return np.minimum(found, draws)

    def below(self, position: Ints, row: Any) -> Floats:
        """Share of the ids below `row`, where ids are numbered by frequency."""
        row = np.asarray(row, np.float64)
        found = np.zeros(np.broadcast_shapes(position.shape, row.shape))
        for low, counts, share in zip(self.edges, self.counts, self.weights, strict=False):
            found = found + np.clip(row + 1.0 - low, 0.0, counts[position]) * share[position]
        return found


def _log(x: Floats) -> Floats:
    """Natural logarithm from +, -, * and /: x = m 2^e, ln m by the series of artanh."""
    mantissa, exponent = np.frexp(x)
    z = (mantissa - 0.75) / (mantissa + 0.75)
    square, term, total = z * z, z, np.zeros_like(z)
    for k in range(1, 24, 2):
        total = total + term / k
        term = term * square
    return 2.0 * total + exponent * LN2 - 0.2876820724517809  # ln 0.75


def _bytes_of(table: TableWork) -> tuple[int, ...]:
    """Cell, cell state, row state, sums, talks."""
    assert isinstance(table.data_type, DataType)
    element = data_type_to_dtype(table.data_type).itemsize
    wide = 8 if table.data_type is DataType.FP64 else 4
    spec = table.optimizer
    slots = () if spec is None else spec.slots
    cell = element if spec is None else wide * sum(slot.per == "element" for slot in slots)
    row = wide * sum(slot.per == "row" for slot in slots)
    partials = () if spec is None else spec.partials
    return (element, cell, row, sum(partials), len(partials))


def wire_bytes(name: str) -> tuple[float, float]:
    """Return the bytes of a cell, and those of a row besides, in a wire format. Example: "int8" -> (1, 4)."""
    row = codec(name).row_bytes(0)
    return (codec(name).row_bytes(1 << 16) - row) / (1 << 16), row
