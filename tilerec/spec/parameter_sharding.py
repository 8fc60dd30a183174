"""One table's part of a plan: its kind and kernel, its ranks, its tiling, and what travels.

Nouns
  sharding    `ParameterSharding`: one table's kind, kernel, ranks, tiling and wire
  wire        the number format in which rows and gradients travel; unsaid: a sharder's, else fp32
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue
from tilerec.spec.cache import CacheParams
from tilerec.spec.kinds import KERNELS_IN_USE, EmbeddingComputeKernel, ShardingType, to_enum
from tilerec.spec.ranks import placement_to_rank, ranks_to_text, read_ranks, text_to_ranks
from tilerec.spec.table import DataType, data_type_to_dtype
from tilerec.spec.tile import Tiling
from tilerec.spec.without_effect import warn_without_effect

CODECS = ("fp32", "fp16", "bf16", "int8", "fp8")
_WITHOUT_EFFECT = {
    "stochastic_rounding": "it is the optimizer's: fused_params['stochastic_rounding'], or the attached optimizer's",
    "bounds_check_mode": "ids are checked as the collection's on_bad_id= says",
    "output_dtype": "it is the collection's: EmbeddingBagCollection(output_dtype=...)",
    "key_value_params": "tables lie in the memory of their rank's device, not in a key-value store",
}
"""Arguments of TorchRec's ParameterSharding, and why they say nothing here."""


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
    def from_json(name: str, data: Mapping[str, Any] | JsonValue) -> ParameterSharding:
        """The inverse of `to_json`; only `sharding_type` must be there (`rows` and `dim` with `tiling`).

        Args:
            name: of the table, for messages.
        """
        value = JsonValue.of(data, f"Table '{name}' in the plan")
        found = value.record(_FIELDS, ("sharding_type",))
        tiling = None
        if "tiling" in found and not {"rows", "dim"} <= set(found):
            raise value.error("rows and dim beside tiling", "Add them.")
        sizes = [found[key].whole(1) for key in ("rows", "dim") if key in found]
        if "tiling" in found:
            tiling = Tiling.from_json(name, sizes[0], sizes[1], found["tiling"])
        ranks = read_ranks(found["ranks"]) if "ranks" in found else None
        wire = read_wire(found["wire"]) if "wire" in found else None
        given = {key: each for key, each in found.items() if each.value is not None}
        try:
            return ParameterSharding(
                found["sharding_type"].text('a sharding type such as "row_wise"'),
                given["compute_kernel"].text() if "compute_kernel" in given else None,
                ranks,
                cache_params=given["cache_params"].value if "cache_params" in given else None,
                tiling=tiling,
                wire=wire,
                data_type=_data_type(found["data_type"]) if "data_type" in found else None,
                ids_per_bag=given["ids_per_bag"].number(0) if "ids_per_bag" in given else None,
            )
        except ConfigError as error:
            if str(error).startswith(value.where):
                raise
            raise value.refused(error) from error


_FIELDS = (
    "sharding_type", "compute_kernel", "cache_params", "rows", "dim", "data_type", "ids_per_bag", "ranks", "tiling",
    "wire",
)  # fmt: skip


def read_wire(value: JsonValue) -> Wire:
    """A wire from `{"forward": "bf16", "backward": "bf16"}`; one that is left out is fp32."""
    for each in value.record(("forward", "backward")).values():
        if each.value not in CODECS:
            raise each.error(f"one of {list(CODECS)}")
    return Wire(**value.value)


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


def _data_type(value: JsonValue) -> DataType:
    word = value.text('a data type such as "FP32"').upper()
    known = [kind.value for kind in DataType]
    if word not in known:
        raise value.error(f"one of {', '.join(known)}")
    return DataType(word)


def is_whole(value: object, least: int) -> bool:
    """Whether it is a whole number from `least`."""
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
