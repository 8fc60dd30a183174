"""Gradient exchange between the replicas of a tile: each has the gradients of the homes that read from it; all apply
the gradients of all.

Per table and step, the form that sends the fewest bytes is used (all replicas choose from the same counts); D columns:
  bags    output gradients of bags and the ids: 4 D P + 4 N bytes from each replica to each; sums keep unsharded order
  rows    summed gradients of touched rows: at most (4 D + 4) N bytes from each to each
  dense   one all-reduce of the whole gradient and of the touch counts of rows: 8 (D + 1) rows (W - 1) / W bytes from
          each; only if every rank of the group is a replica

    G[row] = sum over features, then replicas, then occurrences      (bags: in that order; rows, dense: sums of sums)

For any number of tables: one message with counts, one with integers, one with gradients to every peer, and one
all-reduce.

Legend: U distinct rows, D columns, P bags, N ids, F features, T tables, R replicas, W ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from tilerec.comms.group import Group, Pending
from tilerec.ops.backends import reused_empty
from tilerec.ops.gradient.definition import sum_rows_of_tables
from tilerec.ops.gradient.record import GradientRecord
from tilerec.ops.runtime.upload import upload


class GradientForm(Enum):
    """Form in which the gradients of a table are sent."""

    BAGS = "bags"
    ROWS = "rows"
    DENSE = "dense"


@dataclass(frozen=True)
class ReplicaTable:
    """One table of a gradient exchange. All fields but `features` are the same on all replicas."""

    handle: int
    rows: int
    dim: int
    features: list[int]  # of the record


@dataclass(frozen=True)
class _Counts:
    """Counts of one replica's gradients of one table."""

    features: int
    bags: int
    ids: int


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
    if exact:
        return GradientForm.BAGS
    others = len(counts) - 1
    as_bags = others * sum(4 * dim * bags + 4 * ids for bags, ids in counts)
    as_rows = others * sum((4 * dim + 4) * min(ids, rows) for _, ids in counts)
    as_dense = 8 * (dim + 1) * rows * others if len(counts) == group_size else None
    if as_dense is not None and as_dense < min(as_rows, as_bags):
        return GradientForm.DENSE
    return GradientForm.BAGS if bags_can_travel and as_bags < as_rows else GradientForm.ROWS


def exchange_replica_gradients(
    group: Group, replicas: Sequence[int], record: GradientRecord, tables: Sequence[ReplicaTable], *, exact: bool
) -> GradientRecord:  # fmt: skip
    """Return the gradients of all replicas as one record, equal on all of them. Collective among `replicas`.

    Args:
        replicas: owners of the tables, this rank included, ascending.
        record: this rank's gradients of the tables.
    """
    me, others = group.rank, [rank for rank in replicas if rank != group.rank]
    bounds = id_bounds(record)
    own = [
        _Counts(
            len(table.features),
            sum(record.bags[f] for f in table.features),
            sum(bounds[f][1] - bounds[f][0] for f in table.features),
        )
        for table in tables
    ]
    counts = _exchange_counts(group, others, own)
    forms = [
        choose_form(
            table.rows, table.dim, [(counts[r][t].bags, counts[r][t].ids) for r in replicas], group.size,
            bags_can_travel=record.sample_weights is None, exact=exact,
        )
        for t, table in enumerate(tables)
    ]  # fmt: skip
    as_bags = [t for t, form in enumerate(forms) if form is GradientForm.BAGS]
    as_rows = [t for t, form in enumerate(forms) if form is GradientForm.ROWS]
    as_dense = [t for t, form in enumerate(forms) if form is GradientForm.DENSE]
    summed = [*as_rows, *as_dense]
    rows_of = [tables[t].rows for t in summed]
    sums = dict(zip(summed, sum_rows_of_tables(record, [tables[t].features for t in summed], rows_of), strict=True))
    distinct = _exchange_ints(group, others, "replica rows", [sums[t][0].numel() for t in as_rows]) if as_rows else {}

    small = all(table.rows < 1 << 31 for table in tables)
    distinct[me] = [sums[t][0].numel() for t in as_rows]
    numbers = _pack_numbers(record, bounds, tables, as_bags, [sums[t][0] for t in as_rows], small)
    received: dict[int, Tensor] = {me: numbers}
    sizes: list[int] = []  # of each replica's gradients
    for rank in replicas:
        bags = [counts[rank][t] for t in as_bags]
        if rank != me:
            size = sum(2 * c.features + c.bags + c.ids for c in bags) + sum(distinct.get(rank, []))
            received[rank] = numbers.new_empty(size)
        elements = [tables[t].dim * c.bags for t, c in zip(as_bags, bags, strict=True)]
        elements += [tables[t].dim * count for t, count in zip(as_rows, distinct.get(rank, []), strict=False)]
        sizes.append(sum(elements))
    # One buffer for all replicas' gradients, this rank's included: received ones are read in place.
    room = reused_empty(sum(sizes), record.grad.dtype, record.grad.device)
    rows = dict(zip(replicas, room.split(sizes), strict=True))
    gradients = rows[me]
    _pack_gradients(gradients, record, tables, as_bags, [sums[t][1] for t in as_rows])
    exchange = _exchange_call(group, others)
    if as_bags or as_rows:
        ids_pending = exchange("replica ids", {r: received[r] for r in others}, dict.fromkeys(others, numbers))
        gradients_pending = exchange(
            "replica gradients", {r: rows[r] for r in others}, dict.fromkeys(others, gradients)
        )
        ids_pending.wait()
        gradients_pending.wait()
    unpacked = _Unpacked(room)
    features = [sum(counts[rank][t].features for t in as_bags) for rank in replicas]
    head = _read_ints([received[rank][: 2 * count] for rank, count in zip(replicas, features, strict=True)])
    for rank, own_head in zip(replicas, head, strict=True):
        unpacked.add(received[rank], own_head, tables, as_bags, [counts[rank][t] for t in as_bags], as_rows,
                     distinct.get(rank, []))  # fmt: skip
    if as_dense:
        unpacked.add_dense(_reduce_dense(group, tables, {t: sums[t] for t in as_dense}), tables)
    return unpacked.record(record, tables)


def _exchange_call(group: Group, others: Sequence[int]) -> Callable[..., Pending]:
    """Return the call that exchanges messages: one for all ranks of the group, or point to point for some of them."""
    return group.swap if len(others) == group.size - 1 else group.exchange


def _exchange_ints(group: Group, others: Sequence[int], name: str, own: Sequence[int]) -> dict[int, list[int]]:
    """Send integers to every peer, and return as many from each peer."""
    mine = upload(own, group.device)
    received = {rank: torch.empty_like(mine) for rank in others}
    _exchange_call(group, others)(name, received, dict.fromkeys(others, mine)).wait()
    return dict(zip(others, _read_ints(list(received.values())), strict=True))


def _read_ints(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Copy integers from the device to the host, with one wait for all tensors."""
    if not tensors:
        return []
    numbers = iter(torch.cat(list(tensors)).tolist())
    return [list(itertools.islice(numbers, tensor.numel())) for tensor in tensors]


def _exchange_counts(group: Group, others: Sequence[int], own: Sequence[_Counts]) -> dict[int, list[_Counts]]:
    flat = [number for c in own for number in (c.features, c.bags, c.ids)]
    received = _exchange_ints(group, others, "replica counts", flat)
    of_peers = {
        rank: [_Counts(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)] for rank, numbers in received.items()
    }
    return {**of_peers, group.rank: list(own)}


def id_bounds(record: GradientRecord) -> list[tuple[int, int]]:
    """Return the range of each feature's ids in `record.ids`."""
    if record.offsets is None:
        return [(start, start + count) for start, count in zip(record.starts, record.bags, strict=True)]
    edges = [edge for start, count in zip(record.starts, record.bags, strict=True) for edge in (start, start + count)]
    at = record.offsets[upload(edges, record.offsets.device)].tolist()
    return list(zip(at[0::2], at[1::2], strict=True))


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


def _reduce_dense(
    group: Group, tables: Sequence[ReplicaTable], sums: dict[int, tuple[Tensor, Tensor]]
) -> dict[int, tuple[Tensor, Tensor]]:
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
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for edge, (begin, end), (t, block) in zip(edges, itertools.pairwise(ends), blocks.items(), strict=False):
        rows_U = touched[begin:end] - edge
        found[t] = (rows_U, block[rows_U])
    return found


class _Unpacked:
    """Contents of all replicas' messages, concatenated."""

    def __init__(self, gradients: Tensor) -> None:
        self.lengths: list[Tensor] = []
        self.ids: list[Tensor] = []
        self.grads = [gradients]
        # Per feature: (table, position in the sum, order of arrival), first bag, bags, first gradient.
        self.features: list[tuple[tuple[int, int, int], int, int, int]] = []
        self._bag = self._element = 0

    def _take(self, t: int, order: int, bags: int, dim: int) -> None:
        self.features.append(((t, order, len(self.features)), self._bag, bags, self._element))
        self._bag += bags
        self._element += bags * dim

    def add(
        self, numbers: Tensor, head: Sequence[int], tables: Sequence[ReplicaTable], as_bags: Sequence[int],
        counts: Sequence[_Counts], as_rows: Sequence[int], distinct: Sequence[int],
    ) -> None:  # fmt: skip
        """Append one replica's message.

        Args:
            head: the beginning of the message, on the host: (position in the sum, bags) of each feature.
        """
        sizes = [len(head), sum(c.bags for c in counts), sum(c.ids for c in counts)]
        _, lengths, ids, rows = numbers.split([*sizes, numbers.numel() - sum(sizes)])
        pairs = list(zip(head[::2], head[1::2], strict=True))
        at = 0
        for t, c in zip(as_bags, counts, strict=True):
            for order, bags in pairs[at : at + c.features]:
                self._take(t, order, bags, tables[t].dim)
            at += c.features
        for t, size in zip(as_rows, distinct, strict=True):
            self._take(t, 0, size, tables[t].dim)
        self.lengths += [lengths, torch.ones_like(rows)]
        self.ids += [ids, rows]

    def add_dense(self, found: dict[int, tuple[Tensor, Tensor]], tables: Sequence[ReplicaTable]) -> None:
        """Append the rows that `_reduce_dense` has summed."""
        for t, (rows_U, grads_UD) in found.items():
            self._take(t, 0, rows_U.numel(), tables[t].dim)
            self.lengths.append(torch.ones_like(rows_U))
            self.ids.append(rows_U)
            self.grads.append(grads_UD.reshape(-1))

    def record(self, own: GradientRecord, tables: Sequence[ReplicaTable]) -> GradientRecord:
        """Return everything as one record, with the features of a table in the order of the sum."""
        lengths_P = torch.cat(self.lengths)
        offsets = torch.zeros(lengths_P.numel() + 1, dtype=torch.int64, device=lengths_P.device)
        torch.cumsum(lengths_P, 0, out=offsets[1:])
        features = sorted(self.features)
        dims = tuple([tables[mark[0]].dim for mark, *_ in features])
        grads = self.grads[0] if len(self.grads) == 1 else torch.cat(self.grads)
        return GradientRecord(
            own.serial, grads, torch.cat(self.ids), offsets, None,
            tuple([tables[mark[0]].handle for mark, *_ in features]), dims,
            tuple([bag for _, bag, _, _ in features]), tuple([count for _, _, count, _ in features]),
            tuple([element for _, _, _, element in features]), dims, (0,) * len(features),
        )  # fmt: skip
