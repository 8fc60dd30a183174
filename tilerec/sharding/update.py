"""Updating tiles: gradients summed over ranks are divided by their number; replicas and columns agree first.

Nouns
  replicas  the ranks that hold the same tile: each has the gradients of the homes that read from it, and all apply
            the gradients of all
  columns   the ranks that hold the other columns of the same rows: rules that need sums over a whole row add theirs

    G[row] = (sum over all homes) / W,  applied once per distinct row, on every owner alike

Talk is point to point among the owners of a tile, so ranks that hold nothing of it take no part.

Legend: T tables, U distinct rows, D columns, P bags, N ids, W ranks of the group.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.errors import ConfigError
from tilerec.ops.gradient import GradientRecord, GradientSink, sum_rows
from tilerec.ops.rules import BLOCK, add_blocks, block_sums
from tilerec.sharding.replicas import ReplicaTable, agree_on_gradients
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.storage.table_rows import HyperGroup, NonFiniteGradientError, Place, TableRows, count_updates


@dataclass(frozen=True)
class Peers:
    """Whom a tile's updates concern.

    Args:
        group: of all ranks.
        replicas: owners of the same tile, this rank included, ascending.
        columns: per column block of the same rows: (rank to hear it from, first column, width), left to right; this
            rank's own blocks name itself. One entry: the row is not split. None: the other columns of these rows
            are cut at other rows, so there is nobody to add row sums with.
        listeners: ranks that hear this rank's sums.
        exact: bits must not depend on the tiling.
    """

    group: Group
    replicas: tuple[int, ...]
    columns: tuple[tuple[int, int, int], ...] | None
    listeners: tuple[int, ...] = ()
    exact: bool = False

    def sum_unit(self) -> int:
        """Columns of each of the sums that column blocks tell each other; 0: one sum for a whole block."""
        if not self.exact:
            return 0
        aligned = all(c0 % BLOCK == 0 and width % BLOCK == 0 for _, c0, width in self.columns or ())
        return BLOCK if aligned else 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        return self  # a copied module talks through the same group


class TileRows(TableRows):
    """Rows of one tile: `TableRows` whose gradients come from all ranks."""

    def __init__(self, name: str, place: Place, peers: Peers, dim: int) -> None:
        super().__init__(name, place)
        self.peers = peers
        self.dim = dim  # of the whole table
        self.divisor = float(peers.group.size)
        self.origin = 0  # of the table, in the order of making: what tells twins of one key apart

    def attach(self, spec: OptimizerSpec, group: HyperGroup) -> None:
        if self.peers.columns is None and spec.phases:
            raise ConfigError(
                f"Table '{self.name}': {type(spec).__name__} needs sums over whole rows, and the column blocks of this "
                "tiling are cut at different rows, so no two ranks hold parts of the same set of rows; cut all column "
                "blocks at the same rows, or use an optimizer that works element by element (SGD, Adagrad, Adam)."
            )
        super().attach(spec, group)

    def report_skipped(self, spec: OptimizerSpec, skipped: int, row: int) -> None:
        try:
            super().report_skipped(spec, skipped, row)
        except NonFiniteGradientError as error:
            if self.peers.group.size == 1:
                raise
            raise NonFiniteGradientError(
                f"{error} Only ranks that hold such a row raise this: end the run, as a rank that catches it does what "
                "the others do not; non_finite='skip' goes on on all alike."
            ) from None

    def batch_key(self) -> Hashable:
        # All tables at once: what ranks tell each other must come in one order on all of them.
        return id(self.peers.group)

    def merge(self, sinks: Sequence[GradientSink], records: Sequence[GradientRecord]) -> GradientRecord:
        """As every sink does; exact sums run over all replicas of one lookup before the next is added."""
        if not self.peers.exact:
            return super().merge(sinks, records)
        tables = cast("list[TileRows]", list(sinks))
        agreed = [part for record in records for _, part in self._by_replicas(tables, record)]
        return replace(super().merge(sinks, agreed), agreed=True)

    def _by_replicas(
        self, tables: Sequence[TileRows], record: GradientRecord
    ) -> Iterator[tuple[list[TileRows], GradientRecord]]:
        """Tables that have the same replicas, with the gradients of all of these.

        Peers meet in one order: that of the tiles' places, which no number written on one rank changes.
        """
        by_replicas: dict[tuple[int, ...], list[TileRows]] = {}
        for table in sorted(tables, key=TileRows._mark):
            if table.handle in record.sinks:
                by_replicas.setdefault(table.peers.replicas, []).append(table)
        for replicas, peers in sorted(by_replicas.items()):
            own = _only(record, peers)
            if len(replicas) > 1 and not record.agreed:
                told = [table._as_replica(own) for table in peers]
                own = agree_on_gradients(self.peers.group, replicas, own, told, exact=self.peers.exact)
            yield peers, own

    def take(self, sinks: Sequence[GradientSink], record: GradientRecord) -> None:
        tables = cast("list[TileRows]", list(sinks))
        split: dict[tuple[Any, ...], list[tuple[TileRows, GradientRecord]]] = {}
        failures: list[NonFiniteGradientError] = []
        specs = {id(table.group): table.group.spec() for table in tables if table.group is not None}
        names = {mark: repr(spec) for mark, spec in specs.items()}
        for peers, own in self._by_replicas(tables, record):
            alike: dict[str, list[TileRows]] = {}
            for table in peers:
                spec = specs.get(id(table.group))
                if spec is None:  # sparse gradients: each table's are its own
                    TableRows.take(table, [table], _only(own, [table]))
                elif spec.phases and len(table.peers.columns or ()) > 1:
                    rows = (str(table.leaf.dtype), *table._mark()[:4])
                    split.setdefault(rows, []).append((table, _only(own, [table])))
                else:
                    alike.setdefault(names[id(table.group)], []).append(table)
            for same in alike.values():
                try:
                    TableRows.take(same[0], same, _only(own, same))
                except NonFiniteGradientError as error:  # peers wait for what is still to be told
                    failures.append(error)
        for _, several in itertools.groupby(sorted(split.items()), key=lambda item: item[0][0]):
            updates = [
                _update_in_phases(sorted(tiles, key=lambda tile: tile[0].place.column_offset))
                for _, tiles in several
            ]
            failures += _in_step(tables[0].peers.group, updates)
        if failures:
            raise failures[0]

    def _mark(self) -> tuple[int, ...]:
        """The tile's place among all, in one order on every rank; the first four numbers: which rows of which table."""
        place = self.place
        return (*place.key, self.origin, place.row_offset, place.column_offset)

    def _as_replica(self, record: GradientRecord) -> ReplicaTable:
        features = [f for f, sink in enumerate(record.sinks) if sink == self.handle]
        return ReplicaTable(self.handle, self.leaf.shape[0], self.leaf.shape[1], features)


def _only(record: GradientRecord, tables: Sequence[TableRows]) -> GradientRecord:
    """The part of a record that concerns these tables."""
    handles = {table.handle for table in tables}
    return record.only([f for f, sink in enumerate(record.sinks) if sink in handles])


@dataclass(frozen=True)
class _Talk:
    """What an update has to tell and to hear before it goes on."""

    name: str
    sizes: dict[int, int]  # elements to hear, by rank
    sends: dict[int, Tensor]
    like: Tensor  # of the type and device of what it hears


_Update = Generator[_Talk, "dict[int, Tensor]", None]


def _in_step(group: Group, updates: Sequence[_Update]) -> list[NonFiniteGradientError]:
    """Run updates side by side: one exchange for all that they have to tell at once.

    Every rank lists the updates in one order, and peers know of each other's how many times they talk.
    """
    failures: list[NonFiniteGradientError] = []
    answers: dict[int, dict[int, Tensor] | None] = dict.fromkeys(range(len(updates)))
    while answers:
        talks: dict[int, _Talk] = {}
        for i, answer in answers.items():
            try:
                talks[i] = next(updates[i]) if answer is None else updates[i].send(answer)
            except StopIteration:
                pass
            except NonFiniteGradientError as error:
                failures.append(error)
        answers = {i: {} for i in talks}
        if not talks:
            break
        sends: dict[int, list[Tensor]] = {}
        sizes: dict[int, list[tuple[int, int]]] = {}
        for i, talk in talks.items():
            for rank, tensor in talk.sends.items():
                sends.setdefault(rank, []).append(tensor)
            for rank, size in talk.sizes.items():
                sizes.setdefault(rank, []).append((i, size))
        first = next(iter(talks.values()))
        heard = {rank: first.like.new_empty(sum(size for _, size in own)) for rank, own in sizes.items()}
        group.exchange(first.name, heard, {rank: torch.cat(own) for rank, own in sends.items()}).wait()
        for rank, own in sizes.items():
            for (i, _), part in zip(own, heard[rank].split([size for _, size in own]), strict=True):
                answers[i][rank] = part  # type: ignore[index]
    return failures


def _update_in_phases(tiles: Sequence[tuple[TileRows, GradientRecord]]) -> _Update:
    """One update of a rank's tiles of the same rows, whose row sums run over all column blocks of the table."""
    tables = [table for table, _ in tiles]
    first = tables[0]
    assert first.group is not None
    spec, step = first.group.spec(), first.updates + 1
    hyper = [*spec.hyper()]
    hyper[1] *= first.divisor
    rows_U, grads = _summed([record for _, record in tiles])
    # Beside a table of float64, gradients travel and are summed as that; rules work in the precision of their table.
    wide = torch.float64 if first.leaf.dtype == torch.float64 else torch.float32
    scalars_PU = grads[0].new_zeros((0, rows_U.numel()), dtype=wide)
    unit = first.peers.sum_unit()
    bad, first_bad = 0, -1
    for phase in range(spec.phases):
        sums = [
            _partials(table, rows_U, grads_UD, scalars_PU, phase, unit, spec, hyper)
            for table, grads_UD in zip(tables, grads, strict=True)
        ]
        if phase == 0:  # what is not finite in one block is to be left alone in all
            sums = [_with_finite(own, grads_UD) for own, grads_UD in zip(sums, grads, strict=True)]
        total = yield from _sum_over_columns(tables, "row sums", sums, unit)
        if phase == 0:
            whole_U = total[-1] == (first.dim // unit if unit else len(first.peers.columns or ()))
            total = total[:-1]
            if not bool(whole_U.all()):
                bad, first_bad = int((~whole_U).sum()), int(rows_U[~whole_U][0])
                rows_U, grads = rows_U[whole_U], [grads_UD[whole_U] for grads_UD in grads]
                scalars_PU, total = scalars_PU[:, whole_U], total[:, whole_U]
        scalars_PU = torch.cat((scalars_PU, total))
    for table, grads_UD in zip(tables, grads, strict=True):
        torch.ops.tilerec.rule_apply_(
            table.leaf, table.slots, rows_U, grads_UD, scalars_PU, table.dim, spec.rule, hyper, step,
            list(table.place.key), table.place.row_offset, table.place.column_offset,
        )  # fmt: skip
    count_updates(tables, spec)
    if bad:
        first.report_skipped(spec, bad, first_bad)


def _with_finite(sums: Tensor, grads_UD: Tensor) -> Tensor:
    """One more kind of sum, `[U, K + 1, units]`: in every unit 1 if the row's gradient is finite here, else 0."""
    finite_U = (grads_UD * 0).sum(dim=1) == 0  # an eighth of the time of isfinite and all
    return torch.cat((sums, finite_U.to(sums.dtype)[:, None, None].expand(-1, 1, sums.shape[2])), dim=1)


def _partials(
    table: TileRows, rows_U: Tensor, grads_UD: Tensor, scalars_PU: Tensor, phase: int, unit: int,
    spec: OptimizerSpec, hyper: Sequence[float],
) -> Tensor:  # fmt: skip
    """A tile's share of a phase's row sums, `[U, K, units]`; for `unit` see `_sum_over_columns`."""
    leaf, slots, step = table.leaf, table.slots, table.updates + 1
    if unit != 1:
        return torch.ops.tilerec.rule_partials(
            leaf, slots, rows_U, grads_UD, scalars_PU, phase, table.dim, unit > 0, table.place.column_offset,
            spec.rule, hyper, step,
        )  # fmt: skip
    # Single columns: each element as a row of one column, so the very kernel that sums also gives the terms.
    distinct, width = grads_UD.shape
    elements = [
        slot[rows_U].reshape(-1, 1) if slot.dim() == 2 else slot[rows_U].repeat_interleave(width)
        for slot in slots
    ]
    terms = torch.ops.tilerec.rule_partials(
        leaf.detach()[rows_U].reshape(-1, 1), elements, torch.arange(distinct * width, device=leaf.device),
        grads_UD.reshape(-1, 1), scalars_PU.repeat_interleave(width, dim=1), phase, table.dim, False, 0, spec.rule,
        hyper, step,
    )  # fmt: skip
    return terms.view(distinct, width, terms.shape[1]).transpose(1, 2)


def _summed(records: Sequence[GradientRecord]) -> tuple[Tensor, list[Tensor]]:
    """Distinct rows, the same for all records, and each one's summed gradients."""
    sums = [sum_rows(record) for record in records]
    assert all(rows.numel() == sums[0][0].numel() for rows, _ in sums), (
        "column blocks of a row get the same ids"
    )
    return sums[0][0], [grads for _, grads in sums]


def _sum_over_columns(
    tables: Sequence[TileRows], name: str, sums: Sequence[Tensor], unit: int
) -> Generator[_Talk, dict[int, Tensor], Tensor]:
    """`[K, U]`: each row's sums over all column blocks, added from left to right.

    Args:
        tables: this rank's tiles of the rows; sums: theirs, `[U, K, units]`.
        unit: columns of each of the sums (8: aligned blocks, 1: single columns), which are put in place first and then
            added in the order of a whole row; 0: one sum for each column block of the tiling.
    """
    distinct, kinds, _ = sums[0].shape
    peers, dim = tables[0].peers, tables[0].dim
    assert peers.columns is not None
    me = peers.group.rank
    parts = [(rank, c0 // unit, width // unit) if unit else (rank, 0, 1) for rank, c0, width in peers.columns]
    others = list(dict.fromkeys(rank for rank, _, _ in parts if rank != me))
    sizes = {rank: distinct * kinds * sum(b for r, _, b in parts if r == rank) for rank in others}
    listeners = sorted({rank for table in tables for rank in table.peers.listeners})
    sends = {
        rank: torch.cat(
            [
                own.reshape(-1)
                for table, own in zip(tables, sums, strict=True)
                if rank in table.peers.listeners
            ]
        )
        for rank in listeners
    }
    receives = yield _Talk(name, sizes, sends, sums[0])
    total = sums[0].new_zeros((distinct, kinds, dim // unit if unit else 1))
    at, own_at = dict.fromkeys(others, 0), 0
    for rank, begin, count in parts:
        if rank == me:
            got = sums[own_at]
            own_at += 1
        else:
            size = distinct * kinds * count
            got = receives[rank][at[rank] : at[rank] + size].view(distinct, kinds, count)
            at[rank] += size
        total[:, :, begin : begin + count] += got
    flat = total.view(distinct * kinds, total.shape[2])
    return add_blocks(block_sums(flat, 0) if unit == 1 else flat).view(distinct, kinds).T.contiguous()
