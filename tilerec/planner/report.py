"""`PlanReport`: what a plan costs, how far from the best it can be, and what each rank and table has to do with it.

Nouns
  stage    what ranks do between two collectives; a step takes the sum over stages of the slowest rank, and charges
  charge   time of collectives as such, once a step
  bound    no plan within the same limits takes less time (docs/planner-bound.md)
  tier     a memory: of the device, of the host
  entry    one table's part of the report

Times are whole picoseconds and memory is whole bytes, as the search decides by them; `…_s` are seconds as float.

Legend: T tables, S stages, M tiers, R ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tilerec.errors import ConfigError
from tilerec.planner.report_text import report_text
from tilerec.planner.search.instance import Ints
from tilerec.spec.tile import Tile, Tiling, rectangles
from tilerec.spec.topology import Topology

VERSION = 1
TIERS = ("device", "host")
PICO = 1e12


@dataclass(frozen=True)
class TableEntry:
    """One table in a plan.

    Args:
        path, name: the module that holds it, and the table.
        rows, dim, data_type: of the table; `data_type` is a word such as "fp32".
        bytes: of all ranks together, with optimizer state or dense gradients, and buffers.
        sharding_type: its word in the plan. option: what the search called it ("columns x 4"), or "pinned".
        tiling: where its cells are.
        owner_ps: [S] what it adds on the rank that holds most of it. home_ps: [S] what it adds on every rank, for the
            rank's own batch. Both () where that is unknown.
    """

    path: str
    name: str
    rows: int
    dim: int
    data_type: str
    bytes: int
    sharding_type: str
    option: str
    tiling: Tiling
    owner_ps: tuple[int, ...] = ()
    home_ps: tuple[int, ...] = ()

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """(r0, r1, c0, c1, ranks) of each rectangle that lies together."""
        return rectangles(self.tiling)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that hold some of it."""
        return self.tiling.ranks()

    @property
    def seconds(self) -> tuple[float, ...]:
        """[S] what it adds on the rank that holds most of it, its own batch included."""
        return tuple((own + home) / PICO for own, home in zip(self.owner_ps, self.home_ps, strict=True))

    def ps_on(self, rank: int) -> int:
        """About what it adds on a rank, beside the rank's own batch: in proportion to what lies there."""
        if not self.owner_ps:
            return 0
        own = sum(r.cells for r in self.tiling.tiles_of(rank))
        return sum(self.owner_ps) * own // self._most if own else 0

    @cached_property
    def _most(self) -> int:
        return max(sum(r.cells for r in self.tiling.tiles_of(rank)) for rank in self.ranks)


@dataclass(frozen=True, eq=False)
class PlanReport:
    """What a plan costs and why.

    Args:
        cost_ps, bound_ps: of a step; what no plan is below (0 where nothing is known, as of plans by hand).
        stages: [S] names. load_ps: [R, S]. charge_ps: of collectives.
        memory, cap: [R, M] bytes: what is there in all, and what there may be.
        tables: one entry for each.
        topology: the machines. batch_size: samples of a rank in a step.
        planner: name and version of what made it. notes: what a reader should know beside.
    """

    cost_ps: int
    bound_ps: int
    stages: tuple[str, ...]
    load_ps: Ints
    charge_ps: int
    memory: Ints
    cap: Ints
    tables: tuple[TableEntry, ...]
    topology: Topology
    batch_size: int
    planner: str
    notes: tuple[str, ...] = ()

    @property
    def cost_s(self) -> float:
        """Seconds of a step of the embedding tables, as predicted."""
        return self.cost_ps / PICO

    @property
    def bound_s(self) -> float:
        """Seconds that no plan is below."""
        return self.bound_ps / PICO

    @property
    def gap(self) -> float:
        """How far the cost can be above the least possible, as a part of the bound: 0.02 is 2 %."""
        if not self.bound_ps:
            return 0.0 if not self.cost_ps else float("inf")
        return (self.cost_ps - self.bound_ps) / self.bound_ps

    @cached_property
    def stage_ps(self) -> Ints:
        """[S] the slowest rank's time in each stage."""
        return self.load_ps.max(0, initial=0)

    @property
    def stage_s(self) -> dict[str, float]:
        """Seconds of the slowest rank, by stage."""
        return {name: ps / PICO for name, ps in zip(self.stages, self.stage_ps.tolist(), strict=True)}

    @property
    def tier(self) -> int:
        """The tier that tables lie in."""
        return 1 if self.topology.compute_device == "cpu" else 0

    @property
    def memory_per_rank(self) -> list[int]:
        """[R] bytes in the tier that tables lie in."""
        return [int(b) for b in self.memory[:, self.tier]]

    @property
    def slowest_rank(self) -> int:
        """The rank with the most to do, all stages together; of equals, the lowest."""
        return int(self.load_ps.sum(1).argmax())

    @property
    def fullest_rank(self) -> int:
        """The rank with the most in the memory that tables lie in; of equals, the lowest."""
        return int(self.memory[:, self.tier].argmax())

    def weighs_most(self, rank: int, most: int = 8) -> list[tuple[TableEntry, float]]:
        """The tables that add the most seconds on a rank, and how many, beside the rank's own batch."""
        found = [(entry, entry.ps_on(rank)) for entry in self.tables]
        found = sorted((f for f in found if f[1]), key=lambda f: (-f[1], f[0].path, f[0].name))
        return [(entry, ps / PICO) for entry, ps in found[:most]]

    def __str__(self) -> str:
        return report_text(self)

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values. Tables are rows of `columns`; tilings are written as plans write them."""
        return {
            "version": VERSION,
            "planner": self.planner,
            "batch_size": self.batch_size,
            "topology": self.topology.to_json(),
            "cost_ps": self.cost_ps,
            "bound_ps": self.bound_ps,
            "charge_ps": self.charge_ps,
            "stages": list(self.stages),
            "load_ps": self.load_ps.tolist(),
            "tiers": list(TIERS),
            "memory": self.memory.tolist(),
            "cap": self.cap.tolist(),
            "notes": list(self.notes),
            "columns": list(_COLUMNS),
            "tables": [_entry_to_json(entry) for entry in self.tables],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> PlanReport:
        """The inverse of `to_json`.

        Raises:
            ConfigError: it is no report, or one of another version.
        """
        if not isinstance(data, Mapping) or "version" not in data:
            raise ConfigError(
                "PlanReport JSON: wanted an object with a version; this is no report of a plan."
            )
        if data["version"] != VERSION:
            raise ConfigError(
                f"PlanReport JSON: version {data['version']!r} is not {VERSION}, the one that this release reads; plan "
                "again."
            )
        try:
            if tuple(data["columns"]) != _COLUMNS or tuple(data["tiers"]) != TIERS:
                raise KeyError("columns or tiers")
            stages, topology = tuple(data["stages"]), Topology.from_json(data["topology"])
            ranks = topology.world_size
            return PlanReport(
                cost_ps=int(data["cost_ps"]),
                bound_ps=int(data["bound_ps"]),
                stages=stages,
                load_ps=_table(data["load_ps"], ranks, len(stages)),
                charge_ps=int(data["charge_ps"]),
                memory=_table(data["memory"], ranks, len(TIERS)),
                cap=_table(data["cap"], ranks, len(TIERS)),
                tables=tuple(_entry_from_json(row) for row in data["tables"]),
                topology=topology,
                batch_size=int(data["batch_size"]),
                planner=str(data["planner"]),
                notes=tuple(data["notes"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"PlanReport JSON: it cannot be read ({error}); plan again.") from error

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file."""
        Path(path).write_text(json.dumps(self.to_json(), separators=(",", ":")), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> PlanReport:
        """Read a file that `save` wrote."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"PlanReport: {path} is not JSON: {error}.") from error
        return PlanReport.from_json(data)


_COLUMNS = (
    "path", "name", "rows", "dim", "data_type", "bytes", "sharding_type", "option", "tiling", "owner_ps", "home_ps",
)  # fmt: skip


def _entry_to_json(entry: TableEntry) -> list[Any]:
    return [
        entry.path, entry.name, entry.rows, entry.dim, entry.data_type, entry.bytes, entry.sharding_type, entry.option,
        entry.tiling.to_json(), list(entry.owner_ps), list(entry.home_ps),
    ]  # fmt: skip


def _entry_from_json(row: Sequence[Any]) -> TableEntry:
    path, name, rows, dim, data_type, size, kind, option, blocks, owner_ps, home_ps = row
    tiling = Tiling.from_json(name, rows, dim, blocks)
    return TableEntry(
        path, name, rows, dim, data_type, size, kind, option, tiling, tuple(owner_ps), tuple(home_ps)
    )


def _table(rows: Any, first: int, second: int) -> Ints:
    found = np.array(rows, np.int64)
    if found.shape != (first, second):
        raise ConfigError(
            f"PlanReport JSON: numbers of shape {found.shape}, wanted {(first, second)} (ranks, columns); plan again."
        )
    return found
