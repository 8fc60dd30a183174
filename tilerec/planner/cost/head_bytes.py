"""A table with known frequent ids: the curve of its reads, and the bytes of its step with heads of all sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tilerec.planner.cost.cuts import heads_of
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.price import price
from tilerec.planner.cost.realise import sharding_of
from tilerec.planner.cost.ways import HEADS, Option, Way
from tilerec.planner.cost.workload import TableWork, Workload
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology


class HeadBytes(NamedTuple):
    """Bytes that a rank sends in a step for one table, the mean over ranks, with ranges of the other rows on all ranks.

    Args:
        rows: of the head; 0: none. reads: share of the table's ids in it. sent: bytes.
    """

    rows: int
    reads: float
    sent: float


def head_bytes(work: TableWork, topology: Topology) -> list[HeadBytes]:
    """Return the bytes without a head, then those with each size of a head that has a row."""
    ranks = topology.world_size
    model, most_frequent = Model(Workload([work]), topology), Workload([_in_order(work)])
    found: list[HeadBytes] = []
    for head in (0.0, *HEADS):
        rows = int(heads_of(model.workload, head)[0])
        if work.rows - rows < ranks or (found and rows <= found[-1].rows):
            continue
        tiling = sharding_of(model, 0, Option(Way.ROWS, 1, ranks, head=head), (), None).tiling
        assert tiling is not None
        sent = np.sum(list(price([tiling], model).sent.values()), axis=0)
        found.append(HeadBytes(rows, float(most_frequent.share(0, 0, rows)), float(sent.mean())))
    return found


def bytes_saved(works: Sequence[TableWork], tilings: Sequence[Tiling], topology: Topology) -> float:
    """Return the bytes that a rank sends less in a step, the mean over ranks, because tilings have hot rows."""
    model = Model(Workload(works), topology)
    sent = [sum(price(own, model).sent.values(), np.zeros(1)) for own in ([t.bare for t in tilings], tilings)]
    return float(sent[0].mean() - sent[1].mean())


def read_curve(work: TableWork) -> tuple[tuple[int, float], ...]:
    """Return (rows, share of the table's ids in so many most frequent rows), with rows that grow by a quarter."""
    workload = Workload([_in_order(work)])
    edges = np.minimum(workload.laws.edges, work.rows).astype(np.int64)
    rows = np.unique(np.append(edges, work.rows))
    shares = workload.share(np.zeros(len(rows), np.int64), 0, rows)
    return tuple((int(row), round(float(share), 4)) for row, share in zip(rows, shares, strict=True))


def _in_order(work: TableWork) -> TableWork:
    """Return the table with its ids numbered by frequency."""
    return work if work.skew is None else replace(work, skew=replace(work.skew, ordered=True, hot=()))
