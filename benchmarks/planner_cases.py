"""Benchmark cases of the planner: tables, the features that read them, and machines. `planner_search.py` solves them.

Criteo: the 26 categorical features of the 1 TB click logs as in MLPerf's DLRM benchmark, ids capped at 40 M.
Merlin: the six synthetic models of NVIDIA Merlin's distributed-embeddings (examples/benchmarks/synthetic_models,
"config v3"), with their table counts, rows, columns, ids per bag, and global batch of 65,536. The totals agree with the
published 4.2, 26.3, 206.2, 773.8, 3,109.5 and 22,327.4 GiB. Log-normal: random rows and ids per bag, with fixed seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tilerec.planner.cost.options import Problem, build
from tilerec.planner.cost.workload import Reads, TableWork
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.topology import Topology

GIB = 2**30
CRITEO = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209,
    11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
# For each kind of table: count, rows, columns, and whether a second feature with `MERLIN_HOT` ids per bag reads it.
MERLIN = {
    "tiny": (
        (1, 10_000, 8, True), (1, 1_000_000, 16, True), (1, 25_000_000, 16, True), (1, 25_000_000, 16, False),
        (16, 10, 8, False), (10, 1_000, 8, False), (4, 10_000, 8, False), (2, 100_000, 16, False),
        (19, 1_000_000, 16, False),
    ),
    "small": (
        (5, 10_000, 16, True), (3, 4_000_000, 32, True), (1, 50_000_000, 32, True), (1, 50_000_000, 32, False),
        (30, 10, 16, False), (30, 1_000, 16, False), (5, 10_000, 16, False), (5, 100_000, 32, False),
        (27, 4_000_000, 32, False),
    ),
    "medium": (
        (20, 100_000, 64, True), (5, 10_000_000, 64, True), (1, 100_000_000, 128, True),
        (1, 100_000_000, 128, False), (80, 10, 32, False), (60, 1_000, 32, False), (80, 100_000, 64, False),
        (24, 200_000, 64, False), (40, 10_000_000, 64, False),
    ),
    "large": (
        (40, 100_000, 64, True), (16, 15_000_000, 64, True), (1, 200_000_000, 128, True),
        (1, 200_000_000, 128, False), (100, 10, 32, False), (100, 10_000, 32, False), (160, 100_000, 64, False),
        (50, 500_000, 64, False), (144, 15_000_000, 64, False),
    ),
    "jumbo": (
        (50, 100_000, 128, True), (24, 20_000_000, 128, True), (1, 400_000_000, 256, True),
        (1, 400_000_000, 256, False), (100, 10, 32, False), (200, 10_000, 64, False), (350, 100_000, 128, False),
        (80, 1_000_000, 128, False), (216, 20_000_000, 128, False),
    ),
    "colossal": (
        (100, 100_000, 128, True), (50, 40_000_000, 256, True), (1, 2_000_000_000, 256, True),
        (1, 1_000_000_000, 256, False), (100, 10, 32, False), (400, 10_000, 128, False),
        (100, 100_000, 128, False), (800, 1_000_000, 128, False), (450, 40_000_000, 256, False),
    ),
}  # fmt: skip
MERLIN_HOT = {"tiny": 10, "small": 30, "medium": 50, "large": 100, "jumbo": 200, "colossal": 300}
MERLIN_BATCH = 65_536  # of all ranks
# Powers of two whose 80 GiB each hold the model with room to spare; jumbo was published on 128, colossal on none.
MERLIN_RANKS = {"tiny": 8, "small": 8, "medium": 8, "large": 32, "jumbo": 128, "colossal": 512}


@dataclass(frozen=True)
class Case:
    """Tables, and the machines for them.

    Args:
        rows, dims: rows and columns of each table.
        bags: ids per bag, for each table and each feature that reads it.
        batch: samples per rank.
        cap: bytes per rank.
        fill: if given, sets the caps. Tables in one copy, with their smallest options, then fill this share of the free
            memory.
    """

    rows: tuple[int, ...]
    dims: tuple[int, ...]
    bags: tuple[tuple[float, ...], ...]
    ranks: int
    batch: int = 1024
    cap: int = 80 * GIB
    per_host: int = 8
    fill: float | None = None

    def tables(self) -> list[TableWork]:
        """Return the tables, with row-wise Adagrad."""
        optimizer = RowWiseAdagrad(lr=0.1)
        batch = float(self.batch)
        return [
            TableWork(f"t{i:06d}", rows, dim, optimizer=optimizer, reads=tuple(Reads(batch, bag) for bag in bags))
            for i, (rows, dim, bags) in enumerate(zip(self.rows, self.dims, self.bags, strict=True))
        ]

    def topology(self) -> Topology:
        """Return the topology."""
        per_host = min(self.per_host, self.ranks)
        if self.fill is None:
            return Topology(self.ranks, "cuda", hbm_cap=self.cap, local_world_size=per_host)
        roomy = build(self.tables(), replace(self, cap=1 << 50, fill=None).topology()).instance
        copies = (roomy.pieces * roomy.width)[:, :, None]
        held = (roomy.memory * copies + roomy.home_memory * self.ranks).sum(2)
        least = int(np.where(roomy.there, held, held.max()).min(1).sum())
        cap = int(roomy.base_memory.max()) + int(least / self.fill / self.ranks)
        return replace(self, cap=cap, fill=None).topology()

    def build(self) -> Problem:
        """Return the problem for the search."""
        return build(self.tables(), self.topology())


def many_small() -> Case:
    """Return 500 tables of up to 1,000 rows and 4, 8 or 16 columns."""
    rng = np.random.default_rng(0)
    rows = rng.integers(2, 1000, 500)
    return Case(tuple(rows.tolist()), tuple(rng.choice([4, 8, 16], 500).tolist()), ((1.0,),) * 500, 8, cap=32 * GIB)


def criteo(ranks: int) -> Case:
    """Return 26 tables of 128 columns, with one id per bag."""
    return Case(CRITEO, (128,) * 26, ((1.0,),) * 26, ranks, cap=32 * GIB)


def lognormal(tables: int, ranks: int, seed: int = 0, fill: float | None = None) -> Case:
    """Return tables of about 60,000 rows (10 to 500 M), 16 to 256 columns, and 1 to 200 ids per bag."""
    rng = np.random.default_rng(seed)
    rows = np.clip(np.exp(rng.normal(11, 2.6, tables)), 10, 5e8).astype(np.int64)
    dims = rng.choice([16, 32, 64, 128, 256], tables, p=[0.15, 0.2, 0.35, 0.2, 0.1])
    bags = np.clip(np.round(np.exp(rng.normal(1.2, 1.2, tables))), 1, 200)
    return Case(
        tuple(rows.tolist()),
        tuple(dims.tolist()),
        tuple((bag,) for bag in bags.tolist()),
        ranks,
        cap=300 * GIB if tables >= 100_000 else 80 * GIB,
        fill=fill,
    )


def merlin(size: str) -> Case:
    """Return a synthetic model of NVIDIA Merlin, on ranks of 80 GiB."""
    rows: list[int] = []
    dims: list[int] = []
    bags: list[tuple[float, ...]] = []
    for count, height, dim, shared in MERLIN[size]:
        rows += [height] * count
        dims += [dim] * count
        bags += [(1.0, float(MERLIN_HOT[size])) if shared else (1.0,)] * count
    ranks = MERLIN_RANKS[size]
    return Case(tuple(rows), tuple(dims), tuple(bags), ranks, batch=MERLIN_BATCH // ranks)


CASES: dict[str, Callable[[], Case]] = {
    "500 x 8": many_small,
    "Criteo x 8": lambda: criteo(8),
    "Criteo x 128": lambda: criteo(128),
    "856 x 128": lambda: lognormal(856, 128),
    **{f"Merlin {size} x {ranks}": lambda size=size: merlin(size) for size, ranks in MERLIN_RANKS.items()},
    "100 x 128": lambda: lognormal(100, 128, 1),
    "300 x 128": lambda: lognormal(300, 128, 1),
    "10,000 x 1,024, 30%": lambda: lognormal(10_000, 1024, fill=0.30),
    "10,000 x 1,024, 86%": lambda: lognormal(10_000, 1024, fill=0.86),
    "100,000 x 4,096": lambda: lognormal(100_000, 4096),
}
