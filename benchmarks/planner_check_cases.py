"""Random instances for `planner_check.py`: tables, machines, constraints, reservations; each kind stresses one aspect.

The same kind and seed give the same case on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from planner_check_price import Table, speeds_of, table_of

from tilerec.planner import (
    EmbeddingShardingPlanner,
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    ParameterConstraints,
    Skew,
)
from tilerec.planner.request import PlanRequest
from tilerec.planner.reservation import StorageReservation
from tilerec.planner.tables import PlannedTable
from tilerec.spec.cache import CacheParams
from tilerec.spec.optimizer import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    LarsSGD,
    OptimizerSpec,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from tilerec.spec.parameter_sharding import CODECS
from tilerec.spec.plan import ParameterSharding, Wire
from tilerec.spec.speeds import PER_WIDTH, SINGLE, Speeds
from tilerec.spec.table import DataType
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology, gigabytes_per_second

MIB = 2**20
OPTIMIZERS: tuple[OptimizerSpec | None, ...] = (
    None, SGD(), Adagrad(), RowWiseAdagrad(), Adam(), PartialRowWiseAdam(), LAMB(), PartialRowWiseLAMB(), LarsSGD(),
)  # fmt: skip
UNEVEN = ([1, 3], [3, 5], [1, 15], [2, 2, 4], [1, 1, 2], [4, 8])
EVEN = ([2], [3], [4], [8], [16], [2, 2], [4, 4], [8, 8], [2, 2, 2, 2], [1, 1, 1, 1])
SMALL = ([2], [3], [4], [1, 1], [2, 2], [1, 3], [1, 2])


@dataclass(frozen=True)
class Case:
    """Inputs of the planner."""

    kind: str
    seed: int
    tables: tuple[PlannedTable, ...]
    topology: Topology
    batch_size: int
    constraints: dict[str, ParameterConstraints] = field(default_factory=dict)
    reservation: StorageReservation = field(default_factory=lambda: FixedPercentageStorageReservation(0.0))

    def planner(self, **more: Any) -> EmbeddingShardingPlanner:
        given: dict[str, Any] = {
            "topology": self.topology,
            "batch_size": self.batch_size,
            "storage_reservation": self.reservation,
            "constraints": self.constraints,
            **more,
        }
        return EmbeddingShardingPlanner(**given)

    def request(self) -> PlanRequest:
        return self.planner().request(list(self.tables))

    @property
    def size(self) -> int:
        return len(self.tables) * self.topology.world_size

    @property
    def once(self) -> str:
        """Return the command that runs this case alone."""
        return f"python benchmarks/planner_check.py --count 1 --seed {self.seed} --kind {self.kind}"


def case_of(kind: str, seed: int) -> Case:
    """Return the case of a kind and a seed."""
    return _Draw(kind, seed).case()


class _Draw:
    """Random choices for one case."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.random = random.Random(f"{kind}/{seed}")
        self.has = {kind}
        if kind in ("mixed", "small"):
            chance = 0.3 if kind == "mixed" else 0.2
            self.has |= {name for name in FEATURES if self.random.random() < chance}
        self.small = kind in SMALL_KINDS

    def case(self) -> Case:
        draw = self.random
        topology = self.topology()
        batch_size = draw.choice((1, 16, 64, 512, 2048, 4096)) if not self.small else draw.choice((16, 256, 2048))
        tables = self.tables(topology)
        constraints: dict[str, ParameterConstraints] = {}
        for table in tables:
            given = self.about_ids(table)
            given.update(self.restrictions(table, topology, tables))
            if given:
                constraints[table.key] = ParameterConstraints(**given)
        case = Case(self.kind, self.seed, tuple(tables), topology, batch_size, constraints, self.reservation())
        return replace(case, topology=self.with_caps(case))

    # ---------------------------------------------------------------------------------------------- machines

    def topology(self) -> Topology:
        draw = self.random
        device = "cuda" if self.has & {"cuda", "cached"} else draw.choice(("cpu", "cuda"))
        sizes = draw.choice(SMALL if self.small else UNEVEN if "uneven_hosts" in self.has else EVEN)
        ranks = list(range(sum(sizes)))
        if "groups2d" in self.has:
            # A sharding group inside a larger world: the same hosts, with fewer ranks on each.
            sizes = draw.choice(([1, 1], [2, 2], [2, 1], [4], [1, 1, 1, 1]))
            ranks = list(range(sum(sizes)))
            draw.shuffle(ranks)
        hosts, first = [], 0
        for size in sizes:
            hosts.append(ranks[first : first + size])
            first += size
        topology = Topology(
            sum(sizes), device, hosts=hosts,
            intra_host_bw=gigabytes_per_second(draw.choice((20, 100, 600))),
            inter_host_bw=gigabytes_per_second(draw.choice((1, 12.5, 50))),
        )  # fmt: skip
        if draw.random() < 0.5:
            topology = replace(topology, speeds=self.speeds(topology))
        nic = random.Random(f"{self.kind}/{self.seed}/nic").choice((None, None, "device", "host"))
        return topology if nic is None else replace(topology, nic=nic)

    def speeds(self, topology: Topology) -> Speeds:
        """Return the default speeds, each multiplied by a random factor from 1/2 to 2."""
        draw, usual = self.random, speeds_of(topology)
        given: dict[str, Any] = {"cache": draw.choice((0, MIB, 32 * MIB, 1024 * MIB))}
        for name in PER_WIDTH:
            factor = 2.0 ** draw.uniform(-1, 1)
            given[name] = [rate * factor for rate in getattr(usual, name)]
        for name in SINGLE:
            given[name] = getattr(usual, name) * 2.0 ** draw.uniform(-1, 1)
        given["duplex"] = draw.random() < 0.5
        return Speeds(**given)

    def with_caps(self, case: Case) -> Topology:
        """Return the topology with random memory per rank: ample, tight, or too small."""
        draw, topology = self.random, case.topology
        tables = [table_of(t, case.constraints.get(t.key), case.batch_size) for t in case.tables]
        least = sum(t.weights(t.rows, t.dim) for t in tables) / topology.world_size
        least += sum(_buffers(t, topology.world_size) for t in tables)
        fill = draw.choice((1.1, 1.25, 1.5, 4.0, 20.0))
        if self.kind == "infeasible":
            fill = draw.choice((0.5, 0.8, 0.95, 1.02, 1.1))
        elif "cached" in self.has:
            fill = draw.choice((0.4, 0.7, 1.2, 4.0))
        reserved = 0.0
        if isinstance(case.reservation, HeuristicalStorageReservation):
            reserved = case.reservation.percentage
        cap = int(least * fill / (1.0 - max(reserved, case.reservation.percentage))) + MIB
        name = "ddr_cap" if topology.compute_device == "cpu" else "hbm_cap"
        if "caps" in self.has:
            caps = [int(cap * draw.choice((0.5, 0.8, 1.0, 1.5, 2.0))) for _ in range(topology.world_size)]
            return replace(topology, **{name: None, f"{name}s": caps})
        topology = replace(topology, **{name: cap})
        if topology.compute_device != "cpu":
            topology = replace(topology, ddr_cap=int(4 * least) + MIB if "cached" in self.has else 0)
        return topology

    def reservation(self) -> StorageReservation:
        draw = self.random
        if self.small or draw.random() < 0.6:
            return FixedPercentageStorageReservation(0.0)
        return draw.choice(
            (
                FixedPercentageStorageReservation(0.1),
                FixedAbsoluteStorageReservation(12345),
                HeuristicalStorageReservation(0.15),
            )
        )

    # ---------------------------------------------------------------------------------------------- tables

    def tables(self, topology: Topology) -> list[PlannedTable]:
        draw = self.random
        count = draw.choice((2, 3)) if self.small else draw.choice((1, 2, 3, 4, 6, 8, 12, 16))
        paths = ["ebc"] if "collections" not in self.has else draw.sample(("ebc", "sparse.a", "sparse.b"), 2)
        optimizer = draw.choice(OPTIMIZERS[1:]) if draw.random() < 0.7 else draw.choice(OPTIMIZERS)
        shape = (self.rows(), self.dim())
        found = []
        for i in range(count):
            rows, dim = shape if "duplicates" in self.has and i % 4 else (self.rows(), self.dim())
            name = f"t{i:02d}"
            found.append(
                PlannedTable(
                    ((draw.choice(paths), name),),
                    rows,
                    dim,
                    self.data_type(),
                    tuple(f"{name}_f{k}" for k in range(draw.choice((1, 1, 1, 2, 3)))),
                    draw.choice(OPTIMIZERS) if "optimizers" in self.has else optimizer,
                    trained="optimizers" not in self.has or draw.random() < 0.9,
                    pooled="sequence" not in self.has or draw.random() < 0.4,
                    weighted="weighted" in self.has and draw.random() < 0.7,
                    wire=Wire(draw.choice(CODECS), draw.choice(CODECS)) if "wire" in self.has else None,
                    cached=draw.choice((None, 0.1, 0.5)) if self.kind == "cached" and draw.random() < 0.2 else None,
                )
            )
        return found

    def rows(self) -> int:
        if "copies" in self.has:
            return self.random.choice((1, 2, 3, 10, 100, 1000))
        if self.random.random() < 0.1:
            return self.random.choice((1, 2, 3, 5, 7))
        if "huge" in self.has and self.random.random() < 0.5:
            return self.random.choice((2**31 - 1, 2**31, 3 * 2**31 + 5))
        return int(10 ** self.random.uniform(1, 4 if self.small else 7))

    def dim(self) -> int:
        return self.random.choice((32, 64, 96, 128) if self.small else (1, 8, 16, 30, 32, 48, 64, 96, 128, 256, 384))

    def data_type(self) -> DataType:
        if "optimizers" in self.has or self.kind == "mixed":
            return self.random.choice((DataType.FP32, DataType.FP32, DataType.BF16, DataType.FP16, DataType.FP64))
        return DataType.FP32

    def about_ids(self, table: PlannedTable) -> dict[str, Any]:
        draw, count = self.random, len(table.features)
        given: dict[str, Any] = {}
        if draw.random() < 0.6:
            lengths = [draw.choice((0.0, 0.3, 1.0, 1.0, 2.5, 10.0, 40.0)) for _ in range(draw.choice((1, count)))]
            given["pooling_factors"] = lengths
        if draw.random() < 0.1:
            given["num_poolings"] = [draw.choice((0.5, 1.0, 2.0))]
        if draw.random() < 0.1:
            given["batch_sizes"] = [draw.choice((8, 128, 1000)) for _ in range(count)]
        if "weighted" in self.has and draw.random() < 0.3:
            given["is_weighted"] = True
        if self.has & {"skew", "ordered"} and draw.random() < 0.8:
            distinct = draw.choice((table.rows, max(1, table.rows // 3), 1))
            ordered = "ordered" in self.has and draw.random() < 0.8
            given["skew"] = Skew(distinct, draw.choice((0.0, 0.6, 1.05, 2.0)), ordered)
        if "cached" in self.has:
            if draw.random() < 0.3:
                given["cache_params"] = CacheParams(load_factor=draw.choice((0.01, 0.1, 0.5, 1.0)))
            if draw.random() < 0.2 and table.optimizer is not None:
                given["compute_kernels"] = draw.choice(
                    (["fused_uvm_caching"], ["fused", "fused_uvm_caching"], ["fused_uvm"])
                )
            elif draw.random() < 0.1:
                given["enforce_hbm"] = True
        return given

    def restrictions(
        self,
        table: PlannedTable,
        topology: Topology,
        tables: list[PlannedTable],
    ) -> dict[str, Any]:
        draw, given, ranks = self.random, dict[str, Any](), topology.world_size
        if "copies" in self.has and draw.random() < 0.5:
            return {"sharding_types": ["data_parallel"]}
        if "pins" in self.has and draw.random() < 0.4:
            return {"sharding": self.pin(table, topology)}
        if "constraints" not in self.has:
            return {}
        kinds = ["table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard"]
        if draw.random() < 0.4:
            given["sharding_types"] = draw.sample([*kinds, "data_parallel"], draw.choice((1, 2, 3)))
        elif draw.random() < 0.2:
            given["forbidden_types"] = draw.sample(kinds[1:], 2)
        if draw.random() < 0.2:
            given["min_partition"] = draw.choice((1, 8, 16, 64))
        if draw.random() < 0.3 and "data_parallel" not in given.get("sharding_types", ()):
            given["ranks"] = sorted(draw.sample(range(ranks), draw.randint(1, ranks)))
        elif draw.random() < 0.1:
            given["hosts"] = [draw.randrange(topology.host_count)]
        if draw.random() < 0.2:
            given["max_ranks"] = draw.randint(1, ranks)
        if draw.random() < 0.15 and tables[0] is not table:
            other = draw.choice(tables[: tables.index(table)])
            given = {"with_table": other.key}
        return given

    def pin(self, table: PlannedTable, topology: Topology) -> ParameterSharding:
        draw, ranks = self.random, topology.world_size
        some = draw.sample(range(ranks), draw.randint(1, ranks))
        pieces = [k for k in range(1, min(ranks, 8) + 1) if table.dim % k == 0]
        ways: list[Callable[[], ParameterSharding]] = [
            lambda: ParameterSharding("table_wise", ranks=some[:1]),
            lambda: ParameterSharding("row_wise", ranks=some),
            lambda: ParameterSharding("row_wise"),
            lambda: ParameterSharding("column_wise", ranks=[draw.randrange(ranks) for _ in range(draw.choice(pieces))]),
            lambda: ParameterSharding("data_parallel"),
            lambda: ParameterSharding("data_parallel", ranks=sorted(some)),
        ]
        if table.optimizer is None or not table.optimizer.partials:
            # Optimizers with sums over whole rows need the same row ranges in all column blocks.
            ways.append(lambda: ParameterSharding("explicit", tiling=self.tiling(table, ranks)))
        return draw.choice(ways)()

    def tiling(self, table: PlannedTable, ranks: int) -> Tiling:
        """Return a random tiling: column blocks with separate row ranges, on any ranks, some replicated."""
        draw, tiles = self.random, []
        columns = sorted({0, table.dim, *(draw.randint(0, table.dim) for _ in range(2))})
        for c0, c1 in pairwise(columns):
            cuts = sorted({0, table.rows, *(draw.randint(0, table.rows) for _ in range(2))})
            for r0, r1 in pairwise(cuts):
                owners = draw.sample(range(ranks), draw.choice((1, 1, 1, min(2, ranks))))
                tiles.append((r0, r1, c0, c1, sorted(owners)))
        return Tiling.of(table.key, table.rows, table.dim, tiles)


def _buffers(table: Table, ranks: int) -> float:
    """Return the approximate bytes of a step on a rank, without weights."""
    bags = sum(f.bags for f in table.features)
    return 16.0 * bags * table.dim + 40.0 * table.ids + 8.0 * bags * table.dim * min(1.0, 8.0 / ranks)


SMALL_KINDS = ("small_plain", "small", "infeasible")
"""Of few tables on few ranks: all arrangements can be tried."""
KINDS = (
    "plain", "collections", "uneven_hosts", "caps", "sequence", "weighted", "skew", "ordered", "optimizers", "wire",
    "cached", "copies", "groups2d", "cuda", "constraints", "pins", "duplicates", "huge", "mixed", *SMALL_KINDS,
)  # fmt: skip
"""What cases stress; "mixed" and "small" mix several of FEATURES."""
FEATURES = (
    "collections", "uneven_hosts", "caps", "sequence", "weighted", "skew", "ordered", "optimizers", "wire", "cached",
    "constraints", "pins", "duplicates",
)  # fmt: skip
