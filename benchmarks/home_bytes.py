"""Bytes of one rank's batch on any number of ranks, counted by the runtime's own layout, router and row exchange.

No other rank runs. The group records the messages of this rank, and answers as if all other batches were empty.

Legend: W ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilerec.comms.group import Group, Handle, Pending
from tilerec.comms.traffic import Traffic
from tilerec.sharding.distinct_ids import DistinctIds
from tilerec.sharding.layout import ExchangeLayout, SlotRead, TableLayout
from tilerec.sharding.route import Routed, RouteInput, Router
from tilerec.sharding.row_exchange import RowExchange
from tilerec.spec.topology import Topology


class Answered:
    """The handle of a call that has ended."""

    def __init__(self, output: Tensor) -> None:
        self.output = output

    def wait(self) -> Tensor:
        return self.output

    def is_done(self) -> bool:
        return True


class OneOfMany(Group):
    """One rank of a group whose other ranks have empty batches. It counts messages, and sends none."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size, Traffic(rank, size))

    def _all_to_all(
        self, name: str, output: Tensor | None, input: Tensor, output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> Handle:  # fmt: skip
        output = input.new_zeros(sum(output_splits)) if output is None else output.zero_()
        starts = [0, *itertools.accumulate(output_splits)]
        if name == "header":  # the first word of a header: flags, and a digest that is equal on all ranks
            output[torch.tensor([start for start, size in zip(starts, output_splits, strict=False) if size])] = input[0]
        own = sum(input_splits[: self.rank])
        begin, end = starts[self.rank], starts[self.rank + 1]
        output[begin:end] = input[own : own + end - begin]
        return Answered(output)

    def partition(self, name: str, parts: Sequence[Sequence[int]]) -> Group:
        raise AssertionError(f"{name}: a home's messages need one channel")

    def _exchange(self, name: str, receives: Mapping[int, Tensor], sends: Mapping[int, Tensor]) -> Pending:
        raise AssertionError(f"{name}: a home sends no single messages")

    def _all_reduce_(self, name: str, tensor: Tensor) -> Handle:
        raise AssertionError(f"{name}: a home reduces nothing")

    def begin(self, operation: str) -> None: ...

    def abort(self, error: BaseException) -> None: ...

    def close(self) -> None: ...


@dataclass
class Count:
    """Bytes of one home's batch.

    Args:
        header, ids: [W] to each owner.
        rows: [W] from each owner or proxy, in fp32; as many bytes of gradients go back.
        inside: [W] from each owner to a proxy on its host, and as many of gradients back.
    """

    header: Tensor
    ids: Tensor
    rows: Tensor
    inside: Tensor


def count_home(
    tables: Sequence[TableLayout], slots: Sequence[int], topology: Topology, home: int,
    batch: tuple[list[Tensor], list[Tensor]], once: bool,
) -> Count:  # fmt: skip
    """Return the bytes of one home's batch by the runtime's layout, router and row exchange."""
    size = topology.world_size
    wired = [replace(table, wire=replace(table.wire, distinct=None if once else False)) for table in tables]
    layout = ExchangeLayout(wired, [SlotRead(t, f"f{s}") for s, t in enumerate(slots)], topology, home)
    group = OneOfMany(home, size)
    router = Router(layout, group, weighted=False, each_id=False, wide=torch.float32)
    ids, lengths = batch
    offsets = torch.cat(lengths).cumsum(0)
    offsets = torch.cat((offsets.new_zeros(1), offsets))
    samples = lengths[0].numel()
    read = RouteInput(torch.cat(ids), offsets, None, [samples], [samples] * len(slots))
    keys = [route.slot for route in layout.routes]
    read = DistinctIds(layout, each_id=False)(read, keys)
    routed = router(read, keys)
    exchange = RowExchange(layout, group, torch.float32, each_id=False)
    received = exchange._home_rows(routed)
    rows = torch.tensor(received.sums(received.sizes()), dtype=torch.float64) * 4
    return Count(_line(group, "header"), _line(group, "ids"), rows, _inside(layout, routed))


def _line(group: Group, name: str) -> Tensor:
    found = [line.bytes for line in group.traffic.table() if line.name == name]
    return torch.tensor(found[0] if found else (0,) * group.size, dtype=torch.float64)


def _inside(layout: ExchangeLayout, routed: Routed) -> Tensor:
    """Return [W] bytes that owners send to proxies on their host, for this home."""
    found = torch.zeros(layout.size, dtype=torch.float64)
    for merge in layout.own_merges:
        for p in merge.parts:
            part = layout.parts[p]
            (owner,) = part.owners
            if owner != merge.proxy:
                found[owner] += routed.counts[layout.wire[p]] * sum(unit.width for unit in part.units) * 4
    return found
