"""Messages between the replicas of a tile: counts, integers, and the gradients of bags.

Legend: D columns, P bags, N ids, F features, T tables, R replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilerec.comms.group import Group, Pending
from tilerec.ops.gradient.record import GradientRecord
from tilerec.ops.runtime.upload import upload


@dataclass(frozen=True)
class ReplicaTable:
    """One table of a gradient exchange. All fields but `features` are the same on all replicas."""

    handle: int
    rows: int
    dim: int
    features: Sequence[int]  # of the record


class Counts(NamedTuple):
    """Counts of one replica's gradients of one table; rows: those that it has added up, -1: none yet."""

    features: int
    bags: int
    ids: int
    rows: int = -1


def exchange_call(group: Group, others: Sequence[int]) -> Callable[..., Pending]:
    """Return the call that exchanges messages: one for all ranks of the group, or point to point for some of them."""
    return group.swap if len(others) == group.size - 1 else group.exchange


def exchange_ints(group: Group, name: str, own: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Send integers to every peer, and return as many from each peer."""
    sizes = [len(numbers) for numbers in own.values()]
    flat = upload(list(itertools.chain.from_iterable(own.values())), group.device)
    mine = dict(zip(own, flat.split(sizes), strict=True))
    received = {rank: torch.empty_like(numbers) for rank, numbers in mine.items()}
    exchange_call(group, list(own))(name, received, mine).wait()
    return dict(zip(own, read_ints(list(received.values())), strict=True))


def read_ints(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Copy integers from the device to the host, with one wait for all tensors."""
    if not tensors:
        return []
    numbers = iter(torch.cat(list(tensors)).tolist())
    return [list(itertools.islice(numbers, tensor.numel())) for tensor in tensors]


def exchange_counts(group: Group, name: str, own: Mapping[int, Sequence[Counts]]) -> dict[int, list[Counts]]:
    """Send counts to every peer, one for each table, and return as many from each peer."""
    flat = {rank: [number for c in some for number in c] for rank, some in own.items()}
    return {
        rank: [Counts(*numbers[i : i + 4]) for i in range(0, len(numbers), 4)]
        for rank, numbers in exchange_ints(group, name, flat).items()
    }


def id_bounds(record: GradientRecord) -> list[tuple[int, int]]:
    """Return the range of each feature's ids in `record.ids`."""
    if record.offsets is None:
        return [(start, start + count) for start, count in zip(record.starts, record.bags, strict=True)]
    edges = [edge for start, count in zip(record.starts, record.bags, strict=True) for edge in (start, start + count)]
    at = record.offsets[upload(edges, record.offsets.device)].tolist()
    return list(zip(at[0::2], at[1::2], strict=True))


class UnpackedBags:
    """Contents of all replicas' messages, concatenated."""

    def __init__(self, gradients: Tensor) -> None:
        self.single = True  # every bag has one id
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
        counts: Sequence[Counts], as_rows: Sequence[int], distinct: Sequence[int],
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
        self.single = self.single and not as_bags
        self.lengths += [lengths, torch.ones_like(rows)]
        self.ids += [ids, rows]

    def add_dense(self, found: dict[int, tuple[Tensor, Tensor]], tables: Sequence[ReplicaTable]) -> None:
        """Append the rows that `_reduce_dense` has summed."""
        for t, (rows_U, grads_UD) in found.items():
            self._take(t, 0, rows_U.numel(), tables[t].dim)
            self.lengths.append(torch.ones_like(rows_U))
            self.ids.append(rows_U)
            self.grads.append(grads_UD.reshape(-1))

    def _offsets(self) -> Tensor:
        lengths_P = torch.cat(self.lengths)
        offsets = torch.zeros(lengths_P.numel() + 1, dtype=torch.int64, device=lengths_P.device)
        torch.cumsum(lengths_P, 0, out=offsets[1:])
        return offsets

    def record(self, own: GradientRecord, tables: Sequence[ReplicaTable]) -> GradientRecord:
        """Return everything as one record, with the features of a table in the order of the sum."""
        offsets = None if self.single else self._offsets()
        features = sorted(self.features)
        dims = tuple([tables[mark[0]].dim for mark, *_ in features])
        grads = self.grads[0] if len(self.grads) == 1 else torch.cat(self.grads)
        return GradientRecord(
            own.serial, grads, torch.cat(self.ids), offsets, None,
            tuple([tables[mark[0]].handle for mark, *_ in features]), dims,
            tuple([bag for _, bag, _, _ in features]), tuple([count for _, _, count, _ in features]),
            tuple([element for _, _, _, element in features]), dims, (0,) * len(features),
        )  # fmt: skip
