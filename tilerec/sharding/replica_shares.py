"""Sums of rows by shares: replica i of R adds up the rows whose number has the remainder i when divided by R.

    replica 0   rows 0 1 2 3  --rows 1 3-->  replica 1     all gradients of a row are then on one replica,
    replica 1   rows 1 2 5    --row 2----->  replica 0     which adds them up in the order of the sum

Remainders spread rows that are numbered by frequency evenly. A bag travels once to each replica that adds up one of its
rows, and with these rows only.

Legend: U distinct rows, D columns, P bags, N ids, R replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.ops.gradient.definition import sum_rows_of_tables
from tilerec.ops.gradient.record import GradientRecord
from tilerec.ops.runtime.upload import upload
from tilerec.sharding.replica_messages import (
    Counts,
    ReplicaTable,
    UnpackedBags,
    exchange_call,
    exchange_counts,
    read_ints,
)


class Bags(NamedTuple):
    """Gradients of bags of one feature.

    Attributes:
        order: position of the feature in the sum.
        lengths_P: ids of each bag. ids_N: row numbers, bag after bag. grads_PD: gradient of each bag.
    """

    order: int
    lengths_P: Tensor
    ids_N: Tensor
    grads_PD: Tensor


def bags_of_sums(rows_U: Tensor, grads_UD: Tensor) -> Bags:
    """Return row sums as bags of one id."""
    return Bags(0, torch.ones_like(rows_U), rows_U, grads_UD)


def bags_of_record(record: GradientRecord, bounds: Sequence[tuple[int, int]], features: Sequence[int]) -> list[Bags]:
    """Return the bags of some features of a record without sample weights; bounds: each feature's range of ids."""
    found: list[Bags] = []
    for f in features:
        start, count = record.starts[f], record.bags[f]
        ids_N = record.ids[bounds[f][0] : bounds[f][1]]
        edges = None if record.offsets is None else record.offsets[start : start + count + 1]
        lengths_P = torch.ones_like(ids_N) if edges is None else edges[1:] - edges[:-1]
        found.append(Bags(record.order[f] if record.order else f, lengths_P, ids_N, record.grads_of(f)))
    return found


def sum_shares(
    group: Group, replicas: Sequence[int], serial: int, tables: Sequence[ReplicaTable],
    bags: Mapping[int, Sequence[Bags]],
) -> dict[int, tuple[Tensor, Tensor]]:  # fmt: skip
    """Return the rows [U] of this replica's share that any replica touched, and their sums [U, D], by table.

    Collective among `replicas`, ascending. The sums' order is that of the features, then of the replicas.

    Args:
        bags: this replica's bags, by table.
    """
    named = list(bags)
    others = [rank for rank in replicas if rank != group.rank]
    wide = any(tables[t].rows >= 1 << 31 for t in named)
    split = iter(split_bags([own for t in named for own in bags[t]], len(replicas)))
    shares = [[next(split) for _ in bags[t]] for t in named]
    dtype = torch.int64 if wide else torch.int32
    messages = {
        rank: _Message.of([[own[i] for own in table] for table in shares], dtype) for i, rank in enumerate(replicas)
    }
    own = messages[group.rank]
    counts = exchange_counts(group, "replica shares", {rank: messages[rank].counts for rank in others})
    counts[group.rank] = own.counts
    numbers, rows = {group.rank: own.numbers}, {group.rank: own.grads}
    for rank in others:
        numbers[rank] = own.numbers.new_empty(sum(2 * c.features + c.bags + c.ids for c in counts[rank]))
        rows[rank] = own.grads.new_empty(sum(tables[t].dim * c.bags for t, c in zip(named, counts[rank], strict=True)))
    exchange = exchange_call(group, others)
    pending = [
        exchange("replica ids", {r: numbers[r] for r in others}, {r: messages[r].numbers for r in others}),
        exchange("replica gradients", {r: rows[r] for r in others}, {r: messages[r].grads for r in others}),
    ]
    for one in pending:
        one.wait()
    heads = read_ints([numbers[rank][: 2 * sum(c.features for c in counts[rank])] for rank in replicas])
    unpacked = UnpackedBags(torch.cat([rows[rank] for rank in replicas]))
    for rank, head in zip(replicas, heads, strict=True):
        unpacked.add(numbers[rank], head, tables, named, counts[rank], [], [])
    like = GradientRecord(serial, own.grads, numbers[group.rank], None, None, (), (), (), (), (), (), ())
    record = unpacked.record(like, tables)
    position = {tables[t].handle: i for i, t in enumerate(named)}
    read_by: list[list[int]] = [[] for _ in named]
    for f, handle in enumerate(record.sinks):
        read_by[position[handle]].append(f)
    found = sum_rows_of_tables(record, read_by, [tables[t].rows for t in named])
    return dict(zip(named, found, strict=True))


class _Message(NamedTuple):
    """Bags for one replica.

    Attributes:
        counts: by table.
        numbers: (position in the sum, bags) of each feature, lengths of bags, ids.
        grads: gradients of bags, flat.
    """

    counts: list[Counts]
    numbers: Tensor
    grads: Tensor

    @classmethod
    def of(cls, tables: Sequence[Sequence[Bags]], dtype: torch.dtype) -> _Message:
        flat = [own for table in tables for own in table]
        counts = [
            Counts(len(table), sum(len(own.lengths_P) for own in table), sum(len(own.ids_N) for own in table))
            for table in tables
        ]
        head = upload([n for own in flat for n in (own.order, len(own.lengths_P))], flat[0].ids_N.device)
        numbers = torch.cat([head, *(own.lengths_P for own in flat), *(own.ids_N for own in flat)])
        return cls(counts, numbers.to(dtype), torch.cat([own.grads_PD.reshape(-1) for own in flat]))


def split_bags(bags: Sequence[Bags], replicas: int) -> list[list[Bags]]:
    """Return the parts of each of `bags` that each replica adds up, with bags and ids in their order.

    All features are cut at once, so a GPU's host waits twice for any number of them.

    Example: bags [4 7] [2] and two replicas: [4] [2] for replica 0, [7] for replica 1.
    """
    ids_N = torch.cat([own.ids_N for own in bags])
    counts = [len(own.lengths_P) for own in bags]
    total, device = sum(counts), ids_N.device
    feature_P = torch.repeat_interleave(upload(counts, device), output_size=total)
    bag_N = torch.repeat_interleave(torch.cat([own.lengths_P for own in bags]), output_size=len(ids_N))
    part_N = feature_P[bag_N] * replicas + ids_N % replicas  # by feature, then replica
    by_part_N = torch.argsort(part_N, stable=True)
    places, lengths = torch.unique_consecutive((part_N * max(1, total) + bag_N)[by_part_N], return_counts=True)
    parts = len(bags) * replicas
    sizes = torch.zeros(2, parts, dtype=torch.int64, device=device)
    sizes[0].index_add_(0, places // max(1, total), torch.ones_like(places))
    sizes[1].index_add_(0, part_N, torch.ones_like(part_N))
    of_bags, of_ids = sizes.tolist()
    cut_bags = (places % max(1, total)).split(of_bags)
    cut_lengths, cut_ids = lengths.split(of_bags), ids_N[by_part_N].split(of_ids)
    firsts = itertools.accumulate(counts, initial=0)
    return [
        [
            Bags(own.order, cut_lengths[part], cut_ids[part], own.grads_PD[cut_bags[part] - first])
            for part in range(f * replicas, (f + 1) * replicas)
        ]
        for f, (own, first) in enumerate(zip(bags, firsts, strict=False))
    ]
