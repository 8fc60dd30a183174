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

from functools import cached_property
from typing import Any

import numpy as np

from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.cost.portable import Floats, missed
from tilerec.planner.cost.rates import Rates
from tilerec.planner.cost.workload import Ints, Workload
from tilerec.sharding.replicas import MOST_COPIES
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

KEY_BYTES = 16  # bytes per id while gradients are sorted: key and occurrence, twice
LINE_BYTES = 17  # bytes of a cache line besides its row and state: row number, last use, and a flag
ROW_BYTES = 4  # bytes on the device per row in host memory: the number of its cache line
LINES_PER_SET = 32  # cache lines per set
FILE_ROW = 1e-5  # seconds per row of a tensor in a file, where this was not measured


class Model:
    """A workload on a topology.

    depth: batches whose ids are routed ahead. own_distinct, all_distinct: [T] distinct rows of one rank's batch, and of
    all batches. resident: see above. again: [T] part of a step's distinct rows that the step before has read as well.

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
        self.own_distinct = workload.distinct(1)
        self.all_distinct = workload.distinct(self.ranks)
        per_rank = _touched(workload, self.all_distinct) / self.ranks
        if beside is not None:
            per_rank += _touched(beside, beside.distinct(self.ranks)) / self.ranks
        self.resident = min(1.0, self.speeds.cache / per_rank) if per_rank > 0 else 1.0
        twice = workload.distinct(2 * self.ranks)
        self.again = (2.0 * self.all_distinct - twice) / np.maximum(self.all_distinct, 1e-9)

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
        return np.where(self.workload.files[table] > 0, 0.0, weights)

    @cached_property
    def missed(self) -> Floats:
        """[T] rows of a cached table that move from host memory to the device in a step; as many others move back."""
        return self.workload.missed(self.ranks)

    def fetched(self, table: Ints, share: Any, width: Any) -> Floats:
        """Return seconds to move missed rows and their state to the device, and as many rows back."""
        work = self.workload
        cell = (work.element[table] + work.cell_state[table]).astype(np.float64)
        each = (width * cell + work.row_state[table]) * self.to_host
        files = work.files[table]
        return self.missed[table] * share * 2.0 * np.where(files > 0, files * self.file_row, each)

    def lines(self, table: Ints, rows: Any, width: Any) -> Floats:
        """Return the bytes of a piece's cache on the device: sets of lines, and spare lines for a step's other rows."""
        held = LINES_PER_SET * np.ceil(self.workload.load_factor[table] * rows / LINES_PER_SET)
        spare = np.maximum(self.all_distinct[table] * rows / self.workload.rows[table] - held, 0.0)
        return (held + spare) * (self.weights(table, 1.0, width) + LINE_BYTES) + rows * ROW_BYTES

    def replicas(self, table: Ints, copies: Ints | None = None) -> Replicas:
        """Return the exchange of gradients of tables with so many copies each (None: a copy on every rank)."""
        return Replicas(self, table, np.full(len(table), self.ranks) if copies is None else copies)

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


class Replicas:
    """Exchange of gradients between copies of whole tables, [n] for the given tables (sharding/replicas.py).

    Each copy serves the batches of an equal number of ranks.

    form: 0 gradients of bags, 1 gradients of rows, 2 a dense gradient, 3 the dense gradient of a table without an
    attached optimizer, 4 sums by shares. sent: bytes to each other rank. reduced: bytes of the all-reduce, or half of
    those that all replicas together send one of them in shares. ids, bags: numbers that the update then sorts and
    reads. seconds: local work besides links and update.
    """

    def __init__(self, model: Model, table: Ints, copies: Ints) -> None:
        work, rates = model.workload, model.rates
        dim, rows = work.dim[table].astype(np.float64), work.rows[table].astype(np.float64)
        replicas = copies.astype(np.float64)
        homes, others = model.ranks / replicas, replicas - 1.0
        bags_T, ids_T = work.per_table(work.bags * filled(work.ids_per_bag)), work.ids
        weighted = np.zeros(len(work.names), np.bool_)
        weighted[work.table[work.weighted]] = True
        features = work.per_table(np.ones(len(work.bags)))[table] * homes
        bags, ids = bags_T[table] * homes, ids_T[table] * homes
        everyone = model.all_distinct[table]
        own = model.own_distinct[table]
        for count in set(homes.tolist()) - {1.0}:
            own = np.where(homes == count, work.distinct(count)[table], own)
        row = 4.0 * dim + 4.0
        touched = np.minimum(ids, rows)
        as_bags = others * replicas * (4.0 * dim * bags + 4.0 * ids)
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
        by_rows = (self.form == 1) | (self.form == 4)
        self.numbers = np.select(
            [self.form == 0, self.form == 1], [(2.0 * features + bags + ids) * word, own * word], 0.0
        )
        self.gradients = np.select([self.form == 0, self.form == 1], [bags, own], 0.0) * dim * wide
        self.row_numbers = np.where(by_rows, 8.0, 0.0)  # "replica rows"
        self.sent = self.numbers + self.gradients + self.row_numbers + np.where(self.form != 3, 24.0, 0.0)
        # In shares, a replica's own rows travel with their length and number, then the sums of all with their number.
        shared = 2.0 * own * word + everyone * word
        self.sent += np.where(self.form == 4, 24.0 + 2.0 * word, 0.0)
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


def filled(ids_per_bag: Floats) -> Floats:
    """Return the share of bags with at least one id."""
    return np.minimum(ids_per_bag, 1.0)
