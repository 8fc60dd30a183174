"""Who holds what of which table: a plan, its file and its print.

Nouns
  sharding    `ParameterSharding`: one table's kind, kernel, ranks, tiling and wire (`spec/parameter_sharding.py`)
  plan        path of a module -> table -> sharding, for a world of some ranks on some hosts

The words that a plan is written in (`spec/kinds.py`, `Wire`) are names of this file, too: most readers want both.

A plan written by hand names kind and ranks only; `tilerec.sharding.strategies.complete` fills in tilings.
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
from tilerec.spec.kinds import HOST_KERNELS as HOST_KERNELS
from tilerec.spec.kinds import KERNELS_IN_USE as KERNELS_IN_USE
from tilerec.spec.kinds import EmbeddingComputeKernel as EmbeddingComputeKernel
from tilerec.spec.kinds import ShardingType as ShardingType
from tilerec.spec.kinds import to_enum as to_enum
from tilerec.spec.parameter_sharding import CODECS as CODECS
from tilerec.spec.parameter_sharding import ParameterSharding, is_whole
from tilerec.spec.parameter_sharding import Wire as Wire
from tilerec.spec.plan_table import plan_table
from tilerec.spec.ranks import MOST_RANKS, ranks_to_text, read_hosts, text_to_ranks
from tilerec.spec.tile import Rectangle, Tiling

VERSION = 1


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """Table -> sharding, for one embedding module.

    Args:
        tables: what `dict` takes.
        world_size, hosts: the world it is for, as of `ShardingPlan`; None if whoever made it did not say.
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
    """What a rank holds of one table; `bytes` is None where the data type is unknown."""

    module: str
    table: str
    rectangles: tuple[Rectangle, ...]
    bytes: int | None


@dataclass(frozen=True)
class ShardingPlan:
    """Path of an embedding module -> its tables' shardings.

    Args:
        plan: by the module's path in the model (`""` for the model itself), as `named_modules` gives it.
        world_size: the world it is for; None: the one its parts say, if they do.
        hosts: each host's ranks, likewise; `Topology.hosts`.
        report: what a planner says of it (`PlanReport`), or None. No part of the plan: it is not
            compared, and not written to its file.

    Raises:
        ConfigError: another version; something that is no plan of a module; parts for different worlds.
    """

    plan: Mapping[str, EmbeddingModuleShardingPlan]
    world_size: int | None = None
    hosts: Sequence[Sequence[int]] | None = None
    version: int = VERSION
    report: Any = field(default=None, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ConfigError(
                f"ShardingPlan: version {self.version!r} is not {VERSION}, the one this release reads; plan again."
            )
        if self.world_size is not None and not (
            is_whole(self.world_size, 1) and self.world_size <= MOST_RANKS
        ):
            raise ConfigError(
                f"ShardingPlan: world_size is {self.world_size!r:.80}; it must be a whole number from 1 to "
                f"{MOST_RANKS:,}."
            )
        modules = {path: _part(path, tables) for path, tables in self.plan.items()}
        if self.hosts is not None:
            object.__setattr__(self, "hosts", _read_hosts(self.hosts))
        for path, tables in self.plan.items():
            self._adopt(path, "world_size", getattr(tables, "world_size", None))
            hosts = getattr(tables, "hosts", None)
            self._adopt(path, "hosts", None if hosts is None else _read_hosts(hosts))
        object.__setattr__(self, "plan", modules)

    def _adopt(self, path: str, field: str, said: object) -> None:
        """What a part says of the world, if the others say the same or nothing."""
        known = getattr(self, field)
        if known is None:
            object.__setattr__(self, field, said)
        elif said not in (None, known):
            raise ConfigError(
                f"ShardingPlan: the part of module '{path}' was made for {field} {said}, the plan or another part for "
                f"{known}; make all of them for the same ranks."
            )

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """The part of a module, which knows the world of the whole; or None."""
        part = self.plan.get(module_path)
        return part and EmbeddingModuleShardingPlan(part, world_size=self.world_size, hosts=self.hosts)

    def tables(self) -> Iterable[tuple[str, str, ParameterSharding]]:
        """(module path, table, sharding) of every table, in the plan's order."""
        return (
            (path, table, sharding) for path, part in self.plan.items() for table, sharding in part.items()
        )

    def held_by(self, rank: int) -> tuple[Held, ...]:
        """What a rank holds, in the plan's order; tables that it holds nothing of are left out."""
        held: list[Held] = []
        for path, table, sharding in self.tables():
            rectangles = _tiling(path, table, sharding).tiles_of(rank)
            if rectangles:
                size = sharding.element_bytes
                cells = sum(r.cells for r in rectangles)
                held.append(Held(path, table, rectangles, None if size is None else cells * size))
        return tuple(held)

    def check(self, tables: Mapping[str, Mapping[str, tuple[int, int]]], world_size: int) -> None:
        """Refuse a plan that is not for this model in this world.

        Args:
            tables: the model's: path of a module -> table -> (rows, dim).
            world_size: number of ranks.

        Raises:
            ConfigError: it is for another world size; it forgets a module or a table; it names one that the model
                lacks; a table has other sizes; a tiling is missing or names a rank that the world does not have.
        """
        if self.world_size is not None and self.world_size != world_size:
            raise ConfigError(
                f"ShardingPlan: it was made for {self.world_size} ranks, this world has {world_size}; plan again "
                f"with Topology(world_size={world_size}), or start {self.world_size} ranks."
            )
        for path, sizes in tables.items():
            part = self.plan.get(path)
            if part is None and sizes:
                raise ConfigError(
                    f"ShardingPlan: module '{path}' of the model is not in it; it has {_some(self.plan)}. "
                    + _next_move(self.plan, tables)
                )
            for table in sizes:
                if part is not None and table not in part:
                    raise ConfigError(
                        f"ShardingPlan: table '{table}' of module '{path}' is not in it; it has {_some(part)}. Plan "
                        "again, or add the table."
                    )
        for path, table, sharding in self.tables():
            if path not in tables:
                raise ConfigError(
                    f"ShardingPlan: module '{path}' is not in the model, whose embedding modules are "
                    f"{_some(tables)}; this plan is for another model, or the module has moved."
                )
            size = tables[path].get(table)
            if size is None:
                raise ConfigError(
                    f"ShardingPlan: table '{table}' is not in module '{path}', which has {_some(tables[path])}; this "
                    "plan is for another model, or the table has another name now."
                )
            tiling = _tiling(path, table, sharding)
            if (tiling.rows, tiling.dim) != tuple(size):
                raise ConfigError(
                    f"ShardingPlan: table '{table}' of module '{path}' is planned with {tiling.rows} x {tiling.dim} "
                    f"cells and has {size[0]} x {size[1]}; plan again."
                )
            tiling.check(table, world_size)

    def __str__(self) -> str:
        return plan_table(self)

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values."""
        out: dict[str, Any] = {"version": self.version}
        if self.world_size is not None:
            out["world_size"] = self.world_size
        if self.hosts is not None:
            out["hosts"] = [ranks_to_text(host) for host in self.hosts]
        out["plan"] = {path: {t: s.to_json() for t, s in part.items()} for path, part in self.plan.items()}
        return out

    @staticmethod
    def from_json(data: Mapping[str, Any] | JsonValue) -> ShardingPlan:
        """The inverse of `to_json`.

        Raises:
            ConfigError: it is no plan, or one of another version.
        """
        value = JsonValue.of(data, "ShardingPlan JSON")
        found = value.record(("version", "world_size", "hosts", "plan"), ("plan",))
        check_version(found, VERSION, "Plan again.")
        given = {key: each for key, each in found.items() if each.value is not None}
        modules = {
            path: EmbeddingModuleShardingPlan(
                {table: ParameterSharding.from_json(table, item) for table, item in part.members().items()}
            )
            for path, part in found["plan"].members("an object of modules").items()
        }
        return ShardingPlan(
            modules,
            given["world_size"].whole(1, MOST_RANKS) if "world_size" in given else None,
            read_hosts(given["hosts"]) if "hosts" in given else None,
        )

    def dumps(self) -> str:
        """The plan as JSON text, one line per table: made to be read, edited and compared line by line."""
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
        """Write `dumps()` to a file; an earlier one is replaced whole or not at all.

        Raises:
            FileError: it cannot be written.
        """
        write_file(path, self.dumps(), "ShardingPlan")

    @staticmethod
    def load(path: str | Path) -> ShardingPlan:
        """Read a file that `save` or a person wrote.

        Raises:
            FileError: it cannot be read. ConfigError: it is no plan.
        """
        return ShardingPlan.from_json(read_json(path, "ShardingPlan"))

    def fingerprint(self) -> int:
        """63 bits that are the same on every rank exactly when the plans are (up to chance)."""
        return int.from_bytes(hashlib.sha256(self.dumps().encode()).digest()[:8], "big") >> 1

    def replaced(self, module_path: str, table: str, sharding: ParameterSharding) -> ShardingPlan:
        """This plan with another sharding of one table."""
        part = EmbeddingModuleShardingPlan({**self.plan[module_path], table: sharding})
        return replace(self, plan={**self.plan, module_path: part}, report=None)


def _read_hosts(hosts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(text_to_ranks(list(host), "ShardingPlan: hosts") for host in hosts)


def _part(path: str, tables: object) -> EmbeddingModuleShardingPlan:
    odd = list(tables.values()) if isinstance(tables, Mapping) else [tables]
    odd = [item for item in odd if not (isinstance(tables, Mapping) and isinstance(item, ParameterSharding))]
    if odd:
        raise ConfigError(
            f"ShardingPlan: plan[{path!r}] {'holds' if isinstance(tables, Mapping) else 'is'} a "
            f"{type(odd[0]).__name__}; wanted paths of modules with a ParameterSharding for each table, as "
            "{'ebc': {'user': ParameterSharding('row_wise')}}. The path of the model itself is ''."
        )
    return EmbeddingModuleShardingPlan(cast(Mapping[str, ParameterSharding], tables))


def _next_move(plan: Mapping[str, Any], tables: Mapping[str, Any]) -> str:
    """Of a plan that lacks a module of the model."""
    wanted = [path for path, sizes in tables.items() if sizes]
    if len(plan) == 1 and len(wanted) == 1:
        (mine,), (theirs,) = plan, wanted
        why = ""
        if theirs == "":
            why = "The model is the embedding module itself, whose path is ''. "
        elif mine == "":
            why = "The plan is of an embedding module by itself ('') and the model holds it deeper. "
        return f"{why}If it is the same module, put the part under its path: {{{theirs!r}: plan[{mine!r}]}}."
    return "Plan again, or add the module."


def _tiling(path: str, table: str, sharding: ParameterSharding) -> Tiling:
    if sharding.tiling is None:
        raise ConfigError(
            f"ShardingPlan: table '{table}' of module '{path}' says {sharding.kind.value} but not yet where its cells "
            "live; complete the plan (tilerec.sharding.strategies.complete), or give a tiling."
        )
    return sharding.tiling


def _some(names: Iterable[str], most: int = 8) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return f"{listed[:most]}{more}"
