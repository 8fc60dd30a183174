"""Who holds what of which table: a plan, its file and its print.

Nouns
  kind        `ShardingType`: the word for how a table is cut; a description, the tiling is what counts
  kernel      `EmbeddingComputeKernel`: `fused` where the table's optimizer is attached and updates in the backward
              pass, `fused_uvm_caching` where it does and the rows lie in host memory behind a cache, `dense` where none
              is, whatever sharders say, and gradients go to `.grad`; unsaid: as it comes
  wire        the number format in which rows and gradients travel; unsaid: a sharder's, else fp32
  sharding    `ParameterSharding`: one table's kind, kernel, ranks, tiling and wire
  plan        path of a module -> table -> sharding, for a world of some ranks on some hosts

A plan written by hand names kind and ranks only; `tilerec.sharding.strategies.complete` fills in tilings.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from enum import Enum, unique
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from tilerec.errors import ConfigError
from tilerec.spec.cache import CacheParams
from tilerec.spec.plan_table import plan_table
from tilerec.spec.ranks import placement_to_rank, ranks_to_text, text_to_ranks
from tilerec.spec.table import DataType, data_type_to_dtype
from tilerec.spec.tile import Rectangle, Tiling
from tilerec.spec.without_effect import warn_without_effect

VERSION = 1


@unique
class ShardingType(str, Enum):
    """How a table is cut."""

    DATA_PARALLEL = "data_parallel"  # a copy on every rank
    TABLE_WISE = "table_wise"  # whole, on one rank
    COLUMN_WISE = "column_wise"  # blocks of columns on several ranks
    ROW_WISE = "row_wise"  # ranges of rows on several ranks, by default all
    TABLE_ROW_WISE = "table_row_wise"  # ranges of rows on the ranks of one host
    TABLE_COLUMN_WISE = "table_column_wise"  # blocks of columns on the ranks of one host
    GRID_SHARD = "grid_shard"  # blocks of columns on hosts, ranges of each block's rows on the host's ranks
    EXPLICIT = "explicit"  # any tiling, written out


@unique
class EmbeddingComputeKernel(str, Enum):
    """How a table is updated, and where it is kept.

    `DENSE` tables get no optimizer from a sharder: gradients go to `.grad`. All others are updated in the backward pass
    by the optimizer that is attached or that a sharder gives. `FUSED` tables lie in the memory of their rank's device;
    `FUSED_UVM_CACHING` ones in host memory, and the rows that batches name in a cache on the device; `FUSED_UVM` ones
    in host memory, and rows are on the device only while a batch is in flight (on CPU: as `FUSED`). The others are as
    `FUSED` here, and warned about.
    """

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"
    QUANT = "quant"
    QUANT_UVM = "quant_uvm"
    QUANT_UVM_CACHING = "quant_uvm_caching"
    KEY_VALUE = "key_value"
    CUSTOMIZED_KERNEL = "customized_kernel"
    SSD_VIRTUAL_TABLE = "ssd_virtual_table"
    DRAM_VIRTUAL_TABLE = "dram_virtual_table"
    DRAM_SSD_VIRTUAL_TABLE = "dram_ssd_virtual_table"
    FUSED_TRITON = "fused_triton"


HOST_KERNELS = (EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING)
"""Those that keep rows in host memory."""
KERNELS_IN_USE = (EmbeddingComputeKernel.DENSE, EmbeddingComputeKernel.FUSED, *HOST_KERNELS)
CODECS = ("fp32", "fp16", "bf16", "int8", "fp8")
_WITHOUT_EFFECT = {
    "stochastic_rounding": "it is the optimizer's: fused_params['stochastic_rounding'], or the attached optimizer's",
    "bounds_check_mode": "ids are checked as the collection's on_bad_id= says",
    "output_dtype": "it is the collection's: EmbeddingBagCollection(output_dtype=...)",
    "key_value_params": "tables lie in the memory of their rank's device, not in a key-value store",
}
"""Arguments of TorchRec's ParameterSharding, and why they say nothing here."""
_E = TypeVar("_E", bound=Enum)


def to_enum(kind: type[_E], value: object, what: str) -> _E:
    """A member of a string-valued enum, given it or its value (`"row_wise"`, `"ROW_WISE"`)."""
    if isinstance(value, kind):
        return value
    words = {member.value: member for member in kind}
    # Another library's enum of the same values is understood: its members are (or hold) the same strings.
    word = getattr(value, "value", value)
    if isinstance(word, str) and word.lower() in words:
        return words[word.lower()]
    raise ConfigError(f"{what} got {value!r}, wanted {kind.__name__} or one of {list(words)}.")


@dataclass(frozen=True)
class Wire:
    """Number formats on the wire: `forward` for rows, `backward` for their gradients.

    One of "fp32" (as the sums are: exact), "fp16", "bf16", "int8", "fp8" (these two with one scale per row).
    """

    forward: str = "fp32"
    backward: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if getattr(self, name) not in CODECS:
                raise ConfigError(f"Wire: {name} is {getattr(self, name)!r}; use one of {list(CODECS)}.")


@dataclass(frozen=True)
class ParameterSharding:
    """One table's part of a plan.

    Args:
        sharding_type: a `ShardingType` or its value.
        compute_kernel: an `EmbeddingComputeKernel` or its value. None: fused where an optimizer is attached or given by
            a sharder, else dense; sharding fills it in.
        ranks: those that take part, in the order of their pieces; read off the tiling unless given.
        sharding_spec: of `torch.distributed`, with `shards` that have offsets, sizes and placements; read into
            the tiling and not kept up to date.
        tiling: where every cell lives. None until a strategy fills it in from kind and ranks. Sharding refuses one
            that kind and ranks do not give, with pieces of any size.
        cache_params: a `CacheParams`, or a dict of its fields: the cache of kernel `fused_uvm_caching`. None: a
            sharder's, else `CacheParams()`; sharding fills it in.
        stochastic_rounding, bounds_check_mode, output_dtype, key_value_params: of TorchRec's; not kept, with a warning
            that says why.
        enforce_hbm: taken and not kept: the kernel says where the table lies.
        wire: number formats in which its rows travel. None: those of the collection's sharder, else fp32; sharding
            fills it in. `Wire()` is fp32 whatever the sharder says.
        data_type: of the table, for counting bytes; unknown if None.
        ids_per_bag: how many ids a bag of its features has, about; unknown if None. Of one id or less, nothing is
            gained by adding up rows inside a host before they travel.

    Raises:
        ConfigError: an unknown word, or a tiling on ranks that `ranks` does not name.
    """

    sharding_type: ShardingType | str
    compute_kernel: EmbeddingComputeKernel | str | None = None
    ranks: Sequence[int] | None = None
    sharding_spec: Any = field(default=None, compare=False, repr=False)
    cache_params: CacheParams | Mapping[str, Any] | None = None
    enforce_hbm: InitVar[bool | None] = None
    stochastic_rounding: InitVar[bool | None] = None
    bounds_check_mode: InitVar[Any] = None
    output_dtype: InitVar[Any] = None
    key_value_params: InitVar[Any] = None
    tiling: Tiling | None = field(default=None, kw_only=True)
    wire: Wire | None = field(default=None, kw_only=True)
    data_type: DataType | None = field(default=None, kw_only=True)
    ids_per_bag: float | None = field(default=None, kw_only=True)

    def __post_init__(
        self,
        enforce_hbm: bool | None,
        stochastic_rounding: bool | None,
        bounds_check_mode: Any,
        output_dtype: Any,
        key_value_params: Any,
    ) -> None:
        def fill(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        given = {
            "stochastic_rounding": None if stochastic_rounding is None else str(stochastic_rounding),
            "bounds_check_mode": bounds_check_mode,
            "output_dtype": output_dtype,
            "key_value_params": key_value_params,
        }
        warn_without_effect("ParameterSharding", given, _WITHOUT_EFFECT, 3)
        if self.wire is not None and not isinstance(self.wire, Wire):
            raise ConfigError(
                f"ParameterSharding: wire is {self.wire!r:.200}; wanted a Wire such as Wire('bf16', 'bf16'), or None."
            )
        fill("sharding_type", to_enum(ShardingType, self.sharding_type, "ParameterSharding: sharding_type"))
        if self.compute_kernel is not None:
            kernel = to_enum(EmbeddingComputeKernel, self.compute_kernel, "ParameterSharding: compute_kernel")
            fill("compute_kernel", kernel)
            if kernel not in KERNELS_IN_USE:
                warnings.warn(
                    f"ParameterSharding: compute_kernel {kernel.value!r} is kept in the plan and has the effect of "
                    "'fused': the table lies in the memory of its rank's device and is updated as its optimizer says.",
                    stacklevel=3,
                )
        if self.cache_params is not None:
            fill("cache_params", _cache_params(self.cache_params))
            if self.kernel is not EmbeddingComputeKernel.FUSED_UVM_CACHING:
                said = "not said" if self.kernel is None else repr(self.kernel.value)
                warnings.warn(
                    f"ParameterSharding: cache_params have no effect, as compute_kernel is {said}; say "
                    "'fused_uvm_caching'.",
                    stacklevel=3,
                )
                fill("cache_params", None)
        if self.ids_per_bag is not None and not (
            isinstance(self.ids_per_bag, (int, float)) and self.ids_per_bag >= 0
        ):
            raise ConfigError(
                f"ParameterSharding: ids_per_bag is {self.ids_per_bag!r}; give a number from 0, or leave it out."
            )
        if self.tiling is None and self.sharding_spec is not None:
            fill("tiling", _read_spec(self.sharding_spec))
        if self.ranks is not None:
            fill("ranks", text_to_ranks(list(self.ranks), "ParameterSharding: ranks"))
        elif self.tiling is not None:
            fill("ranks", _in_order(self.kind, self.tiling))
        if self.tiling is not None and not _cut_as(self.kind, self.tiling):
            raise ConfigError(
                f"ParameterSharding: sharding_type is {self.kind.value!r}, but the tiling is cut otherwise, and that "
                "is what counts; leave the tiling out to have it made from sharding_type and ranks, or say 'explicit'."
            )
        if self.tiling is not None and self.ranks is not None:
            stray = sorted(set(self.tiling.ranks()) - set(self.ranks))
            if stray:
                raise ConfigError(
                    f"ParameterSharding: the tiling lies on ranks {ranks_to_text(stray)}, which ranks="
                    f"{ranks_to_text(self.ranks)!r} does not name; correct one of them, or leave out the tiling to "
                    "have it made from sharding_type and ranks."
                )

    @staticmethod
    def of_strategy(
        kind: ShardingType,
        ranks: tuple[int, ...],
        tiling: Tiling,
        wire: Wire | None,
        data_type: DataType,
        ids_per_bag: float | None,
    ) -> ParameterSharding:
        """What a sharding strategy made of `kind` and `ranks`: right by construction, so that nothing is checked.

        A planner makes a hundred thousand of them, each of thousands of ranks.
        """
        made = ParameterSharding.__new__(ParameterSharding)
        vars(made).update(
            sharding_type=kind, compute_kernel=None, ranks=ranks, sharding_spec=None, cache_params=None, tiling=tiling,
            wire=wire, data_type=data_type, ids_per_bag=ids_per_bag,
        )  # fmt: skip
        return made

    @property
    def kind(self) -> ShardingType:
        """`sharding_type`, as it is stored."""
        assert isinstance(self.sharding_type, ShardingType)
        return self.sharding_type

    @property
    def kernel(self) -> EmbeddingComputeKernel | None:
        """`compute_kernel`, as it is stored."""
        assert self.compute_kernel is None or isinstance(self.compute_kernel, EmbeddingComputeKernel)
        return self.compute_kernel

    @property
    def cache(self) -> CacheParams | None:
        """`cache_params`, as they are stored."""
        assert self.cache_params is None or isinstance(self.cache_params, CacheParams)
        return self.cache_params

    @property
    def element_bytes(self) -> int | None:
        """Bytes per cell, if the data type is known."""
        return None if self.data_type is None else data_type_to_dtype(self.data_type).itemsize

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values; what is unknown or by default is left out."""
        out: dict[str, Any] = {"sharding_type": self.kind._value_}
        if self.kernel is not None:
            out["compute_kernel"] = self.kernel._value_
        if self.cache is not None:
            out["cache_params"] = self.cache.to_json()
        if self.tiling is not None:
            out["rows"], out["dim"] = self.tiling.rows, self.tiling.dim
        if self.data_type is not None:
            out["data_type"] = self.data_type.value
        if self.ids_per_bag is not None:
            out["ids_per_bag"] = self.ids_per_bag
        if self.ranks is not None:
            out["ranks"] = ranks_to_text(self.ranks)
        if self.tiling is not None:
            out["tiling"] = self.tiling.to_json()
        if self.wire is not None:
            out["wire"] = {"forward": self.wire.forward, "backward": self.wire.backward}
        return out

    @staticmethod
    def from_json(name: str, data: Mapping[str, Any]) -> ParameterSharding:
        """The inverse of `to_json`; only `sharding_type` must be there (`rows` and `dim` with `tiling`).

        Args:
            name: of the table, for messages.
        """
        known = {
            "sharding_type",
            "compute_kernel",
            "cache_params",
            "rows",
            "dim",
            "data_type",
            "ids_per_bag",
            "ranks",
            "tiling",
            "wire",
        }
        if not isinstance(data, Mapping):
            raise ConfigError(f"Table '{name}': {data!r} in the plan is no object with a sharding_type.")
        unknown = sorted(set(data) - known)
        if unknown or "sharding_type" not in data:
            raise ConfigError(
                f"Table '{name}': "
                + (f"unknown fields {unknown}" if unknown else "sharding_type is missing")
                + f" in the plan; known are {sorted(known)}."
            )
        tiling = None
        if "tiling" in data:
            if not {"rows", "dim"} <= set(data):
                raise ConfigError(f"Table '{name}': its tiling in the plan needs rows and dim beside it.")
            if not (_is_whole(data["rows"], 1) and _is_whole(data["dim"], 1)):
                raise ConfigError(
                    f"Table '{name}': rows {data['rows']!r} and dim {data['dim']!r} in the plan are not whole numbers "
                    "from 1."
                )
            tiling = Tiling.from_json(name, data["rows"], data["dim"], data["tiling"])
        ranks = text_to_ranks(data["ranks"], f"Table '{name}': ranks") if "ranks" in data else None
        try:
            wire = Wire(**data["wire"]) if "wire" in data else None
            data_type = _data_type(data["data_type"]) if "data_type" in data else None
            return ParameterSharding(
                data["sharding_type"],
                data.get("compute_kernel"),
                ranks,
                cache_params=data.get("cache_params"),
                tiling=tiling,
                wire=wire,
                data_type=data_type,
                ids_per_bag=data.get("ids_per_bag"),
            )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Table '{name}' in the plan: {error}") from error


def _cache_params(given: Any) -> CacheParams:
    if isinstance(given, CacheParams):
        return given
    if isinstance(given, Mapping):
        return CacheParams.from_json(given)
    # Another library's record of the same fields.
    names = ("algorithm", "load_factor", "reserved_memory")
    if not all(hasattr(given, name) for name in names):
        raise ConfigError(
            f"ParameterSharding: cache_params is {given!r:.200}; wanted a CacheParams, or a dict of its fields."
        )
    return CacheParams(*(getattr(given, name) for name in names))


def _data_type(value: object) -> DataType:
    try:
        return DataType(value.upper() if isinstance(value, str) else value)
    except ValueError:
        known = ", ".join(kind.value for kind in DataType)
        raise ConfigError(f"data_type is {value!r}; it is one of {known}.") from None


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
        report: what a planner says of it (`tilerec.planner.report.PlanReport`), or None. No part of the plan: it is not
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
        if self.world_size is not None and not _is_whole(self.world_size, 1):
            raise ConfigError(
                f"ShardingPlan: world_size is {self.world_size!r}; it must be a whole number from 1."
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
    def from_json(data: Mapping[str, Any]) -> ShardingPlan:
        """The inverse of `to_json`.

        Raises:
            ConfigError: it is no plan, or one of another version.
        """
        known = {"version", "world_size", "hosts", "plan"}
        if not isinstance(data, Mapping) or not {"plan"} <= set(data) <= known:
            raise ConfigError(
                f"ShardingPlan JSON: wanted an object with plan and, if known, {sorted(known)}."
            )
        modules, hosts = data["plan"], data.get("hosts")
        if not isinstance(modules, Mapping) or not all(isinstance(m, Mapping) for m in modules.values()):
            raise ConfigError(
                'ShardingPlan JSON: plan is not of the form {"module": {"table": {"sharding_type": "row_wise"}}}.'
            )
        if hosts is not None and not isinstance(hosts, (list, tuple)):
            raise ConfigError(
                f'ShardingPlan JSON: hosts got {hosts!r}, wanted a list such as ["0-3", "4-7"].'
            )
        return ShardingPlan(
            {
                path: EmbeddingModuleShardingPlan(
                    {table: ParameterSharding.from_json(table, item) for table, item in part.items()}
                )
                for path, part in modules.items()
            },
            data.get("world_size"),
            None if hosts is None else [text_to_ranks(host, "ShardingPlan JSON: hosts") for host in hosts],
            data.get("version", VERSION),
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
        """Write `dumps()` to a file."""
        Path(path).write_text(self.dumps(), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> ShardingPlan:
        """Read a file that `save` or a person wrote."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ConfigError(f"ShardingPlan: {path} is not JSON: {error}.") from error
        return ShardingPlan.from_json(data)

    def fingerprint(self) -> int:
        """63 bits that are the same on every rank exactly when the plans are (up to chance)."""
        return int.from_bytes(hashlib.sha256(self.dumps().encode()).digest()[:8], "big") >> 1

    def replaced(self, module_path: str, table: str, sharding: ParameterSharding) -> ShardingPlan:
        """This plan with another sharding of one table."""
        part = EmbeddingModuleShardingPlan({**self.plan[module_path], table: sharding})
        return replace(self, plan={**self.plan, module_path: part}, report=None)


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _cut_as(kind: ShardingType, tiling: Tiling) -> bool:
    """Whether a tiling has the cuts that a sharding type speaks of (replicas aside, which any type may have)."""
    one_block = len(tiling.blocks) == 1
    no_rows = all(len(block.owners) == 1 for block in tiling.blocks)
    if kind in (ShardingType.DATA_PARALLEL, ShardingType.TABLE_WISE):
        return one_block and no_rows
    if kind in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE):
        return no_rows
    if kind in (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE):
        return one_block
    return True


def _in_order(kind: ShardingType, tiling: Tiling) -> tuple[int, ...]:
    """The ranks of a tiling, in the order of their pieces where they have one."""
    owners = [own for block in tiling.blocks for own in block.owners]
    if kind is ShardingType.EXPLICIT or any(len(own) > 1 for own in owners):
        return tiling.ranks()
    return tuple(rank for (rank,) in owners)


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


def _read_spec(spec: Any) -> Tiling:
    """A tiling from an enumerable sharding spec of `torch.distributed`: shards with offsets, sizes, placements."""
    tiles: list[tuple[int, int, int, int, int]] = []
    for shard in spec.shards:
        (r0, c0), (rows, width) = shard.shard_offsets, shard.shard_sizes
        placement = shard.placement
        rank = placement.rank() if hasattr(placement, "rank") else placement_to_rank(str(placement))
        tiles.append((r0, r0 + rows, c0, c0 + width, rank))
    if not tiles:
        raise ConfigError("ParameterSharding: sharding_spec has no shards; leave it out, or give tiling=.")
    rows, dim = max(tile[1] for tile in tiles), max(tile[3] for tile in tiles)
    return Tiling.of("of a sharding_spec", rows, dim, tiles)
