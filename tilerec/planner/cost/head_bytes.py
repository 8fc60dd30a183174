"""A table in frequency order: the curve of its reads, and the bytes of its step with heads of all sizes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilerec.planner.cost.cuts import head_rows
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.price import price
from tilerec.planner.cost.realise import sharding_of
from tilerec.planner.cost.ways import HEADS, Option, Way
from tilerec.planner.cost.workload import TableWork, Workload
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
    model = Model(Workload([work]), topology)
    found = []
    for head in (0.0, *HEADS):
        rows = int(head_rows(work.rows, head))
        if bool(head) != bool(rows) or work.rows - rows < ranks:
            continue
        tiling = sharding_of(model, 0, Option(Way.ROWS, 1, ranks, head=head), (), None).tiling
        assert tiling is not None
        sent = np.sum(list(price([tiling], model).sent.values()), axis=0)
        found.append(HeadBytes(rows, float(model.workload.share(0, 0, rows)), float(sent.mean())))
    return found


def read_curve(work: TableWork) -> tuple[tuple[int, float], ...]:
    """Return (rows, share of the table's ids in the first so many rows), with rows that grow by a quarter."""
    workload = Workload([work])
    edges = np.minimum(workload.laws.edges, work.rows).astype(np.int64)
    rows = np.unique(np.append(edges, work.rows))
    shares = workload.share(np.zeros(len(rows), np.int64), 0, rows)
    return tuple((int(row), round(float(share), 4)) for row, share in zip(rows, shares, strict=True))
