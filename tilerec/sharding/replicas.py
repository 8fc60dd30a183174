"""Gradient exchange between the replicas of a tile: each has the gradients of the homes that read from it; all apply
the gradients of all.

Per table and step, the form that sends the fewest bytes is used (all replicas choose from the same counts); D columns:
  bags    output gradients of bags and the ids: 4 D P + 4 N bytes from each replica to each; sums keep unsharded order
  rows    summed gradients of touched rows: at most (4 D + 4) N bytes from each to each
  dense   one all-reduce of the whole gradient and of the touch counts of rows: 8 (D + 1) rows (W - 1) / W bytes from
          each; only if every rank of the group is a replica
  shares  replica i of R adds up the rows whose number has the remainder i (`replica_shares.py`), then sends the sums as
          rows: about (4 D + 4) (U + U') (R - 1) / R bytes from each, for U' distinct rows of all replicas. Beyond
          MOST_COPIES replicas nothing else is sent but a dense sum: no replica sends R - 1 copies of its gradients.

    G[row] = sum over features, then replicas, then occurrences      (exact: in that order; else sums of sums)

For any number of tables: one message with counts, one with integers, one with gradients to every peer, one
all-reduce, and four messages of shares. Rows that probably travel are added up first: the counts include them.

Legend: U distinct rows, D columns, P bags, N ids, F features, T tables, R replicas, W ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.comms.group import Group, Pending
from tilerec.ops.backends import outputs_from, reused_empty
from tilerec.ops.gradient.definition import sum_rows_of_tables
from tilerec.ops.gradient.record import GradientRecord
from tilerec.ops.runtime.upload import upload
from tilerec.sharding.replica_messages import (
    Counts,
    UnpackedBags,
    exchange_call,
    exchange_counts,
    exchange_ints,
    read_ints,
)
from tilerec.sharding.replica_messages import ReplicaTable as ReplicaTable
from tilerec.sharding.replica_messages import id_bounds as id_bounds
from tilerec.sharding.replica_shares import bags_of_record, bags_of_sums, sum_shares


class GradientForm(Enum):
    """Form in which the gradients of a table are sent."""

    BAGS = "bags"
    ROWS = "rows"
    DENSE = "dense"
    SHARES = "shares"


MOST_COPIES = 8
"""Largest number of replicas that send all their gradients to each other."""


def choose_form(
    rows: int, dim: int, counts: Sequence[tuple[int, int]], group_size: int, *, bags_can_travel: bool, exact: bool
) -> GradientForm:  # fmt: skip
    """Return the form that sends the fewest bytes for one table.

    Args:
        counts: (bags, ids) of every replica.
        bags_can_travel: True if the gradients of bags suffice (no sample weights).
        exact: sums must run in unsharded order.

    Example: 1,000 rows x 64, 2 replicas of 2,048 bags with 20,480 ids each: bags 0.6 MB; rows at most 0.26 MB (at most
    all rows of the table); dense 0.26 MB. The result is rows.
    """
    # All replicas must come to one result, so only operations that IEEE 754 rounds alike on every machine are used.
    replicas = len(counts)
    others = replicas - 1
    row = 4 * dim + 4
    touched = [min(ids, rows) for _, ids in counts]
    as_bags = others * sum(4 * dim * bags + 4 * ids for bags, ids in counts)
    as_rows = others * row * sum(touched)
    direct: float
    if exact:  # shares of bags: a bag travels once to each replica that adds up one of its rows
        copies = sum(min(ids, bags * replicas) for bags, ids in counts)
        to_adders = (4 * dim * copies + 4 * sum(ids for _, ids in counts)) * others / replicas
        direct, form = as_bags, GradientForm.BAGS
    else:
        to_adders = row * sum(touched) * others / replicas
        direct, form = as_rows, GradientForm.ROWS
        if bags_can_travel and as_bags < as_rows:
            direct, form = as_bags, GradientForm.BAGS
    # Distinct rows of all replicas: independent draws have the most if they are even.
    together = rows * (1 - math.prod(1 - own / rows for own in touched)) if rows else 0.0
    as_shares = to_adders + others * row * together
    if replicas > MOST_COPIES:
        direct = math.inf
    as_dense = 8 * (dim + 1) * rows * others
    if not exact and replicas == group_size and as_dense < direct and as_dense <= as_shares:
        return GradientForm.DENSE  # one message, shares are six
    return GradientForm.SHARES if as_shares < direct else form


def exchange_replica_gradients(
    group: Group, replicas: Sequence[int], record: GradientRecord, tables: Sequence[ReplicaTable], *, exact: bool
) -> Callable[[], GradientRecord]:  # fmt: skip
    """Send the gradients of all replicas to each other. Collective among `replicas`.

    Args:
        replicas: owners of the tables, this rank included, ascending.
        record: this rank's gradients of the tables.

    Returns:
        A function that waits for the gradients of the other replicas and returns those of all as one record, equal on
        all replicas. It is called once, on all replicas in one order; other work may come before it.
    """
    me, others = group.rank, [rank for rank in replicas if rank != group.rank]
    bounds = id_bounds(record)
    own, sums = _counts_and_sums(record, bounds, tables, exact=exact)
    counts = {**exchange_counts(group, "replica counts", dict.fromkeys(others, own)), me: own}
    forms = [
        _form_of_all(table, [counts[r][t] for r in replicas], group.size, record, exact=exact)
        for t, table in enumerate(tables)
    ]
    as_bags, as_rows, as_dense, in_shares = (
        [t for t, form in enumerate(forms) if form is wanted] for wanted in GradientForm
    )
    late = [t for t in [*as_dense, *([] if exact else in_shares)] if t not in sums]
    sums |= _row_sums(record, bounds, tables, late)
    distinct = {rank: {t: counts[rank][t].rows for t in as_rows} for rank in replicas}
    if in_shares:
        parts = {
            t: bags_of_record(record, bounds, tables[t].features) if exact else [bags_of_sums(*sums[t])]
            for t in in_shares
        }
        sums |= sum_shares(group, replicas, record.serial, tables, parts)
        as_rows = sorted([*as_rows, *in_shares])
        mine = [sums[t][0].numel() for t in in_shares]
        summed = {**exchange_ints(group, "replica rows", dict.fromkeys(others, mine)), me: mine}
        for rank, rows_of_shares in summed.items():
            distinct[rank] |= dict(zip(in_shares, rows_of_shares, strict=True))
    messages = {
        rank: _Contents([counts[rank][t] for t in as_bags], [distinct[rank][t] for t in as_rows]) for rank in replicas
    }
    small = all(table.rows < 1 << 31 for table in tables)
    numbers = _pack_numbers(record, bounds, tables, as_bags, [sums[t][0] for t in as_rows], small)
    received = {r: numbers if r == me else numbers.new_empty(messages[r].numbers()) for r in replicas}
    dims = [tables[t].dim for t in as_bags], [tables[t].dim for t in as_rows]
    sizes = [messages[rank].elements(*dims) for rank in replicas]
    # One buffer for all replicas' gradients, this rank's included: received ones are read in place.
    with outputs_from(group.send_buffer):
        room = reused_empty(sum(sizes), record.grad.dtype, record.grad.device)
    rows = dict(zip(replicas, room.split(sizes), strict=True))
    _pack_gradients(rows[me], record, tables, as_bags, [sums[t][1] for t in as_rows])
    pending: list[Pending] = []
    if as_bags or as_rows:
        exchange = exchange_call(group, others)
        pending = [
            exchange("replica ids", {r: received[r] for r in others}, dict.fromkeys(others, numbers)),
            exchange("replica gradients", {r: rows[r] for r in others}, dict.fromkeys(others, rows[me])),
        ]

    def finish() -> GradientRecord:
        for message in pending:
            message.wait()
        unpacked = UnpackedBags(room)
        heads = read_ints([received[rank][: messages[rank].head()] for rank in replicas])
        for rank, head in zip(replicas, heads, strict=True):
            own = messages[rank]
            unpacked.add(received[rank], head, tables, as_bags, own.bags, as_rows, own.rows)
        if as_dense:
            unpacked.add_dense(_reduce_dense(group, tables, {t: sums[t] for t in as_dense}), tables)
        return unpacked.record(record, tables)

    return finish


class _Contents(NamedTuple):
    """Contents of one replica's message: counts of each table whose bags travel; of each other one, its rows."""

    bags: list[Counts]
    rows: list[int]

    def head(self) -> int:
        """Return the integers at the beginning: (position in the sum, bags) of each feature."""
        return 2 * sum([own.features for own in self.bags])

    def numbers(self) -> int:
        """Return the integers of the message."""
        return self.head() + sum([own.bags + own.ids for own in self.bags]) + sum(self.rows)

    def elements(self, dims_of_bags: Sequence[int], dims_of_rows: Sequence[int]) -> int:
        """Return the elements of the gradients."""
        of_bags = sum([dim * own.bags for dim, own in zip(dims_of_bags, self.bags, strict=True)])
        return of_bags + sum([dim * count for dim, count in zip(dims_of_rows, self.rows, strict=True)])


Sums = dict[int, tuple[Tensor, Tensor]]
"""Touched rows [U] and their summed gradients [U, D], by table."""


def _counts_and_sums(
    record: GradientRecord, bounds: Sequence[tuple[int, int]], tables: Sequence[ReplicaTable], *, exact: bool
) -> tuple[list[Counts], Sums]:
    """Return this replica's counts, and the sums of the tables whose rows will probably travel.

    The other replicas mostly have similar batches, and the number of rows travels with the other counts. If they
    differ, bags travel, or rows are added up late: for shares and dense sums.
    """
    counts: list[Counts] = []
    for table in tables:
        bags = sum([record.bags[f] for f in table.features])
        counts.append(Counts(len(table.features), bags, sum([bounds[f][1] - bounds[f][0] for f in table.features])))
    early: list[int] = []
    for t, (table, own) in enumerate(zip(tables, counts, strict=True)):
        as_bags = 4 * table.dim * own.bags + 4 * own.ids
        as_rows = (4 * table.dim + 4) * min(own.ids, table.rows)
        if not exact and (record.sample_weights is not None or as_rows <= as_bags):
            early.append(t)
    sums = _row_sums(record, bounds, tables, early)
    for t, (rows_U, _) in sums.items():
        counts[t] = counts[t]._replace(rows=rows_U.numel())
    return counts, sums


def _form_of_all(
    table: ReplicaTable, counts: Sequence[Counts], group_size: int, record: GradientRecord, *, exact: bool
) -> GradientForm:  # fmt: skip
    """Return the form in which a table's gradients are sent; counts: of every replica."""
    sizes = [(own.bags, own.ids) for own in counts]
    unweighted = record.sample_weights is None
    form = choose_form(table.rows, table.dim, sizes, group_size, bags_can_travel=unweighted, exact=exact)
    not_summed = min([own.rows for own in counts]) < 0
    return GradientForm.BAGS if form is GradientForm.ROWS and not_summed else form


def _row_sums(
    record: GradientRecord, bounds: Sequence[tuple[int, int]], tables: Sequence[ReplicaTable], named: Sequence[int]
) -> Sums:
    """Return the sums of some tables."""
    found: Sums = {}
    if record.distinct and record.sample_weights is None and record.grad.dtype in (torch.float32, torch.float64):
        for t in named:
            if [record.distinct[f] for f in tables[t].features] == [True]:  # nothing to add up
                f = tables[t].features[0]
                found[t] = record.ids[slice(*bounds[f])], record.grads_of(f)
    left = [t for t in named if t not in found]
    sums = sum_rows_of_tables(record, [tables[t].features for t in left], [tables[t].rows for t in left])
    return found | dict(zip(left, sums, strict=True))


def _pack_numbers(
    record: GradientRecord, bounds: Sequence[tuple[int, int]], tables: Sequence[ReplicaTable],
    as_bags: Sequence[int], rows: Sequence[Tensor], small: bool,
) -> Tensor:  # fmt: skip
    """Return one tensor: (position in the sum, bags) of each feature, lengths of bags, their ids, touched rows."""
    device = record.grad.device
    features = [f for t in as_bags for f in tables[t].features]
    head = [number for f in features for number in (record.order[f] if record.order else f, record.bags[f])]
    ids = [record.ids[bounds[f][0] : bounds[f][1]] for f in features]
    lengths: list[Tensor] = []
    for f in features:
        if record.offsets is None:
            lengths.append(torch.ones(record.bags[f], dtype=torch.int64, device=device))
        else:
            edges = record.offsets[record.starts[f] : record.starts[f] + record.bags[f] + 1]
            lengths.append(edges[1:] - edges[:-1])
    dtype = torch.int32 if small else torch.int64
    pieces = [upload(head, device).to(dtype)]
    pieces += [torch.cat(part).to(dtype) for part in (lengths, ids, list(rows)) if part]
    return torch.cat(pieces)


def _pack_gradients(
    room: Tensor, record: GradientRecord, tables: Sequence[ReplicaTable], as_bags: Sequence[int],
    sums: Sequence[Tensor],
) -> None:  # fmt: skip
    """Write the gradients of bags, then those of touched rows, into `room`."""
    features = [f for t in as_bags for f in tables[t].features]
    counts, dims = [record.bags[f] for f in features], [record.dims[f] for f in features]
    end = sum(count * dim for count, dim in zip(counts, dims, strict=True))
    if features:
        torch.ops.tilerec.pick_rows_(
            room[:end], record.grad.reshape(-1), torch.empty(0, dtype=torch.int32, device=room.device), counts, dims,
            [-1] * len(features), [record.grad_starts[f] for f in features],
            [record.grad_strides[f] for f in features],
        )  # fmt: skip
    if sums:
        torch.cat([grads_UD.reshape(-1) for grads_UD in sums], out=room[end:])


def _reduce_dense(group: Group, tables: Sequence[ReplicaTable], sums: Sums) -> Sums:
    """Return the touched rows of each table and their gradients, summed over all ranks.

    One tensor is reduced: the number of ranks that touched each row, for all tables, then the gradients.
    """
    rows = [tables[t].rows for t in sums]
    edges = list(itertools.accumulate(rows, initial=0))
    sizes = [tables[t].rows * tables[t].dim for t in sums]
    first = next(iter(sums.values()))[1]
    flat = first.new_zeros(edges[-1] + sum(sizes))
    touches, grads = flat[: edges[-1]], flat[edges[-1] :].split(sizes)
    blocks = {t: block.view(tables[t].rows, tables[t].dim) for t, block in zip(sums, grads, strict=True)}
    for edge, (t, (rows_U, grads_UD)) in zip(edges, sums.items(), strict=False):
        touches[edge + rows_U] = 1
        blocks[t][rows_U] = grads_UD
    group.all_reduce_("replica gradients, dense", flat).wait()
    touched = touches.nonzero()[:, 0]
    ends = torch.searchsorted(touched, upload(edges, touched.device)).tolist()
    found: Sums = {}
    for edge, (begin, end), (t, block) in zip(edges, itertools.pairwise(ends), blocks.items(), strict=False):
        rows_U = touched[begin:end] - edge
        found[t] = (rows_U, block[rows_U])
    return found
