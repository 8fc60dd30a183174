"""Sharding plans: the placement of every table on ranks, the JSON file of a plan, and its text table.

Nouns
  sharding    `ParameterSharding`: one table's kind, kernel, ranks, tiling and wire (`spec/parameter_sharding.py`)
  plan        path of a module -> table -> sharding, for `world_size` ranks on `hosts`

This file re-exports the enums of a plan (`spec/sharding_type.py`), `HotRows` and `Wire`, since most users import them
together.

A plan written by hand has kinds and ranks only; `tilerec.sharding.strategies.complete` fills in the tilings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from tilerec.atomic_file import write_file
from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue, check_version, read_json
from tilerec.spec.hot_rows import HotRows as HotRows
from tilerec.spec.key_value import KeyValueParams as KeyValueParams
from tilerec.spec.parameter_sharding import CODECS as CODECS
from tilerec.spec.parameter_sharding import ParameterSharding
from tilerec.spec.parameter_sharding import Wire as Wire
from tilerec.spec.plan_table import plan_html, plan_summary, plan_table
from tilerec.spec.ranks import MOST_RANKS, is_int_from, ranks_to_text, read_hosts, text_to_ranks
from tilerec.spec.sharding_type import CACHING_KERNELS as CACHING_KERNELS
from tilerec.spec.sharding_type import HOST_KERNELS as HOST_KERNELS
from tilerec.spec.sharding_type import KERNELS_IN_USE as KERNELS_IN_USE
from tilerec.spec.sharding_type import EmbeddingComputeKernel as EmbeddingComputeKernel
from tilerec.spec.sharding_type import ShardingType as ShardingType
from tilerec.spec.sharding_type import to_enum as to_enum
from tilerec.spec.tile import Rectangle, Tiling

VERSION = 1


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """Shardings of one embedding module: table -> sharding.

    Args:
        tables: a mapping or pairs, as for `dict`.
        world_size, hosts: number of ranks and ranks of each host, as in `ShardingPlan`; None: unknown.
    """

    world_size: int | None = None
    hosts: Sequence[Sequence[int]] | None = None

    def __init__(
        self,
        tables: Mapping[str, ParameterSharding] | Iterable[tuple[str, ParameterSharding]] = (),
        /,
        *,
        world_size: int | None = None,
        hosts: Sequence[Sequence[int]] | None = None,
        **more: ParameterSharding,
    ) -> None:
        super().__init__(tables)
        self.update(more)
        self.world_size, self.hosts = world_size, hosts

    def __str__(self) -> str:
        return str(ShardingPlan({"": self}))


class Held(NamedTuple):
    """Rectangles of one table that a rank holds; `bytes` is None if the data type is unknown."""

    module: str
    table: str
    rectangles: tuple[Rectangle, ...]
    bytes: int | None


@dataclass(frozen=True)
class ShardingPlan:
    """Shardings of a model: path of an embedding module -> its tables' shardings.

    Args:
        plan: keyed by the module's path in the model (`""` for the model itself), as in `named_modules`.
        world_size: number of ranks; None: that of the module plans, if they have one.
        hosts: ranks of each host (`Topology.hosts`); None: those of the module plans, if they have them.
        report: the planner's `tilerec.planner.report.PlanReport`, or None. It is not part of the plan: it is neither
            compared nor written to the plan's file.

    Raises:
        ConfigError: another version, a value that is not a module plan, or module plans for different worlds.
    """

    plan: Mapping[str, EmbeddingModuleShardingPlan]
    world_size: int | None = None
    hosts: Sequence[Sequence[int]] | None = None
    version: int = VERSION
    report: Any = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(
                f"ShardingPlan: got version {self.version!r}; expected {VERSION}, which this release reads. Plan again."
            )
        if self.world_size is not None and not (is_int_from(self.world_size, 1) and self.world_size <= MOST_RANKS):
            raise ConfigError(
                f"ShardingPlan: got world_size={self.world_size!r:.80}; expected a whole number from 1 to "
                f"{MOST_RANKS:,}. Pass the number of ranks."
            )
        modules = {path: _module_plan(path, tables) for path, tables in self.plan.items()}
        if self.hosts is not None:
            object.__setattr__(self, "hosts", _read_hosts(self.hosts))
        for path, tables in self.plan.items():
            self._adopt(path, "world_size", getattr(tables, "world_size", None))
            hosts = getattr(tables, "hosts", None)
            self._adopt(path, "hosts", None if hosts is None else _read_hosts(hosts))
        object.__setattr__(self, "plan", modules)

    def _adopt(self, path: str, field: str, value: object) -> None:
        """Set `field` from a module plan; raise if the plan or another module plan has a different value."""
        known = getattr(self, field)
        if known is None:
            object.__setattr__(self, field, value)
        elif value not in (None, known):
            raise ConfigError(
                f"ShardingPlan: got {field} {value} from the plan of module '{path}'; expected {known}, that of the "
                "whole plan or of another module. Plan all modules for the same ranks."
            )

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """Return the plan of a module, with `world_size` and `hosts` of this plan; None if there is none."""
        part = self.plan.get(module_path)
        return part and EmbeddingModuleShardingPlan(part, world_size=self.world_size, hosts=self.hosts)

    def tables(self) -> Iterable[tuple[str, str, ParameterSharding]]:
        """Iterate over (module path, table, sharding) of every table, in the plan's order."""
        return ((path, table, sharding) for path, part in self.plan.items() for table, sharding in part.items())

    def held_by(self, rank: int) -> tuple[Held, ...]:
        """Return the rectangles that a rank holds, table by table in the plan's order; omit tables without any."""
        held: list[Held] = []
        for path, table, sharding in self.tables():
            rectangles = _tiling(path, table, sharding).tiles_of(rank)
            if rectangles:
                size = sharding.element_bytes
                cells = sum(r.cells for r in rectangles)
                held.append(Held(path, table, rectangles, None if size is None else cells * size))
        return tuple(held)

    def check(self, tables: Mapping[str, Mapping[str, tuple[int, int]]], world_size: int) -> None:
        """Raise unless the plan fits this model and this number of ranks.

        Args:
            tables: tables of the model: path of a module -> table -> (rows, dim).
            world_size: number of ranks.

        Raises:
            ConfigError: the plan is for another world size; it lacks a module or a table of the model, or has one
                that the model lacks; a table has other sizes; a tiling is missing, or has a rank from `world_size` up.
        """
        if self.world_size is not None and self.world_size != world_size:
            raise ConfigError(
                f"ShardingPlan: got a plan for {self.world_size} ranks; expected one for the {world_size} ranks here. "
                f"Plan again with Topology(world_size={world_size}), or start {self.world_size} ranks."
            )
        for path, sizes in tables.items():
            part = self.plan.get(path)
            if part is None and sizes:
                raise ConfigError(
                    f"ShardingPlan: got modules {_shortened(self.plan)}; expected module '{path}' of the model, too. "
                    + _next_move(self.plan, tables)
                )
            for table in sizes:
                if part is not None and table not in part:
                    raise ConfigError(
                        f"ShardingPlan: got tables {_shortened(part)}; expected table '{table}' of module '{path}', "
                        "too. Plan again, or add the table."
                    )
        for path, table, sharding in self.tables():
            if path not in tables:
                raise ConfigError(
                    f"ShardingPlan: got module '{path}', which the model lacks; expected its embedding modules, "
                    f"{_shortened(tables)}. Plan again: the plan is for another model, or the module was moved."
                )
            size = tables[path].get(table)
            if size is None:
                raise ConfigError(
                    f"ShardingPlan: got table '{table}', which module '{path}' lacks; expected its tables, "
                    f"{_shortened(tables[path])}. Plan again: the plan is for another model, or the table was renamed."
                )
            tiling = _tiling(path, table, sharding)
            if (tiling.rows, tiling.dim) != tuple(size):
                raise ConfigError(
                    f"ShardingPlan: got {tiling.rows} x {tiling.dim} cells for table '{table}' of module '{path}'; "
                    f"expected {size[0]} x {size[1]}, as in the model. Plan again."
                )
            tiling.check(table, world_size)

    def __str__(self) -> str:
        return plan_table(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {plan_summary(self)}>"

    def _repr_html_(self) -> str:
        return plan_html(self)

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values."""
        out: dict[str, Any] = {"version": self.version}
        if self.world_size is not None:
            out["world_size"] = self.world_size
        if self.hosts is not None:
            out["hosts"] = [ranks_to_text(host) for host in self.hosts]
        out["plan"] = {path: {t: s.to_json() for t, s in part.items()} for path, part in self.plan.items()}
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any] | JsonValue) -> ShardingPlan:
        """Build from a dict that `to_json` returned.

        Raises:
            ConfigError: the data is not a plan, or a plan of another version.
        """
        value = JsonValue.of(data, "ShardingPlan JSON")
        found = value.record(("version", "world_size", "hosts", "plan"), ("plan",))
        check_version(found, VERSION, "Plan again.")
        given = {key: each for key, each in found.items() if each.value is not None}
        size = given["world_size"].whole(1, MOST_RANKS) if "world_size" in given else None
        modules = {
            path: EmbeddingModuleShardingPlan(
                {table: ParameterSharding.from_json(table, item, size) for table, item in part.members().items()}
            )
            for path, part in found["plan"].members("an object of modules").items()
        }
        return ShardingPlan(
            modules,
            size,
            read_hosts(given["hosts"]) if "hosts" in given else None,
        )

    def dumps(self) -> str:
        """Return the plan as JSON text with one line per table, for people to read, edit and diff."""
        data = replace(self, plan={}).to_json()
        lines = [f" {json.dumps(key)}: {json.dumps(data[key])}," for key in data if key != "plan"]
        text = json.JSONEncoder().encode
        modules = [
            f"  {text(path)}: {{\n"
            + ",\n".join([f"   {text(t)}: {text(item.to_json())}" for t, item in part.items()])
            + "\n  }"
            for path, part in self.plan.items()
        ]
        return "\n".join(["{", *lines, ' "plan": {', ",\n".join(modules), " }", "}", ""])

    def save(self, path: str | Path) -> None:
        """Write `dumps()` to a file; an existing file is replaced atomically.

        Raises:
            FileError: the file cannot be written.
        """
        write_file(path, self.dumps(), "ShardingPlan")

    @staticmethod
    def load(path: str | Path) -> ShardingPlan:
        """Read a file that `save` wrote, or that you wrote by hand.

        Raises:
            FileError: the file cannot be read. ConfigError: it is not a plan.
        """
        return ShardingPlan.from_json(read_json(path, "ShardingPlan"))

    def fingerprint(self) -> int:
        """Return a 63-bit hash of the plan: equal on two ranks exactly if their plans are (barring collisions)."""
        return int.from_bytes(hashlib.sha256(self.dumps().encode()).digest()[:8], "big") >> 1

    def replaced(self, module_path: str, table: str, sharding: ParameterSharding) -> ShardingPlan:
        """Return a copy of this plan with another sharding of one table, without the report."""
        part = EmbeddingModuleShardingPlan({**self.plan[module_path], table: sharding})
        return replace(self, plan={**self.plan, module_path: part}, report=None)


def _read_hosts(hosts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(text_to_ranks(list(host), "ShardingPlan: hosts") for host in hosts)


def _module_plan(path: str, tables: object) -> EmbeddingModuleShardingPlan:
    odd = list(tables.values()) if isinstance(tables, Mapping) else [tables]
    odd = [item for item in odd if not (isinstance(tables, Mapping) and isinstance(item, ParameterSharding))]
    if odd:
        raise ConfigError(
            f"ShardingPlan: got a {type(odd[0]).__name__} {'in' if isinstance(tables, Mapping) else 'as'} "
            f"plan[{path!r}]; expected paths of modules with a ParameterSharding for each table. Write "
            "{'ebc': {'user': ParameterSharding('row_wise')}}; the path of the model itself is ''."
        )
    return EmbeddingModuleShardingPlan(cast(Mapping[str, ParameterSharding], tables))


def _next_move(plan: Mapping[str, Any], tables: Mapping[str, Any]) -> str:
    """Return the next move for a plan that lacks a module of the model."""
    wanted = [path for path, sizes in tables.items() if sizes]
    if len(plan) == 1 and len(wanted) == 1:
        (mine,), (theirs,) = plan, wanted
        why = ""
        if theirs == "":
            why = "The model is the embedding module itself, whose path is ''. "
        elif mine == "":
            why = "The plan is for an embedding module by itself (''), which is a submodule of the model. "
        return f"{why}If it is the same module, put its plan under its path: {{{theirs!r}: plan[{mine!r}]}}."
    return "Plan again, or add the module."


def _tiling(path: str, table: str, sharding: ParameterSharding) -> Tiling:
    if sharding.tiling is None:
        raise ConfigError(
            f"ShardingPlan: got {sharding.kind.value} without a tiling for table '{table}' of module '{path}'; "
            "expected a tiling. Complete the plan (tilerec.sharding.strategies.complete), or give a tiling."
        )
    return sharding.tiling


def _shortened(names: Iterable[str], most: int = 8) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"{listed[:most]}{more}"
