"""Tables and the ids that read them, as the cost model sees them.

Nouns
  reads     the ids of one feature on one rank in one step: number of bags, and ids per bag
  work      one table: its shape, optimizer, and reads
  skew      the distribution of ids over rows; without it, every row is equally likely
  workload  the works of many tables as arrays, with one number per table

Ids are independent draws. Bags of 2.5 ids have two or three.

Legend: T tables, F features (reads).
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from tilerec.comms.codec import codec
from tilerec.errors import ConfigError
from tilerec.planner.cost.frequency import Curve, FrequencyLaws, Places, RangeSums, Seen, curve_problem, spread
from tilerec.planner.cost.hot_reads import HotReads
from tilerec.planner.cost.portable import Draws, Floats
from tilerec.spec.hot_rows import distinct_ids
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.spec.plan import Wire
from tilerec.spec.table import DataType, data_type_to_dtype

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_MOST_STEPS_LOG2 = 40  # after 2 ** 40 steps, a cache has seen all rows that occur
_HALVINGS = 12  # of the interval for the number of steps whose rows a cache holds

LOAD_FACTOR = 0.2
"""Default size of a device cache, as a part of the rows of its table."""


MOST_EXPONENT = 8
"""Largest exponent of Zipf's law; at 8, the most frequent id has 99.6 % of all reads."""


@dataclass(frozen=True)
class Skew:
    """Distribution of ids over the rows of a table.

    Args:
        distinct: number of distinct ids that occur.
        exponent: s of Zipf's law: the share of the k-th most frequent id is proportional to k ** -s; 0: uniform.
        ordered: ids are numbered by frequency, the most frequent first, so even ranges of rows have uneven traffic.
            If False, frequent ids are anywhere (hashed ids).
        curve: measured points (k, share of the reads of the k most frequent ids), k ascending; the other ids follow
            Zipf's law. (): all do.
        hot: the most frequent ids, the most frequent one first: the planner may keep copies of their rows on every
            rank. (): they are not known. Held as an array of int64, which must not be written: a tuple takes five times
            as much memory.
    """

    distinct: int
    exponent: float = 0.0
    ordered: bool = False
    curve: Curve = ()
    hot: Sequence[int] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        if isinstance(self.distinct, bool) or not isinstance(self.distinct, int) or self.distinct < 1:
            raise ConfigError(
                f"Skew: got distinct={self.distinct!r}; expected a whole number from 1. Measure with `tilerec stats`."
            )
        if not isinstance(self.exponent, (int, float)) or not 0 <= self.exponent <= MOST_EXPONENT:
            raise ConfigError(
                f"Skew: got exponent={self.exponent!r}; expected a number from 0 to {MOST_EXPONENT}. Measure with "
                "`tilerec stats`."
            )
        try:
            curve = tuple((operator.index(k), float(share)) for k, share in self.curve)
        except (TypeError, ValueError):
            curve = ((0, 0.0),)
        wrong = curve_problem(curve, self.distinct)
        if wrong is not None:
            raise ConfigError(
                f"Skew: got the curve {list(self.curve)[:3]!r:.200} ...; expected {wrong}. Measure again with "
                "`tilerec stats`."
            )
        object.__setattr__(self, "curve", curve)
        move = "Measure again with `tilerec stats`."
        hot = distinct_ids(self.hot, "Skew", move)
        if len(hot) > self.distinct:
            raise ConfigError(
                f"Skew: got {len(hot):,} hot ids; expected at most {self.distinct:,}, the different ids. {move}"
            )
        object.__setattr__(self, "hot", array("q", hot.tobytes()))
        vars(self)["largest_hot"] = int(hot.max(initial=-1))  # checked for each of 10,000 tables of 50,000 ids

    @cached_property
    def largest_hot(self) -> int:
        """The largest number among the hot ids; -1 without any."""
        return max(self.hot, default=-1)


@dataclass(frozen=True)
class Reads:
    """Ids of one feature on one rank in one step.

    Args:
        bags: samples of a rank's batch times lookups per sample.
        ids_per_bag: mean number of ids per bag.
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
    """The work of one table in a step.

    Args:
        name: unique name.
        rows, dim, data_type: of the table.
        optimizer: attached to the table; None: `.grad` holds a dense gradient as large as the table.
        reads: one for each feature.
        skew: distribution of its ids; None: uniform over all rows.
        wire: number formats of rows and gradients between ranks.
        each_id: rows are not pooled (a sequence collection).
        collection: path of its module; tables of one module share their collectives.
        sums_in_hosts: rows of ranges on one host are added there before they cross to another host; None: if a bag has
            several ids.
        cached: rows and their state are in host memory, behind a cache on the device.
        load_factor: lines of that cache, as a part of the rows; 0: no cache, every row that is read moves.
        files: rows behind a cache are in files, not in host memory.
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
    files: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"Table '{self.name}': {name} is {value!r}; it must be a whole number from 1.")
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
        if self.skew is not None and self.skew.largest_hot >= self.rows:
            raise ConfigError(
                f"Table '{self.name}': got the hot id {self.skew.largest_hot}; expected ids of its {self.rows:,} rows. "
                "Measure again with `tilerec stats`, or leave out hot=."
            )

    @property
    def ids_per_bag(self) -> float:
        """The largest number of ids per bag of its features."""
        return 1.0 if self.each_id else max((r.ids_per_bag for r in self.reads), default=0.0)

    @property
    def fan_in(self) -> float:
        """Ids per bag in the form that `sharding/layout.py` takes: above 1, hosts add rows."""
        if self.each_id or self.sums_in_hosts is None:
            return self.ids_per_bag
        return 2.0 if self.sums_in_hosts else 1.0


class Workload:
    """The works of many tables as arrays.

    - [T] int64: rows, dim; element: bytes of a cell; cell_state, row_state: bytes of optimizer state, or of a dense
      gradient, per cell and per row; sums: numbers per row that column blocks exchange; talks: rounds of that exchange.
    - [2, T]: forward, backward: bytes of a cell and of a row on the wire.
    - [F]: table of each feature; its bags, ids_per_bag and weighted; single_ids: its bags have at most one id.
    - [T]: fan_in, attached, cached, load_factor; files: the table is in files.
    - [T]: ids: of one rank's batch; ordered: see `Skew`; named: number of its hot ids, 0 if it is ordered.
    - hot: heads of its tables; None: no table has one.
    - wide: bytes of a cell of a sum. collections: number of modules. turns: the k-th features of all tables, by k.
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
        self._take_shardings()
        self.collections = max(1, len({t.collection for t in self.tables}))
        reads = [(i, t.each_id, r) for i, t in enumerate(self.tables) for r in t.reads]
        self.table = np.array([i for i, _, _ in reads], np.int64)
        self.bags = np.array([r.bags * (r.ids_per_bag if e else 1.0) for _, e, r in reads], np.float64)
        self.ids_per_bag = np.array([1.0 if e else r.ids_per_bag for _, e, r in reads], np.float64)
        self.weighted = np.array([r.weighted and not e for _, e, r in reads], np.bool_)
        # Repeated ids of such a feature may travel once (sharding/distinct_ids.py); 1, 0 or -1 for `Wire.distinct`.
        self.single_ids = ~self.weighted & (self.ids_per_bag <= 1.0)
        self.forced = np.array(
            [{True: 1, False: 0}.get(self.tables[i].wire.distinct, -1) for i, _, _ in reads],  # type: ignore[arg-type]
            np.int64,
        )
        # Sums over features are taken in a fixed order: first the first features of all tables, then the second …
        first = np.searchsorted(self.table, np.arange(len(self.tables)))
        place = np.arange(len(reads)) - first[self.table] if reads else np.zeros(0, np.int64)
        self.turns = [np.flatnonzero(place == k) for k in range(int(place.max()) + 1 if reads else 0)]
        self.ordered = np.array([t.skew is not None and t.skew.ordered for t in self.tables], np.bool_)
        self.named = np.array(
            [0 if t.skew is None or t.skew.ordered else len(t.skew.hot) for t in self.tables], np.int64
        )
        self.hot: HotReads | None = None
        self._hot_orders: dict[int, Ints] = {}
        self.ids = self.per_table(self.bags * self.ids_per_bag)

    def _take_shardings(self) -> None:
        """Compute the arrays that depend on the shardings of tables."""
        self.fan_in = np.array([t.fan_in for t in self.tables], np.float64)
        self.cached = np.array([t.cached for t in self.tables], np.bool_)
        self.files = np.array([t.files for t in self.tables], bool)
        self.load_factor = np.array([t.load_factor for t in self.tables], np.float64)

    def with_hot(self, hot: HotReads) -> Workload:
        """Return this workload with heads."""
        found = copy(self)
        found.hot = hot
        for derived in ("_head_share", "_cold_reads"):
            vars(found).pop(derived, None)
        return found

    def with_tables(self, tables: Sequence[TableWork]) -> Workload:
        """Return this workload for the same tables and reads under other shardings (`Model.with_tables`)."""
        found = copy(self)
        found.tables, found.hot = tuple(tables), None
        found._take_shardings()
        return found

    def hot_order(self, table: int) -> Ints:
        """Return [h] the order that sorts the hot ids of a table's skew by id."""
        if table not in self._hot_orders:
            skew = self.tables[table].skew
            self._hot_orders[table] = np.argsort(np.asarray(array("q") if skew is None else skew.hot))
        return self._hot_orders[table]

    def part(self, tables: Sequence[TableWork]) -> Workload:
        """Return the workload of some tables, with the number of collections and the width of sums of this one."""
        found = Workload(tables)
        found.collections, found.wide = self.collections, self.wide
        return found

    def per_table(self, per_feature: Floats) -> Floats:
        """Return [T] sums over the features of each table, in their order."""
        return np.bincount(self.table, per_feature, len(self.tables)).astype(np.float64, copy=False)

    def present(self, share: Any, distinct: Floats | None = None, part: Any = 1.0) -> tuple[Floats, Floats, Floats]:
        """Return [T] counts of a home's batch for a range with a `share` [T] of the traffic.

        The counts are bags with an id in the range, ids in it, and lengths to send. Lengths are sent unless each bag
        has one id.

        Args:
            distinct: [F] distinct ids of features whose ids travel once each; -1 for other features.
            part: [T] share of the range in these.
        """
        share = np.broadcast_to(np.asarray(share, np.float64), (len(self.tables),))[self.table]
        bags = self.bags * (1.0 - self.draws.missed(share))
        ids = self.bags * self.ids_per_bag * share
        if distinct is not None:
            part = np.broadcast_to(np.asarray(part, np.float64), (len(self.tables),))[self.table]
            bags, ids = (np.where(distinct >= 0.0, distinct * part, own) for own in (bags, ids))
        lengths = np.where(ids - bags > 0.5, bags, 0.0)
        return self.per_table(bags), self.per_table(ids), self.per_table(lengths)

    def positions(self, share: Any, members: float, distinct: Floats | None = None, part: Any = 1.0) -> Floats:
        """Return [T] bags of a home with an id in a member's range, if the host's sum has more bags; else 0.

        Such a member receives the positions of its bags in the sum.

        Args:
            share: [T] traffic of each member. members: their number. distinct, part: as of `present`.
        """
        own, own_once = (
            np.broadcast_to(np.asarray(s, np.float64), (len(self.tables),))[self.table] for s in (share, part)
        )
        once = np.full(len(self.bags), -1.0) if distinct is None else distinct
        bags, union = (
            np.where(
                once >= 0.0,
                once * np.minimum(own_once * n, 1.0),
                self.bags * (1.0 - self.draws.missed(np.minimum(own * n, 1.0))),
            )
            for n in (1.0, members)
        )
        return self.per_table(np.where(union - bags > 0.5, bags, 0.0))

    @cached_property
    def draws(self) -> Draws:
        """[F] ids of a bag."""
        return Draws(self.ids_per_bag)

    @cached_property
    def laws(self) -> FrequencyLaws:
        """Frequencies of the ids of all tables with a skew."""
        skews = [(t, table.skew) for t, table in enumerate(self.tables) if table.skew is not None]
        return FrequencyLaws(
            len(self.tables),
            np.array([t for t, _ in skews], np.int64),
            np.array([skew.distinct for _, skew in skews], np.float64),
            np.array([skew.exponent for _, skew in skews], np.float64),
            [skew.curve for _, skew in skews],
        )

    def seen(self, table: Ints, draws: Any) -> Seen:
        """Return the expected distinct rows among so many ids of each of the given tables."""
        draws = np.broadcast_to(np.asarray(draws), table.shape)
        found = Seen(self.laws, self.rows, self.ordered, table, draws)
        return found if self.hot is None else found.with_hot(self.hot)

    def distinct(self, ranks: Any) -> Floats:
        """Return [T] expected distinct rows in the batches of so many ranks (a number, or [T])."""
        return self.seen(np.arange(len(self.tables)), self.ids * ranks).whole

    def missed(self, ranks: int, table: Ints | None = None, r0: Any = 0, r1: Any = None) -> Floats:
        """Return the rows of a step of so many ranks that are not in a cache of `load_factor` times the rows.

        A cache with least-recently-used eviction holds the rows of the last s steps, where U(s W) equals its number of
        lines. Of this step's rows, U((s + 1) W) - U(s W) are not among them. A cache that is smaller than one step's
        rows holds none of them.

        Example: 1,000 equally likely rows, and a cache for half of them: half of a step's rows are missed.

        Args:
            table: [n] tables; None: all. r0, r1: [n] their rows behind the cache; by default, all.
        """
        table = np.arange(len(self.tables)) if table is None else table
        r1 = self.rows[table] if r1 is None else r1
        lines, line = self.load_factor[table] * (r1 - r0), np.arange(len(table))

        def seen(steps: Any) -> Floats:
            return self.seen(table, self.ids[table] * (ranks * steps)).between(line, r0, r1)

        step = seen(1.0)
        # Find s by doubling, then by bisection: powers of two and their means are exact on every machine.
        low = np.ones(len(table))
        for k in range(_MOST_STEPS_LOG2):
            low = np.where(seen(2.0**k) < lines, 2.0**k, low)
        high = 2.0 * low
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            fewer = seen(middle) < lines
            low, high = np.where(fewer, middle, low), np.where(fewer, high, middle)
        found = seen(low + 1.0) - seen(low)
        found = np.where(step > lines, step, np.clip(found, 0.0, step))
        # If all rows that ever occur fit, none is missed.
        return np.where(seen(2.0**_MOST_STEPS_LOG2) <= lines, 0.0, found)

    def share(self, table: Any, r0: Any, r1: Any) -> Floats:
        """Return the share of a table's traffic on rows [r0, r1); rows behind the table are those of its head.

        Arguments broadcast.
        """
        table = np.asarray(table, np.int64)
        rows = self.rows[table].astype(np.float64)
        if self.hot is not None:
            head = self._head_share[table]
            even = spread(rows, self.hot.rows[table], r0, r1, 1.0 - head, head)
            if not np.any(self.ordered[table]):
                return even
            column, low, high = self.laws.position[table], np.minimum(r0, rows), np.minimum(r1, rows)
            law = self._cold_reads.below(column, high) - self._cold_reads.below(column, low)
            return np.where(self.ordered[table], law + spread(rows, self.hot.rows[table], r0, r1, 0.0, head), even)
        even = (np.asarray(r1, np.float64) - r0) / rows
        if not np.any(self.ordered[table]):
            return even
        law = self.laws.reads(table, r1)
        if np.any(r0):
            law = law - self.laws.reads(table, r0)
        return np.where(self.ordered[table], law, even)

    def reads_below(self, table: Ints, places: Places) -> Floats:
        """Return the share of the traffic of tables with ordered ids below places; without that of hot ids."""
        if self.hot is None:
            return self.laws.reads_below(table, places)
        return self._cold_reads.at(self.laws.position[table], places)

    @cached_property
    def _head_share(self) -> Floats:
        """[T] share of a table's traffic on its head."""
        assert self.hot is not None
        found = self.hot.rows / self.rows
        found[self.laws.tables] = sum(self.hot.inside * self.laws.weights)
        return found

    @cached_property
    def _cold_reads(self) -> RangeSums:
        """Shares of the ids of ordered tables that are not hot."""
        assert self.hot is not None
        return RangeSums(self.laws.edges, self.laws.counts, self.laws.weights * self.hot.cold(self.laws))


def _bytes_of(table: TableWork) -> tuple[int, ...]:
    """Return element, cell_state, row_state, sums, talks."""
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
