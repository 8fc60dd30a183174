"""Updates of tiles: apply gradients averaged over all ranks, after exchanges between replicas and column blocks.

Nouns
  replicas  the ranks that hold the same tile: each has the gradients of the homes that read from it, and all apply
            the gradients of all
  columns   the ranks that hold the other columns of the same rows: rules that need sums over a whole row add theirs

    G[row] = (sum over all homes) / W,  applied once per distinct row, identically on every owner

Messages are point to point between the owners of a tile. Other ranks take no part.

Legend: T tables, U distinct rows, D columns, P bags, N ids, W ranks of the group.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.ops.gradient.definition import GradientSink, features_of, sum_rows_of_tables
from tilerec.ops.gradient.record import GradientRecord
from tilerec.ops.update.calls import ApplyCall, PartialsCall, PartRows, RuleTables
from tilerec.ops.update.rules import BLOCK, add_blocks, block_sums
from tilerec.sharding.changed_rows import ChangedRows
from tilerec.sharding.head_rows import Head, write_all, write_updated
from tilerec.sharding.replica_groups import ReplicaGroups, exchange_group
from tilerec.sharding.replicas import ReplicaTable, exchange_replica_gradients, id_bounds
from tilerec.spec.optimizer import OptimizerSpec, RowWiseAdagrad
from tilerec.storage.located_batch import FeatureBatch, LocatedRows, located
from tilerec.storage.row_cache import lock_caches
from tilerec.storage.shared_param_group import SharedParamGroup
from tilerec.storage.table_rows import (
    NonFiniteGradientError,
    TableRows,
    TilePosition,
    count_updates,
    counting,
)


@dataclass(frozen=True)
class UpdatePeers:
    """Ranks that take part in a tile's updates.

    Args:
        group: all ranks.
        replicas: owners of the same tile, this rank included, ascending.
        columns: per column block of the same rows: (rank that sends its sums, first column, width), left to right;
            this rank's own blocks name this rank. One entry: the row is not split. None: the other columns of these
            rows are cut at other rows, so row sums cannot be exchanged.
        listeners: ranks that receive this rank's sums.
        exact: bits must not depend on the tiling.
        teams: set if the ranks form several teams; None: one team.
    """

    group: Group
    replicas: tuple[int, ...]
    columns: tuple[tuple[int, int, int], ...] | None
    listeners: tuple[int, ...] = ()
    exact: bool = False
    teams: ReplicaGroups | None = None

    def sum_unit(self) -> int:
        """Return the number of columns in each partial sum exchanged between column blocks; 0: the whole block."""
        if not self.exact:
            return 0
        aligned = all(c0 % BLOCK == 0 and width % BLOCK == 0 for _, c0, width in self.columns or ())
        return BLOCK if aligned else 1

    def __deepcopy__(self, memo: dict[int, Any]) -> UpdatePeers:
        return self  # a copied module uses the same group


class TileRows(TableRows):
    """Rows of one tile: `TableRows` with gradients from all ranks."""

    def __init__(self, name: str, place: TilePosition, peers: UpdatePeers, dim: int) -> None:
        super().__init__(name, place)
        self.peers = peers
        self.dim = dim  # of the whole table
        self.origin = 0  # creation order of the table; distinguishes tables with equal keys
        self.touched: ChangedRows | None = None  # rows changed since the last sync, if replicas sync periodically
        self._scaled: tuple[OptimizerSpec, OptimizerSpec] | None = None
        self.newer: TableRows | None = None  # copies of hot rows that `settle` writes to these rows; of cached tiles

    @property
    def divisor(self) -> float:
        teams = self.peers.teams
        # Without an attached optimizer, teams stay equal only by their gradients, which are summed over all teams.
        others = teams.axis.size if teams is not None and teams.apart and self.group is None else 1
        return float(self.peers.group.size * others)

    def rule(self) -> OptimizerSpec:
        spec, teams = super().rule(), self.peers.teams
        if teams is None or teams.moment_scale == 1.0:
            return spec
        if self._scaled is None or self._scaled[0] is not spec:
            self._scaled = (spec, with_moment_scale(spec, teams.moment_scale))
        return self._scaled[1]

    def rate(self, device: torch.device) -> Tensor:
        rate, teams = super().rate(device), self.peers.teams
        if teams is None or teams.moment_scale == 1.0 or not isinstance(super().rule(), RowWiseAdagrad):
            return rate
        return rate.double() / math.sqrt(teams.moment_scale)  # as `with_moment_scale` does

    def settle(self) -> None:
        super().settle()
        if self.newer is not None:
            write_all(self.newer, self)
            self.newer = None

    def arrive(self) -> None:
        if self.touched is not None:
            self.touched.settle()

    def attach(self, spec: OptimizerSpec, group: SharedParamGroup) -> None:
        if self.peers.columns is None and spec.phases:
            raise ConfigError(
                f"Table '{self.name}': {type(spec).__name__} needs sums over whole rows, and the column blocks of this "
                "tiling are cut at different rows, so no two ranks hold parts of the same set of rows; cut all column "
                "blocks at the same rows, or use an optimizer that works element by element (SGD, Adagrad, Adam)."
            )
        self.settle()  # `newer` has the state of the present optimizer
        super().attach(spec, group)
        teams = self.peers.teams
        if teams is not None and teams.apart:
            # Keep existing marks: rows that another rule changed still differ between teams.
            self.touched = self.touched or ChangedRows(self.leaf.shape[0], self.leaf.device)

    def report_skipped(self, spec: OptimizerSpec, skipped: int, row: int) -> None:
        try:
            super().report_skipped(spec, skipped, row)
        except NonFiniteGradientError as error:
            if self.peers.group.size == 1:
                raise
            raise NonFiniteGradientError(
                f"{error} Only ranks that hold such a row raise this: end the run, as a rank that catches the error "
                "gets out of step with the others; non_finite='skip' continues on all ranks alike."
            ) from None

    def batch_key(self) -> Hashable:
        # All tables at once: messages between ranks must have one order on all ranks.
        return id(self.peers.group)

    def merge(self, sinks: Sequence[GradientSink], records: Sequence[GradientRecord]) -> GradientRecord:
        """Merge records; in exact mode, sum over all replicas of one lookup before adding the next lookup."""
        if not self.peers.exact:
            return super().merge(sinks, records)
        tables = cast("list[TileRows]", list(sinks))
        agreed = [part for record in records for _, part in self._by_replicas(tables, record)]
        return replace(super().merge(sinks, agreed), agreed=True)

    def _by_replicas(
        self, tables: Sequence[TileRows], record: GradientRecord
    ) -> Iterator[tuple[list[TileRows], GradientRecord]]:
        """Yield lists of tables with the same replicas, with the gradients of all these replicas.

        All ranks exchange in one order, that of the tiles' positions, which no write on a single rank can change.
        Tables without replicas come first: their updates overlap with the exchanges, and no rank waits for those of
        another one.
        """
        exchanged: list[tuple[list[TileRows], Callable[[], GradientRecord]]] = []
        ready: list[tuple[list[TileRows], GradientRecord]] = []
        for peers, own in _by_replicas_here(tables, record):
            replicas = peers[0].peers.replicas
            if len(replicas) == 1 or record.agreed:
                ready.append((peers, own))
                continue
            group, ranks = exchange_group(self.peers.group, self.peers.teams, replicas)
            features = features_of(own, [table.handle for table in peers])
            replica_tables = [table._as_replica(features[table.handle]) for table in peers]
            finish = exchange_replica_gradients(group, ranks, own, replica_tables, exact=self.peers.exact)
            exchanged.append((peers, finish))
        yield from ready
        for peers, finish in exchanged:
            yield peers, finish()

    def take(self, sinks: Sequence[GradientSink], record: GradientRecord) -> None:
        tables = cast("list[TileRows]", list(sinks))
        split: list[tuple[TileRows, RowSums]] = []
        failures: list[NonFiniteGradientError] = []
        for table in tables:
            table.arrive()
            if table.group is not None:
                GradientSink.about_to_write(table)  # rows are announced once the replicas' are known
            if table.touched is not None:
                table.touched.count()
        rules = _rules(tables)
        for peers, own in self._by_replicas(tables, record):
            mark_changed([table for table in peers if table.touched is not None], own)
            ways = _Ways.of(peers, rules)
            for table in ways.sparse:
                TableRows.take(table, [table], table._of_all_teams(_only(own, [table])))
            for same in ways.together:
                try:
                    TableRows.take(same[0], same, _only(own, same))
                except NonFiniteGradientError as error:  # raised later: peers wait for further messages
                    failures.append(error)
            write_updated([table.as_head() for table in peers if table.names is not None], own)
            for table, sums in zip(ways.parts, _summed(ways.parts, own), strict=True):
                table.about_to_write(sums[0])
                split.append((table, sums))
        failures += update_in_phases(tables[0].peers.group, split)
        if failures:
            raise failures[0]

    def order(self, sinks: Sequence[GradientSink], record: GradientRecord) -> None:
        """Sort the rows as `take` will split the record.

        Skips tiles with several replicas: the rows of the other replicas arrive with the gradients only.
        """
        tables = cast("list[TileRows]", list(sinks))
        rules = _rules(tables)
        for peers, own in _by_replicas_here(tables, record):
            if len(peers[0].peers.replicas) == 1:
                ways = _Ways.of(peers, rules)
                for same in ways.together:
                    TableRows.order(same[0], same, _only(own, same))
                if ways.parts:
                    ways.parts[0].order_sums(ways.parts, _only(own, ways.parts))

    def _of_all_teams(self, record: GradientRecord) -> GradientRecord:
        """Return the gradients of all teams, if other teams have copies of the tile with their own gradients."""
        teams = self.peers.teams
        if teams is None or not teams.apart or teams.axis.size == 1:
            return record
        replica_tables = [self._as_replica(range(len(record.sinks)))]
        return exchange_replica_gradients(
            teams.axis, range(teams.axis.size), record, replica_tables, exact=self.peers.exact
        )()

    def as_head(self) -> Head:
        """Return this head with the tiles beside it that are written after its update."""
        holder: Any = next(iter(self.holders))
        tiles: list[TileRows] = []
        for rows in cast("list[TileRows]", holder.tile_rows):
            if rows.names is None:
                if rows.cache is not None:
                    rows.newer = self
                if rows.cache is None or rows.observers:
                    tiles.append(rows)
        return Head(self, tiles)

    def _mark(self) -> tuple[int, ...]:
        """Return the sort key of the tile, equal on every rank; its first four numbers identify the rows of a table."""
        place = self.place
        return (*place.key, self.origin, place.row_offset, place.column_offset)

    def _as_replica(self, features: Sequence[int]) -> ReplicaTable:
        return ReplicaTable(self.handle, self.leaf.shape[0], self.leaf.shape[1], features)


def _by_replicas_here(
    tables: Sequence[TileRows], record: GradientRecord
) -> Iterator[tuple[list[TileRows], GradientRecord]]:
    """Yield lists of tables with the same replicas, with this rank's gradients of them, in the order of `_mark`."""
    by_replicas: dict[tuple[int, ...], list[TileRows]] = {}
    for table in sorted(tables, key=TileRows._mark):
        if table.handle in record.sinks:
            by_replicas.setdefault(table.peers.replicas, []).append(table)
    for _, peers in sorted(by_replicas.items()):
        yield peers, _only(record, peers)


@dataclass(frozen=True)
class _Rule:
    """Optimizer of some tables, and a key that equal optimizers share."""

    spec: OptimizerSpec
    name: Hashable


def _rules(tables: Sequence[TileRows]) -> dict[int, _Rule]:
    """Return the rules of the tables, by `id` of their optimizer group."""
    specs = {id(table.group): table.rule() for table in tables if table.group is not None}
    return {mark: _Rule(spec, (repr(spec), mark if spec.capturable else 0)) for mark, spec in specs.items()}


@dataclass(frozen=True)
class _Ways:
    """Tables of a step, by the way in which they take their gradients."""

    sparse: list[TileRows]  # without an attached optimizer: one table at a time
    together: list[list[TileRows]]  # each list is updated by one call
    parts: list[TileRows]  # of rows split by columns: they need the sums of the other columns first

    @staticmethod
    def of(tables: Sequence[TileRows], rules: dict[int, _Rule]) -> _Ways:
        sparse: list[TileRows] = []
        parts: list[TileRows] = []
        alike: dict[Hashable, list[TileRows]] = {}
        for table in tables:
            rule = rules.get(id(table.group))
            if rule is None:
                sparse.append(table)
            elif rule.spec.phases and len(table.peers.columns or ()) > 1:
                parts.append(table)
            else:
                alike.setdefault(rule.name, []).append(table)
        return _Ways(sparse, list(alike.values()), parts)


def with_moment_scale(spec: OptimizerSpec, scale: float) -> OptimizerSpec:
    """Return row-wise Adagrad with `sum += scale * mean(g'^2)` in place of `sum += mean(g'^2)`; other rules unchanged.

    With `h = sqrt(scale) g'`, this is `sum += mean(h^2); w -= (lr / sqrt(scale)) h / (sqrt(sum) + eps)`. Gradients and
    decay are therefore multiplied by `sqrt(scale)`, and the rate is divided by it.

    Example: `scale=0.25`, lr 0.1, a row of one column with gradient 2: sum = 0.25 * 4 = 1, step = 0.1 * 2 / 1 = 0.2.
    With the scaled gradient 1 and the rate 0.2: sum = 1, step = 0.2.
    """
    if not isinstance(spec, RowWiseAdagrad) or scale == 1.0:
        return spec
    root = math.sqrt(scale)
    return replace(spec, lr=spec.lr / root, grad_scale=spec.grad_scale / root, weight_decay=spec.weight_decay * root)


def mark_changed(tables: Sequence[TileRows], record: GradientRecord) -> None:
    """Mark the rows of these tables that a record contains."""
    if not tables:
        return
    bounds = id_bounds(record)
    for table in tables:
        assert table.touched is not None
        for f, sink in enumerate(record.sinks):
            if sink == table.handle:
                table.touched.mark(record.ids[bounds[f][0] : bounds[f][1]])


def _only(record: GradientRecord, tables: Sequence[TableRows]) -> GradientRecord:
    """Return the part of a record for these tables."""
    handles = {table.handle for table in tables}
    return record.only([f for f, sink in enumerate(record.sinks) if sink in handles])


def _summed(tables: Sequence[TileRows], record: GradientRecord) -> list[RowSums]:
    """Return the distinct rows and summed gradients of each of these tables, all of which the record contains."""
    if not tables:
        return []
    handles = [table.handle for table in tables]
    own = _only(record, tables)
    ordered = tables[0].orders.take(handles, own)
    rows = [table.leaf.shape[0] for table in tables]
    return sum_rows_of_tables(own, list(features_of(own, handles).values()), rows, ordered)


RowSums = tuple[Tensor, Tensor]
"""Distinct rows `[U]` of a tile and their summed gradients `[U, D]`."""


class _SplitRows:
    """A step's rows of one table whose columns are split, with this rank's tiles of them."""

    def __init__(self, tiles: Sequence[tuple[TileRows, RowSums]]) -> None:
        self.tiles = [tile for tile, _ in tiles]  # left to right
        self.rows_U = tiles[0][1][0]
        self.grads = [grads_UD for _, (_, grads_UD) in tiles]
        assert all(len(grads_UD) == len(self.rows_U) for grads_UD in self.grads), (
            "column blocks of a row get the same ids"
        )
        first = self.tiles[0]
        assert first.group is not None
        assert first.peers.columns is not None
        self.spec = first.rule()
        self.unit = unit = first.peers.sum_unit()
        # Partial sums of a row: per column block, the rank that computes them and their number.
        self.makers = [rank for rank, _, _ in first.peers.columns]
        self.counts = tuple([width // unit if unit else 1 for _, _, width in first.peers.columns])
        # Gradients are sent and summed in float64 beside a float64 table; rules run in the precision of their table.
        self.accum_dtype = torch.float64 if first.leaf.dtype == torch.float64 else torch.float32
        self.positions_U: list[Tensor] = []  # per tile, of the rows in the tensors that hold them
        self.skipped, self.first_skipped = 0, -1

    def keep(self, whole_U: Tensor) -> None:
        """Drop the rows that are False in `whole_U`, and count them as skipped."""
        if bool(whole_U.all()):
            return
        self.skipped, self.first_skipped = int((~whole_U).sum()), int(self.rows_U[~whole_U][0])
        self.rows_U, self.grads = self.rows_U[whole_U], [grads_UD[whole_U] for grads_UD in self.grads]
        self.positions_U = [own_U[whole_U] for own_U in self.positions_U]


class _PhasedUpdate:
    """One update of the split rows of many tables, which share a rule and the structure of their partial sums.

    Args:
        contexts: end with the update; until then no row changes its place.
    """

    def __init__(self, rows: Sequence[_SplitRows], contexts: ExitStack) -> None:
        self.rows = rows
        first = rows[0].tiles[0]
        self.spec, self.unit, self.counts = rows[0].spec, rows[0].unit, rows[0].counts
        hyper = self.spec.hyper()
        hyper[1] *= first.divisor
        self.tiles = [tile for own in rows for tile in own.tiles]
        self.held = [contexts.enter_context(_located(tile, own.rows_U)) for own in rows for tile in own.tiles]
        held = iter(self.held)
        for own in rows:
            own.positions_U = [next(held).ids.long() for _ in own.tiles]
        places = [tile.place for tile in self.tiles]
        leaves = [held.weights[0] for held in self.held]
        steps, counts, lr = counting(self.tiles, self.spec, leaves[0].device)
        self.tables = RuleTables(
            leaves, [slot for held in self.held for slot in held.slots(self.spec)], self.spec.rule, hyper, steps,
            [word for place in places for word in place.key], [place.row_offset for place in places],
            [place.column_offset for place in places], None, counts, lr,
        )  # fmt: skip
        distinct = sum([own.rows_U.numel() for own in rows])
        # Row sums of the phases so far, rows of all tables concatenated.
        self.scalars_PU = rows[0].grads[0].new_zeros((0, distinct), dtype=rows[0].accum_dtype)

    def _per_tile(self) -> PartRows:
        """Return the rows, gradients and scalars of each tile."""
        scalars = self.scalars_PU.split([own.rows_U.numel() for own in self.rows], dim=1)
        return PartRows(
            [own_U for own in self.rows for own_U in own.positions_U],
            [grads_UD for own in self.rows for grads_UD in own.grads],
            [part_PU for own, part_PU in zip(self.rows, scalars, strict=True) for _ in own.tiles],
            [tile.dim for tile in self.tiles],
        )

    def shares(self, phase: int) -> list[Tensor]:
        """Return each tile's share of a phase's row sums, flat: `[U, K, units]`.

        Units are aligned blocks of 8 columns, single columns, or one for the whole tile. The first phase has one more
        sum: 1 in every unit in which the row's gradient is finite, else 0.
        """
        tables, parts = self.tables, self._per_tile()
        widths = [grads_UD.shape[1] for grads_UD in parts.grads]
        if self.unit == 1:
            tables, parts = self._elements(parts)
        call = PartialsCall(tables, parts, phase, exact=self.unit > 1, finite=phase == 0)
        flat = torch.ops.tilerec.rule_partials_of_tables.default(*call.packed())
        kinds, rows = self.kinds(phase), parts.rows
        if self.unit != 1:
            units = [width // self.unit if self.unit else 1 for width in widths]
            return list(flat.split([len(r) * kinds * n for r, n in zip(rows, units, strict=True)]))
        parts = flat.split([len(r) * kinds for r in rows])
        return [
            part.view(-1, width, kinds).transpose(1, 2).reshape(-1) for part, width in zip(parts, widths, strict=True)
        ]

    def _elements(self, parts: PartRows) -> tuple[RuleTables, PartRows]:
        """Return each element as a row of one column, so that the summing kernel returns the single terms."""
        weights, slots, scalars = [], [], []
        for t, (weight, rows_U) in enumerate(zip(self.tables.weights, parts.rows, strict=True)):
            width = weight.shape[1]
            weights.append(weight[rows_U].reshape(-1, 1))
            slots += [
                slot[rows_U].reshape(-1, 1) if slot.dim() == 2 else slot[rows_U].repeat_interleave(width)
                for slot in self.tables.slots_of(t)
            ]
            scalars.append(parts.scalars[t].repeat_interleave(width, dim=1))
        rows = [torch.arange(grads_UD.numel(), device=grads_UD.device) for grads_UD in parts.grads]
        grads = [grads_UD.reshape(-1, 1) for grads_UD in parts.grads]
        tables = self.tables._replace(weights=weights, slots=slots, column_offsets=[0] * len(weights))
        return tables, PartRows(rows, grads, scalars, parts.dims)

    def kinds(self, phase: int) -> int:
        """Return the number of sums per row that are sent in a phase."""
        return self.spec.partials[phase] + (phase == 0)

    def add(self, phase: int, blocks: Sequence[Sequence[Tensor]]) -> None:
        """Add up a phase's partial sums over all column blocks, from left to right.

        Args:
            blocks: per element of `self.rows`, the sums of its column blocks.
        """
        kinds, units = self.kinds(phase), sum(self.counts)
        columns = [torch.cat([own[i] for own in blocks]).view(-1, count) for i, count in enumerate(self.counts)]
        if self.unit:
            terms = torch.cat(columns, dim=1)
            sums = add_blocks(block_sums(terms, 0) if self.unit == 1 else terms)
        else:
            sums = functools.reduce(torch.add, columns)
        sums_KU = sums.view(-1, kinds).T
        if phase == 0:  # a row that is non-finite in one block is skipped in all
            whole_U, sums_KU = sums_KU[-1] == units, sums_KU[:-1]
            if not bool(whole_U.all()):
                per_rows = whole_U.split([own.rows_U.numel() for own in self.rows])
                for own, own_U in zip(self.rows, per_rows, strict=True):
                    own.keep(own_U)
                sums_KU, self.scalars_PU = sums_KU[:, whole_U], self.scalars_PU[:, whole_U]
        self.scalars_PU = torch.cat((self.scalars_PU, sums_KU))

    def apply(self) -> None:
        """Update the rows and slots."""
        call = ApplyCall(self.tables._replace(row_names=self._names()), self._per_tile())
        torch.ops.tilerec.rule_apply_to_tables_.default(*call.packed())
        count_updates(self.tiles, self.spec)
        for held in self.held:
            held.updated()

    def _names(self) -> list[Tensor] | None:
        """Return the row number held by each cache line, empty for tiles without a cache; None if no tile has one."""
        names = [held.row_names for held in self.held]
        if all(own is None for own in names):
            return None
        nothing = self.tables.weights[0].new_empty(0, dtype=torch.int64)
        return [nothing if own is None else own[0] for own in names]


def _located(tile: TileRows, rows_U: Tensor) -> LocatedRows:
    """Return the place of distinct rows of a tile, for an update."""
    return located(FeatureBatch([tile], [tile.leaf], rows_U, None, None, [0], [0], [rows_U.numel()]), writes=True)


def update_in_phases(group: Group, tiles: Sequence[tuple[TileRows, RowSums]]) -> list[NonFiniteGradientError]:
    """Update tiles whose rows are split by columns; return the errors of rows that were not finite.

    Row sums of all tables are exchanged together, phase by phase. Every rank sends and receives them in one order, that
    of `TileRows._mark`.
    """
    if not tiles:
        return []
    of_rows: dict[tuple[int, ...], list[tuple[TileRows, RowSums]]] = {}
    for tile, sums in sorted(tiles, key=lambda item: item[0]._mark()):
        of_rows.setdefault(tile._mark()[:4], []).append((tile, sums))
    rows = [_SplitRows(own) for own in of_rows.values()]
    for accum_dtype in (torch.float32, torch.float64):
        _update_of_precision(group, [own for own in rows if own.accum_dtype == accum_dtype])
    failures: list[NonFiniteGradientError] = []
    for own in rows:
        if own.skipped:
            try:
                own.tiles[0].report_skipped(own.spec, own.skipped, own.first_skipped)
            except NonFiniteGradientError as error:
                failures.append(error)
    return failures


def _update_of_precision(group: Group, rows: Sequence[_SplitRows]) -> None:
    """Update rows whose sums are sent in one dtype."""
    alike: dict[Hashable, list[_SplitRows]] = {}
    for own in rows:
        numbers = own.tiles[0].group
        assert numbers is not None
        alike.setdefault((repr(own.spec), numbers.mark(), own.unit, own.counts), []).append(own)
    with ExitStack() as contexts:
        # All locks at once, in their fixed order: another thread may prefetch for several of these tables.
        contexts.enter_context(lock_caches([tile.cache for own in rows for tile in own.tiles]))
        updates = [_PhasedUpdate(several, contexts) for several in alike.values()]
        for phase in range(max([own.spec.phases for own in rows], default=0)):
            shares: dict[_SplitRows, list[Tensor]] = {}
            active = [update for update in updates if phase < update.spec.phases]
            for update in active:
                mine = iter(update.shares(phase))
                shares.update({own: [next(mine) for _ in own.tiles] for own in update.rows})
            blocks = _exchange_sums(group, {own: shares[own] for own in rows if own in shares})
            for update in active:
                update.add(phase, [blocks[own] for own in update.rows])
        for update in updates:
            update.apply()


def _exchange_sums(group: Group, shares: dict[_SplitRows, list[Tensor]]) -> dict[_SplitRows, list[Tensor]]:
    """Exchange partial sums; return, by rows, the sums of all their column blocks, left to right.

    Each rank sends one message to every listener, and receives one from every rank that computes sums.

    Args:
        shares: partial sums of this rank's tiles.
    """
    sends: dict[int, list[Tensor]] = {}
    sizes: dict[int, list[int]] = {}
    for own, sums in shares.items():
        for tile, tensor in zip(own.tiles, sums, strict=True):
            for rank in tile.peers.listeners:
                sends.setdefault(rank, []).append(tensor)
        mine = own.makers.index(group.rank)
        for rank, count in zip(own.makers, own.counts, strict=True):
            if rank != group.rank:
                sizes.setdefault(rank, []).append(sums[0].numel() // own.counts[mine] * count)
    like = next(iter(shares.values()))[0]
    received = {rank: like.new_empty(sum(own)) for rank, own in sizes.items()}
    group.exchange("row sums", received, {rank: torch.cat(own) for rank, own in sends.items()}).wait()
    parts = {rank: iter(received[rank].split(own)) for rank, own in sizes.items()}
    blocks: dict[_SplitRows, list[Tensor]] = {}
    for own, sums in shares.items():
        parts[group.rank] = iter(sums)
        blocks[own] = [next(parts[rank]) for rank in own.makers]
    return blocks
