"""Reports of any size, made by rule."""

from __future__ import annotations

import numpy as np

from tilerec.planner.report.plan_report import PlanReport, TableEntry
from tilerec.sharding.strategies import STRATEGIES
from tilerec.spec.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology

STAGES = ("ids", "lookup and rows", "gradients", "update", "rows between hosts")


def entry(
    name: str,
    rows: int,
    dim: int,
    kind: str,
    ranks: list[int] | None,
    topology: Topology,
    *,
    path: str = "ebc",
    scale: int = 10**6,
) -> TableEntry:
    """A table cut as a word says; it adds `scale` ps for each column to each stage but the last."""
    tiling = STRATEGIES[kind](name, rows, dim, ranks, topology)
    return of(name, tiling, kind, path=path, scale=scale)


def of(name: str, tiling: Tiling, kind: str = "explicit", *, path: str = "ebc", scale: int = 10**6) -> TableEntry:
    """A table with a tiling."""
    copies = sum(t.rectangle.cells * len(t.owners) for t in tiling.tiles())
    own = tuple(scale * tiling.dim * (s + 1) // len(tiling.ranks()) for s in range(len(STAGES) - 1))
    return TableEntry(
        path, name, tiling.rows, tiling.dim, "fp32", 4 * copies + 4 * tiling.rows, kind,
        f"{kind} x {len(tiling.ranks())}", tiling, (*own, 0), (scale, scale, scale // 2, 0, 0),
    )  # fmt: skip


def report(
    tables: list[TableEntry], topology: Topology, *, bound: float = 0.98, notes: tuple[str, ...] = ()
) -> PlanReport:
    """The report whose loads are the sums of its tables, as `PlanReport.weighs_most` counts them."""
    ranks = topology.world_size
    load = np.zeros((ranks, len(STAGES)), np.int64)
    memory = np.zeros((ranks, 2), np.int64)
    tier = 1 if topology.compute_device == "cpu" else 0
    for one in tables:
        load += np.array(one.home_ps)
        cells = {rank: sum(r.cells for r in one.tiling.tiles_of(rank)) for rank in one.ranks}
        most, every = max(cells.values()), sum(cells.values())
        for rank, own in cells.items():
            load[rank] += np.array([ps * own // most for ps in one.owner_ps])
            memory[rank, tier] += one.bytes * own // every
    cap = np.zeros((ranks, 2), np.int64)
    cap[:] = topology.hbm_cap, topology.ddr_cap
    cost = int(load.max(0).sum()) + 5 * 10**6
    return PlanReport(
        cost,
        int(cost * bound),
        STAGES,
        load,
        5 * 10**6,
        memory,
        cap,
        tuple(tables),
        topology,
        512,
        "tilerec test",
        notes,
    )


def plan_of(made: PlanReport) -> ShardingPlan:
    """The plan that a report is of."""
    parts: dict[str, dict[str, ParameterSharding]] = {}
    for one in made.tables:
        sharding = ParameterSharding("explicit", "fused", tiling=one.tiling)
        parts.setdefault(one.path, {})[one.name] = sharding
    return ShardingPlan(
        {path: EmbeddingModuleShardingPlan(tables) for path, tables in parts.items()},
        made.topology.world_size,
        made.topology.host_ranks,
    )


def small() -> PlanReport:
    """Seven tables of every cut on two hosts of four ranks; rank 5 has the most to do."""
    topology = Topology(8, local_world_size=4, hbm_cap=2**26)
    tables = [
        entry("user", 100_000, 64, "row_wise", None, topology, scale=4 * 10**6),
        entry("item", 50_000, 64, "column_wise", [0, 1, 2, 3], topology),
        entry("shop", 20_000, 32, "table_wise", [5], topology, scale=2 * 10**7),
        entry("city", 500, 16, "data_parallel", None, topology),
        entry("brand", 70_000, 32, "table_row_wise", [4, 5, 6, 7], topology),
        entry("query", 40_000, 64, "grid_shard", None, topology, path="deep.ebc"),
        of("odd", Tiling.of("odd", 100, 12, [(0, 100, 0, 4, (0, 3)), (0, 30, 4, 12, 1), (30, 100, 4, 12, 2)])),
    ]
    return report(tables, topology, notes=("a note",))


def large(tables: int, ranks: int, local: int) -> PlanReport:
    """Log-normal tables, the largest cut by rows over all ranks, on many ranks; drawn with a fixed seed."""
    topology = Topology(ranks, local_world_size=local, hbm_cap=80 * 2**30)
    draw = np.random.default_rng(0)
    rows = np.exp(draw.normal(11, 2.2, tables)).astype(np.int64) + 10
    dims = draw.choice([8, 16, 32, 64, 128], tables)
    kinds = draw.random(tables)
    home = draw.integers(0, ranks, tables)
    found = []
    for i in range(tables):
        name, at = f"table_{i:05d}", int(home[i])
        host = list(topology.ranks_of(topology.host_of(at)))
        if rows[i] > 10_000_000:
            kind, where = "row_wise", None
        elif kinds[i] < 0.7:
            kind, where = "table_wise", [at]
        elif kinds[i] < 0.85:
            kind, where = "table_row_wise", host
        elif kinds[i] < 0.997:
            kind, where = "column_wise", host[: max(1, min(len(host), int(dims[i]) // 8))]
        else:
            kind, where = "data_parallel", None
        scale = int(10**6 * draw.lognormal(0, 1))
        found.append(entry(name, int(rows[i]), int(dims[i]), kind, where, topology, path=f"ebc_{i % 3}", scale=scale))
    return report(found, topology)
