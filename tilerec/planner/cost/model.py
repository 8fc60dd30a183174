"""`Model`: the formulas that `price` and the planner's options share (docs/planner-cost.md).

Nouns
  stage     the work of a rank between two collectives; a step takes the sum over stages of the slowest rank's time
  piece     one rectangle of a table on one rank
  far       a row that is read from memory; other rows are in the processor's cache
  resident  the part of the bytes touched by one step that is still in the processor's cache in the next step
  missed    a row in host memory that is not in the device cache of its table

Legend: T tables, W ranks, N ids, U distinct rows, D columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.cost.frequency import Seen
from tilerec.planner.cost.hot_reads import HotReads
from tilerec.planner.cost.portable import Floats, missed
from tilerec.planner.cost.rates import Rates
from tilerec.planner.cost.workload import Bools, Ints, TableWork, Workload
from tilerec.sharding.distinct_ids import largest_percent
from tilerec.sharding.replicas import MOST_COPIES
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

STAGES = ("ids", "lookup", "rows", "gradients", "update")
NETWORK_STAGES = (
    "ids between hosts",
    "rows between hosts",
    "gradients between hosts",
    "update between hosts",
)
"""Stages of their own if the ranks of a host share a network card; else they belong to STAGE_OF_NETWORK.

The last one has the gradients of replicas and the row sums of column blocks.
"""
STAGE_OF_NETWORK = dict(zip(NETWORK_STAGES, ("ids", "rows", "gradients", "update"), strict=True))
NETWORK_OF_STAGE = {stage: network for network, stage in STAGE_OF_NETWORK.items()}
DEVICE, HOST = 0, 1
"""Memory tiers."""

COUNTS_BYTES = 32.0  # of a replica for each other: features, bags, ids, rows of a table (sharding/replica_messages.py)
KEY_BYTES = 16  # bytes per id while gradients are sorted: key and occurrence, twice
LINE_BYTES = 17  # bytes of a cache line besides its row and state: row number, last use, and a flag
ROW_BYTES = 4  # bytes on the device per row in host memory: the number of its cache line
LINES_PER_SET = 32  # cache lines per set
ROOM_FOR_RANGES = 0.25  # part of a rank's memory that the longest ranges of tables with ordered ids may take
HOT_ID = 8e-9  # seconds to look for an id among hot ones on a CPU, where this was not measured (docs/sharding.md)
HOT_PIECE = 3e-5  # seconds per piece to write hot rows back; measured on a CPU only (docs/planner-cost.md)
HOT_KEY = 6e-5  # seconds per feature on a GPU, where plain PyTorch looks for hot ids: 12 kernels of 5 us, not measured
FILE_ROW = 1e-5  # seconds per row in a file, where this was not measured
FILE_BYTES = 12288  # of a record that takes twice the time of a short one (docs/planner-cost.md)


class Model:
    """A workload on a topology.

    depth: batches whose ids are routed ahead. all_distinct: [T] distinct rows of all batches. resident: see above.
    again: [T] part of a step's distinct rows that the step before has read as well.

    Args:
        beside: tables of the model outside the workload, which use the same processor caches.
    """

    def __init__(
        self,
        workload: Workload,
        topology: Topology,
        pipeline_depth: int = 1,
        *,
        beside: Workload | None = None,
    ) -> None:
        self.workload, self.topology, self.depth = workload, topology, pipeline_depth
        self.speeds = topology.speeds or default_speeds(topology)
        self.rates = Rates(self.speeds)
        self.ranks = topology.world_size
        self.call = self.speeds.call + self.speeds.call_peer * max(0, self.ranks - 2)
        self.tier = HOST if topology.compute_device == "cpu" else DEVICE
        self.to_host = 1.0 / (1000.0 * topology.hbm_to_ddr_mem_bw)  # seconds per byte between device and host
        self.file_row = FILE_ROW if self.speeds.file_row is None else self.speeds.file_row
        self._seen: dict[float, Seen] = {}
        self._with_heads: dict[bytes, Model] = {}
        self._plain: Model | None = None  # of a model with heads: the one without
        self.all_distinct = self.seen(self.ranks).whole
        per_rank = _touched(workload, self.all_distinct) / self.ranks
        if beside is not None:
            per_rank += _touched(beside, beside.distinct(self.ranks)) / self.ranks
        self.resident = min(1.0, self.speeds.cache / per_rank) if per_rank > 0 else 1.0
        twice = workload.distinct(2 * self.ranks)
        self.again = (2.0 * self.all_distinct - twice) / np.maximum(self.all_distinct, 1e-9)

    def with_hot(self, hot: HotReads) -> Model:
        """Return this model for tables with heads."""
        found = copy(self)
        found.workload, found._seen, found._with_heads = self.workload.with_hot(hot), {}, {}
        found._plain = self._plain or self
        for derived in ("seen_by_feature", "missed"):
            vars(found).pop(derived, None)
        return found

    def with_most_frequent(self, rows: Ints) -> Model:
        """Return this model with heads of the `rows` [T] most frequent ids; one model for all options with them."""
        key = rows.tobytes()
        if key not in self._with_heads:
            self._with_heads[key] = self.with_hot(HotReads.most_frequent(self.workload, rows))
        return self._with_heads[key]

    def with_tables(self, tables: Sequence[TableWork]) -> Model:
        """Return this model for the same tables and reads under other shardings, which change no count of rows."""
        found = copy(self)
        found.workload, found._with_heads = self.workload.with_tables(tables), {}
        for derived in ("longest_range", "may_send_once", "missed"):
            vars(found).pop(derived, None)
        return found

    def of_tilings(self, tilings: Sequence[Tiling]) -> Model:
        """Return this model with the heads of some tilings, which are in the order of the workload."""
        if all(tiling.head is None for tiling in tilings):
            return self
        return self.with_hot(HotReads.of(self.workload, tilings))

    def find_hot(self, table: Ints) -> Floats:
        """Return [n] seconds to look for the ids of one rank's batch among the hot ids of their tables."""
        work = self.workload
        if self.topology.compute_device != "cpu":
            return work.per_table(np.full(len(work.bags), HOT_KEY))[table]
        return work.ids[table] * (HOT_ID if self.speeds.hot_id is None else self.speeds.hot_id)

    def write_back(self, table: Ints, hot: Any) -> Floats:
        """Return [n] seconds to copy so many updated hot rows with their state to their places in the table."""
        work = self.workload
        row = work.dim[table] * (work.element[table] + work.cell_state[table]) / 4.0
        each = self.rates.at("pick", row) + self.rates.at("place", row)
        return np.where(np.asarray(hot) > 0.0, HOT_PIECE, 0.0) + hot * each

    def seen(self, ranks: float) -> Seen:
        """Return the distinct rows of all tables in the batches of so many ranks."""
        if ranks not in self._seen:
            work = self.workload
            if self._plain is not None and work.hot is not None:
                self._seen[ranks] = self._plain.seen(ranks).with_hot(work.hot)
            else:
                self._seen[ranks] = work.seen(np.arange(len(work.names)), work.ids * float(ranks))
        return self._seen[ranks]

    @cached_property
    def longest_range(self) -> float:
        """Most rows in a range of a table with ordered ids, relative to the mean of its ranges.

        It is 2, or more if memory has room. The last ranks hold the longest ranges of all tables.
        """
        each = np.arange(len(self.workload.names))
        held = float(sum(self.weights(each, self.workload.rows.astype(np.float64), self.workload.dim).tolist()))
        return max(2.0, ROOM_FOR_RANGES * float(sum(self.topology.memory_caps)) / max(held, 1.0))

    @cached_property
    def seen_by_feature(self) -> Seen:
        """The distinct rows of all features in one rank's batch."""
        work = self.workload
        if self._plain is not None and work.hot is not None:
            return self._plain.seen_by_feature.with_hot(work.hot)
        return work.seen(work.table, work.bags * work.ids_per_bag)

    @cached_property
    def may_send_once(self) -> Bools:
        """[F] features whose ids may travel once each: on CPUs if it pays, elsewhere if the plan demands it."""
        work = self.workload
        waits = self.topology.compute_device != "cpu"
        return work.single_ids & (work.forced == 1 if waits else work.forced != 0)

    def sent_once(self, feature: Ints, remote: Any) -> Bools:
        """Return [n] True for features whose ids travel once each.

        Args:
            feature: [n]. remote: share of the cells of its table that other ranks look up for the home, or [n] shares.
        """
        work = self.workload
        found = self.may_send_once[feature]
        some = np.flatnonzero(found)
        if not len(some):
            return found
        # One call of the runtime's rule for each kind of feature.
        forced, shares = work.forced[feature[some]], np.broadcast_to(np.asarray(remote, np.float64), found.shape)[some]
        kinds, kind = np.unique(np.stack([shares, forced.astype(np.float64)]), axis=1, return_inverse=True)
        percents = [largest_percent(share, None if each < 0 else bool(each)) for share, each in kinds.T.tolist()]
        percent = np.array(percents, np.float64)[kind.reshape(-1)]
        few = self.seen_by_feature.whole[feature[some]] * 100.0 <= work.bags[feature[some]] * percent
        found[some] = few & (percent > 0.0)
        return found

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages of a step on this topology."""
        topology = self.topology
        return STAGES + (NETWORK_STAGES if topology.host_count > 1 and topology.nic == "host" else ())

    def lookup_far(self, table: Ints, distinct: Any) -> Floats:
        """Return the number of distinct rows that a lookup reads from memory."""
        return distinct * (1.0 - self.resident * np.clip(self.again[table], 0.0, 1.0))

    def update_far(self, distinct: Any) -> Floats:
        """Return the number of distinct rows that an update reads from memory, after the lookup of the same step."""
        return distinct * (1.0 - self.resident)

    def in_host(self, table: Ints, weights: Any) -> Floats:
        """Return the bytes of host memory of pieces behind a cache: none for those in files."""
        return np.where(self.workload.files[table], 0.0, weights)

    @cached_property
    def missed(self) -> Floats:
        """[T] rows of a cached table that move from host memory to the device in a step; as many others move back."""
        return self.workload.missed(self.ranks)

    def missed_in(self, table: Ints, r0: Any, r1: Any) -> Floats:
        """Return [n] the missed rows of a piece with rows [r0, r1), which has a cache of its own."""
        work = self.workload
        found = self.missed[table] * ((np.asarray(r1, np.float64) - r0) / work.rows[table])
        uneven = np.flatnonzero(work.ordered[table] & work.cached[table])
        if len(uneven):
            found[uneven] = work.missed(self.ranks, table[uneven], r0[uneven], r1[uneven])
        return found

    def fetched(self, table: Ints, missed: Any, width: Any) -> Floats:
        """Return seconds to move missed rows and their state to the device, and as many rows back."""
        work = self.workload
        cell = (work.element[table] + work.cell_state[table]).astype(np.float64)
        record = width * cell + work.row_state[table]
        in_file = self.file_row * (1.0 + record / FILE_BYTES)
        return missed * 2.0 * np.where(work.files[table], in_file, record * self.to_host)

    def lines(self, table: Ints, rows: Any, width: Any, distinct: Any = None, mean: Any = False) -> Floats:
        """Return the bytes of a piece's cache on the device: sets of lines, and spare lines for a step's other rows.

        Args:
            distinct: rows of the piece that a step reads; None: in proportion to its rows.
            mean: rows are the mean of pieces, whose sets are not known.
        """
        if distinct is None:
            distinct = self.all_distinct[table] * rows / self.workload.rows[table]
        held = self.workload.load_factor[table] * rows
        held = np.where(mean, held, LINES_PER_SET * np.ceil(held / LINES_PER_SET))
        spare = np.maximum(distinct - held, 0.0)
        return (held + spare) * (self.weights(table, 1.0, width) + LINE_BYTES) + rows * ROW_BYTES

    def replicas(self, table: Ints, copies: Ints | None = None) -> Replicas:
        """Return the exchange of gradients of whole tables with so many copies each (None: a copy on every rank)."""
        work = self.workload
        bags, ids, _ = work.present(1.0)
        many = np.full(len(table), self.ranks) if copies is None else copies
        dim = work.dim[table].astype(np.float64)
        copied = Copied(table, np.zeros_like(table), work.rows[table], many, dim, bags[table], ids[table])
        return Replicas(self, copied)

    def wire(self, table: Ints, width: Any, *, backward: bool) -> Floats:
        """Return the bytes of a row on the wire."""
        formats = self.workload.backward if backward else self.workload.forward
        cell = np.where(formats[0, table] == 4, self.workload.wide, formats[0, table])
        return cell * np.asarray(width, np.float64) + formats[1, table]

    def weights(self, table: Ints, rows: Any, width: Any) -> Floats:
        """Return the bytes of a piece with its optimizer state, or with its dense gradient."""
        work = self.workload
        cell = work.element[table] + work.cell_state[table]
        return rows * (width * cell.astype(np.float64) + work.row_state[table])


class Copied(NamedTuple):
    """Rectangles with copies, [n] each.

    Args:
        table, r0, r1: the table, and its rows. copies: ranks that hold the rectangle. width: columns.
        bags, ids: of one home's batch, in these rows.
    """

    table: Ints
    r0: Ints
    r1: Ints
    copies: Ints
    width: Floats
    bags: Floats
    ids: Floats


class Replicas:
    """Exchange of gradients between the copies of rectangles, [n] each (sharding/replicas.py).

    Each copy serves the batches of an equal number of ranks.

    form: 0 gradients of bags, 1 gradients of rows, 2 a dense gradient, 3 the dense gradient of a table without an
    attached optimizer, 4 sums by shares. sent: bytes to each other rank. reduced: bytes of the all-reduce, or half of
    those that all replicas together send one of them in shares. ids, bags: numbers that the update then sorts and
    reads. distinct: rows that it changes. seconds: local work besides links and update.
    """

    def __init__(self, model: Model, copied: Copied) -> None:
        work, rates = model.workload, model.rates
        table, r0, r1, copies, dim = copied[:5]
        rows = (r1 - r0).astype(np.float64)
        replicas = copies.astype(np.float64)
        homes, others = model.ranks / replicas, replicas - 1.0
        weighted = np.zeros(len(work.names), np.bool_)
        weighted[work.table[work.weighted]] = True
        features = work.per_table(np.ones(len(work.bags)))[table] * homes
        bags, ids = copied.bags * homes, copied.ids * homes
        everyone = self.distinct = model.seen(model.ranks).between(table, r0, r1)
        own = np.zeros(len(table))
        for count in sorted(set(homes.tolist())):
            those = homes == count
            own[those] = model.seen(count).between(table[those], r0[those], r1[those])
        row = 4.0 * dim + 4.0
        # Whole numbers, as in the runtime's choice: a few rows are often read all.
        counted, read = np.rint(bags), np.rint(ids)
        touched = np.minimum(read, rows)
        as_bags = others * replicas * (4.0 * dim * counted + 4.0 * read)
        as_rows = others * replicas * row * touched
        as_dense = 8.0 * (dim + 1.0) * rows * others
        together = rows * (1.0 - missed(touched / np.maximum(rows, 1.0), replicas))
        as_shares = others * row * (touched + together)
        by_bags = (as_bags < as_rows) & ~weighted[table]
        direct = np.where(by_bags, as_bags, as_rows)
        direct = np.where(copies > MOST_COPIES, np.inf, direct)
        self.form = np.select([as_shares < direct, by_bags], [4, 0], 1)
        dense = (as_dense < direct) & (as_dense <= as_shares) & (copies == model.ranks)
        self.form = np.where(dense, 2, self.form)
        self.form = np.where(work.attached[table], self.form, 3)
        word = np.where(rows < 1 << 31, 4.0, 8.0)
        wide = float(work.wide)
        self.numbers = np.select(
            [self.form == 0, self.form == 1], [(2.0 * features + bags + ids) * word, own * word], 0.0
        )
        self.gradients = np.select([self.form == 0, self.form == 1], [bags, own], 0.0) * dim * wide
        self.row_numbers = np.where(self.form == 4, 8.0, 0.0)  # "replica rows"
        self.sent = self.numbers + self.gradients + self.row_numbers + np.where(self.form != 3, COUNTS_BYTES, 0.0)
        # In shares, a replica's own rows travel with their length and number, then the sums of all with their number.
        shared = 2.0 * own * word + everyone * word
        self.sent += np.where(self.form == 4, COUNTS_BYTES + 2.0 * word, 0.0)
        self.shared_numbers = np.where(self.form == 4, shared, 0.0)
        self.shared_gradients = np.where(self.form == 4, (own + everyone) * dim * wide, 0.0)
        self.share_head = np.where(self.form == 4, 2.0 * word, 0.0)
        self.reduced = np.select(
            [self.form == 2, self.form == 3, self.form == 4],
            [
                (dim + 1.0) * rows * wide,
                dim * rows * work.element[table],
                (self.shared_numbers + self.shared_gradients) / 2.0,
            ],
            0.0,
        )
        self.ids = np.select([self.form == 0, self.form == 1], [ids * replicas, own * replicas], everyone)
        self.bags = np.select([self.form == 0], [bags * replicas], self.ids)
        summed = (
            bags * rates.at("update_bag", dim) + ids * rates.at("update_id", dim) + rates.copied(2.0 * own * dim * wide)
        )
        # Rows of all replicas are added up once more, and copied into and out of messages.
        shares = summed + own * (rates.at("update_bag", dim) + rates.at("update_id", dim))
        shares = shares + rates.copied(2.0 * self.reduced)
        whole = rates.copied(6.0 * self.reduced)
        self.seconds = (
            np.select(
                [self.form == 0, self.form == 1, self.form == 4], [bags * rates.at("pick", dim), summed, shares], whole
            )
            + np.where(self.form == 2, summed, 0.0)
            + rates.copied(self.numbers * replicas)
            + model.speeds.replica
        )


def _touched(workload: Workload, distinct: Floats) -> float:
    """Return the bytes that a step of all ranks touches."""
    return float(sum((distinct * (workload.dim * (workload.element + workload.cell_state))).tolist()))
