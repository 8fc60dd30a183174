"""`PlanReport`: the cost of a plan, its bottleneck, its gap to a lower bound, and changes that would help.

Terms
  stage    work of a rank between two collectives
  charge   fixed costs of the collectives of a step
  step     the slowest rank's time of each stage, summed over stages, plus the charge
  bound    lower bound on the step time of all plans within the same limits (docs/planner-bound.md)
  tier     a memory: device or host
  entry    one table's part of the report (table_entry.py)

Times are whole picoseconds and memory is whole bytes, as in the search; names ending in `_s` are seconds as float.

Legend: S stages, M tiers, R ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tilerec.atomic_file import write_file
from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue, check_version, read_json
from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.report.bottleneck import Bottleneck, bottleneck_of
from tilerec.planner.report.report_text import fullest, report_text
from tilerec.planner.report.table_entry import COLUMNS
from tilerec.planner.report.table_entry import TableEntry as TableEntry
from tilerec.planner.report.what_if import WhatIf, what_ifs
from tilerec.planner.request import PlanRequest
from tilerec.planner.search.instance import PICO, Ints
from tilerec.spec.plan import ShardingPlan
from tilerec.spec.topology import Topology

VERSION = 1
TIERS = ("device", "host")


@dataclass(frozen=True, eq=False)
class PlanReport:
    """Predicted time and memory of a plan, by stage, rank and table.

    Args:
        cost_ps: time of a step.
        bound_ps: lower bound on the time of a step; 0 if unknown, as for plans made by hand.
        stages: [S] names.
        load_ps: [R, S] time of each rank in each stage.
        charge_ps: fixed costs of collectives.
        memory, cap: [R, M] bytes in use, and bytes available.
        tables: one entry per table.
        topology: the machines.
        batch_size: samples per rank and step.
        planner: name and version of the planner.
        notes: remarks for the reader.
        network_ps: [R, S] part of `load_ps` on the ranks' own network cards; None: 0. Cards that the ranks of a host
            share are separate stages.
        request: the request of the plan, which what-ifs vary; None if unknown. It is not part of the report's file.
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
    network_ps: Ints | None = field(default=None, kw_only=True)
    request: PlanRequest | None = field(default=None, kw_only=True, repr=False)

    @property
    def cost_s(self) -> float:
        """Seconds of a step of the embedding tables, as predicted."""
        return self.cost_ps / PICO

    @property
    def bound_s(self) -> float:
        """Lower bound on the seconds of a step, over all plans."""
        return self.bound_ps / PICO

    @property
    def gap(self) -> float:
        """Largest possible distance of the cost from the optimum, as a part of the bound: 0.02 is 2 %."""
        if not self.bound_ps:
            return 0.0 if not self.cost_ps else float("inf")
        return (self.cost_ps - self.bound_ps) / self.bound_ps

    @cached_property
    def stage_ps(self) -> Ints:
        """[S] the slowest rank's time in each stage."""
        return self.load_ps.max(0, initial=0)

    @property
    def stage_s(self) -> dict[str, float]:
        """Seconds of the slowest rank in each stage, by name."""
        return {name: ps / PICO for name, ps in zip(self.stages, self.stage_ps.tolist(), strict=True)}

    @property
    def tier(self) -> int:
        """The tier that holds the tables: 0 (device), or 1 (host) on CPU ranks."""
        return 1 if self.topology.compute_device == "cpu" else 0

    @property
    def memory_per_rank(self) -> list[int]:
        """[R] bytes in use in the tier that holds the tables."""
        return [int(b) for b in self.memory[:, self.tier]]

    @property
    def slowest_rank(self) -> int:
        """The rank with the most work over all stages; the lowest such rank."""
        return int(self.load_ps.sum(1).argmax())

    @property
    def fullest_rank(self) -> int:
        """The rank with the largest part of its cap in use, in the tier that holds the tables; the lowest such rank."""
        return fullest(self.memory[:, self.tier], self.cap[:, self.tier])

    @cached_property
    def bottleneck(self) -> Bottleneck:
        """The resources that the step's time is spent on, and the waiting time of ranks."""
        return bottleneck_of(self.stages, self.load_ps, self.charge_ps, self.network_ps)

    @property
    def speeds_origin(self) -> str:
        """Origin of the speeds from which the times are computed."""
        return (self.topology.speeds or default_speeds(self.topology)).origin

    @property
    def speeds_are_default(self) -> bool:
        """True if the speeds are defaults, not measurements."""
        return self.speeds_origin.startswith("default")

    def with_request(self, request: PlanRequest) -> PlanReport:
        """Return the report with the request of its plan, for example from `PlanRequest.load`.

        Raises:
            ConfigError: the request has other tables, another topology or another batch size.
        """
        ours = sorted((e.path, e.name, e.rows, e.dim, e.data_type) for e in self.tables)
        theirs = sorted(
            (*table.names[0], table.rows, table.dim, table.data_type.value.lower()) for table in request.tables
        )
        alike = self.topology.to_json() == request.topology.to_json()
        if ours != theirs or not alike or self.batch_size != request.batch_size:
            raise ConfigError(
                "PlanReport.with_request: got a request with other tables, machines or another batch; expected the "
                "request of the plan. Plan again."
            )
        return replace(self, request=request)

    def what_would_help(self) -> tuple[WhatIf, ...]:
        """Return changes of the request with the step time of each, largest gain first.

        The first call makes a plan for each change, which takes about as long for each as the original plan. Later
        calls return the same result. For large problems some changes are listed as left out.

        Raises:
            ConfigError: `request` is None.
        """
        return self._what_ifs

    @cached_property
    def _what_ifs(self) -> tuple[WhatIf, ...]:
        if self.request is None:
            raise ConfigError(
                "PlanReport.what_would_help: got a report without its request (files do not contain it). Call "
                "report.with_request(PlanRequest.load('plan.request.json')) first."
            )
        rank = self.fullest_rank
        full = int(self.memory[rank, self.tier]) / max(1, int(self.cap[rank, self.tier]))
        cached = any(", cached" in entry.option for entry in self.tables)  # the part of hot rows follows
        return what_ifs(self.request, self.cost_ps, full, cached)

    def is_of(self, plan: ShardingPlan) -> bool:
        """Return True if the report belongs to this plan: all its tables have the plan's tilings.

        Hot rows are not compared: the file of a report does not have them.
        """
        mine = {(entry.path, entry.name): entry.tiling.bare for entry in self.tables}
        theirs = {(path, name): sharding.tiling and sharding.tiling.bare for path, name, sharding in plan.tables()}
        return self.topology.world_size == (plan.world_size or self.topology.world_size) and all(
            theirs.get(place) == tiling for place, tiling in mine.items()
        )

    def weighs_most(self, rank: int, most: int | None = 8) -> list[tuple[TableEntry, float]]:
        """Return the tables that add most time on a rank, with their seconds, without the rank's own batch.

        Args:
            rank: the rank.
            most: largest number of tables to return; None: all that add time there.
        """
        found = [(entry, entry.ps_on(rank)) for entry in self.tables]
        found = sorted((f for f in found if f[1]), key=lambda f: (-f[1], f[0].path, f[0].name))
        return [(entry, ps / PICO) for entry, ps in found[:most]]

    def text(self, *, what_would_help: bool = True) -> str:
        """Return the report as text, without a final newline.

        Args:
            what_would_help: include the what-ifs if the request is known; see `what_would_help`.
        """
        return report_text(self, self._what_ifs if what_would_help and self.request is not None else None)

    def __str__(self) -> str:
        """Return the text without what-ifs, as these need further searches."""
        return self.text(what_would_help=False)

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values. Tables are rows of `columns`; tilings have the format of plans."""
        return {
            "version": VERSION,
            "planner": self.planner,
            "batch_size": self.batch_size,
            "topology": self.topology.to_json(),
            "cost_ps": self.cost_ps,
            "bound_ps": self.bound_ps,
            "charge_ps": self.charge_ps,
            "network_ps": None if self.network_ps is None else self.network_ps.tolist(),
            "stages": list(self.stages),
            "load_ps": self.load_ps.tolist(),
            "tiers": list(TIERS),
            "memory": self.memory.tolist(),
            "cap": self.cap.tolist(),
            "notes": list(self.notes),
            "columns": list(COLUMNS),
            "tables": [entry.to_json() for entry in self.tables],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any] | JsonValue) -> PlanReport:
        """Read a report that `to_json` returned.

        Raises:
            ConfigError: the data is not a report, or has another version.
        """
        value = JsonValue.of(data, "PlanReport JSON")
        names = (
            "version", "planner", "batch_size", "topology", "cost_ps", "bound_ps", "charge_ps", "stages", "load_ps",
            "tiers", "memory", "cap", "notes", "columns", "tables",
        )  # fmt: skip
        again = "Plan again."
        found = value.record((*names, "network_ps"), names, again)
        check_version(found, VERSION, again)
        for name, words in (("columns", COLUMNS), ("tiers", TIERS)):
            if found[name].texts() != words:
                raise found[name].error(f"{list(words)}", again)
        stages, topology = found["stages"].texts(), Topology.from_json(found["topology"])
        ranks, network = topology.world_size, found.get("network_ps")
        return PlanReport(
            cost_ps=found["cost_ps"].whole(),
            bound_ps=found["bound_ps"].whole(),
            stages=stages,
            load_ps=_table(found["load_ps"], ranks, len(stages)),
            charge_ps=found["charge_ps"].whole(),
            memory=_table(found["memory"], ranks, len(TIERS)),
            cap=_table(found["cap"], ranks, len(TIERS)),
            tables=tuple(TableEntry.from_json(row, len(stages), ranks) for row in found["tables"].items()),
            topology=topology,
            batch_size=found["batch_size"].whole(1),
            planner=found["planner"].text(),
            notes=found["notes"].texts(),
            network_ps=None if network is None or network.value is None else _table(network, ranks, len(stages)),
        )

    def save(self, path: str | Path) -> None:
        """Write `to_json` to a file, which is replaced atomically.

        Raises:
            FileError: the file cannot be written.
        """
        write_file(path, json.dumps(self.to_json(), separators=(",", ":")), "PlanReport")

    @staticmethod
    def load(path: str | Path) -> PlanReport:
        """Read a file that `save` wrote.

        Raises:
            FileError: the file cannot be read.
            ConfigError: the file is not a report.
        """
        return PlanReport.from_json(read_json(path, "PlanReport"))


def _table(value: JsonValue, first: int, second: int) -> Ints:
    rows = value.wholes()
    if len(rows) != first or any(not isinstance(row, (list, tuple)) or len(row) != second for row in rows):
        raise value.error(f"{first:,} lists (one for each rank) of {second:,} whole numbers", "Plan again.")
    flat = [each for row in rows for each in row]
    if any(type(each) is not int for each in flat):
        raise value.error(f"{first:,} lists (one for each rank) of {second:,} whole numbers", "Plan again.")
    return np.array(flat, np.int64).reshape(first, second)
