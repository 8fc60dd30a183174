"""Sharding of one table in a plan: its kind, kernel, ranks, tiling and wire format.

Nouns
  sharding    `ParameterSharding`: one table's kind, kernel, ranks, tiling and wire
  wire        the number formats of rows and gradients on the network; None: a sharder's, else fp32
  hot         rows that every rank holds a copy of, beside the tiling
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue
from tilerec.spec.cache import CacheParams
from tilerec.spec.hot_rows import HotRows
from tilerec.spec.ignored_settings import warn_ignored_settings
from tilerec.spec.key_value import KeyValueParams
from tilerec.spec.ranks import placement_to_rank, ranks_to_text, read_ranks, text_to_ranks
from tilerec.spec.sharding_type import CACHING_KERNELS, KERNELS_IN_USE, EmbeddingComputeKernel, ShardingType, to_enum
from tilerec.spec.table import DataType, data_type_to_dtype
from tilerec.spec.tile import Tiling

CODECS = ["fp32", "fp16", "bf16", "int8", "fp8"]
"""Names of the wire formats. `tilerec.comms.register_codec` appends a user's."""

_WITHOUT_EFFECT = {
    "stochastic_rounding": "set it on the optimizer: fused_params['stochastic_rounding'], or the attached optimizer",
    "bounds_check_mode": "the collection's on_bad_id= decides how ids are checked",
    "output_dtype": "set it on the collection: EmbeddingBagCollection(output_dtype=...)",
}
"""Arguments of TorchRec's ParameterSharding that have no effect here -> the reason."""


@dataclass(frozen=True)
class Wire:
    """How rows travel: number formats, `forward` for rows and `backward` for their gradients, and repeated ids.

    Each format is "fp32" (the dtype of the sums: exact), "fp16", "bf16", "int8" or "fp8" (the last two with a scale per
    row).

    distinct: a rank asks for each distinct row of a feature once, and adds up its gradients before they travel. None:
    if the counts of a batch show that it saves time; True: always; False: never. For unpooled features, and for pooled
    ones with at most one id per bag.
    """

    forward: str = "fp32"
    backward: str = "fp32"
    distinct: bool | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if getattr(self, name) not in CODECS:
                raise ConfigError(
                    f"Wire: got {name}={getattr(self, name)!r}; expected one of {CODECS}. Use one of these."
                )
        if self.distinct is not None and not isinstance(self.distinct, bool):
            raise ConfigError(f"Wire: got distinct={self.distinct!r:.200}; expected True, False or None. Correct it.")

    @property
    def rounds(self) -> bool:
        """True if rows or gradients change on the way."""
        return (self.forward, self.backward) != ("fp32", "fp32")

    @property
    def keeps_bits(self) -> bool:
        """True if exact sums are possible: nothing is rounded, and no sum has to be formed before it travels."""
        return not self.rounds and not self.distinct

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict of JSON values, as `read_wire` reads them; `distinct` only if it is set."""
        out: dict[str, Any] = {"forward": self.forward, "backward": self.backward}
        if self.distinct is not None:
            out["distinct"] = self.distinct
        return out


@dataclass(frozen=True)
class ParameterSharding:
    """Sharding of one table in a plan.

    Args:
        sharding_type: a `ShardingType` or its value.
        compute_kernel: an `EmbeddingComputeKernel` or its value. None: fused if an optimizer is attached or a sharder
            gives one, else dense; sharding fills it in.
        ranks: ranks that hold the table, in the order of their tiles; taken from the tiling unless given.
        sharding_spec: a spec of `torch.distributed`, with `shards` that have offsets, sizes and placements; converted
            to the tiling and not updated later.
        tiling: placement of every cell. None until a strategy fills it in from kind and ranks. Tiles may have any
            size, but sharding raises for a tiling that kind and ranks cannot give.
        cache_params: a `CacheParams`, or a dict of its fields: the cache of kernels `fused_uvm_caching` and
            `key_value`. None: a sharder's, else `CacheParams()`; sharding fills it in.
        stochastic_rounding, bounds_check_mode, output_dtype: TorchRec's; dropped, with a warning that gives the reason.
        key_value_params: a `KeyValueParams`, or a dict of its fields: the folder of kernel `key_value`. None: that of
            the table's present files.
        enforce_hbm: accepted and ignored: the kernel decides the memory of the table.
        wire: number formats of its rows and gradients on the network. None: those of the collection's sharder, else
            fp32; sharding fills it in. `Wire()` is fp32 even if the sharder has another format.
        data_type: data type of the table, to count bytes; None: unknown.
        ids_per_bag: average number of ids per bag of its features; None: unknown. With at most one id per bag, adding
            up rows within a host before they are sent saves nothing.
        hot: rows that every rank holds a copy of; the tiling has them as its `head` once it is complete. None: none
            (`reshard`: as before). `HotRows()`: none.

    Raises:
        ConfigError: an unknown enum value, or a tiling with ranks that `ranks` does not list.
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
    key_value_params: KeyValueParams | Mapping[str, Any] | None = None
    tiling: Tiling | None = field(default=None, kw_only=True)
    wire: Wire | None = field(default=None, kw_only=True)
    data_type: DataType | None = field(default=None, kw_only=True)
    ids_per_bag: float | None = field(default=None, kw_only=True)
    hot: HotRows | None = field(default=None, kw_only=True)

    def __post_init__(
        self,
        enforce_hbm: bool | None,
        stochastic_rounding: bool | None,
        bounds_check_mode: Any,
        output_dtype: Any,
    ) -> None:
        def fill(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        given = {
            "stochastic_rounding": None if stochastic_rounding is None else str(stochastic_rounding),
            "bounds_check_mode": bounds_check_mode,
            "output_dtype": output_dtype,
        }
        warn_ignored_settings("ParameterSharding", given, _WITHOUT_EFFECT, 3)
        if self.wire is not None and not isinstance(self.wire, Wire):
            raise ConfigError(
                f"ParameterSharding: got wire={self.wire!r:.200}; expected a Wire or None. Pass one such as "
                "Wire('bf16', 'bf16')."
            )
        if self.hot is not None and not isinstance(self.hot, HotRows):
            raise ConfigError(
                f"ParameterSharding: got hot={self.hot!r:.200}; expected a HotRows or None. Pass HotRows(ids)."
            )
        if self.hot is None and self.tiling is not None and self.tiling.head is not None:
            fill("hot", self.tiling.head.hot)
        fill("sharding_type", to_enum(ShardingType, self.sharding_type, "ParameterSharding: sharding_type"))
        if self.compute_kernel is not None:
            kernel = to_enum(EmbeddingComputeKernel, self.compute_kernel, "ParameterSharding: compute_kernel")
            fill("compute_kernel", kernel)
            if kernel not in KERNELS_IN_USE:
                warnings.warn(
                    f"ParameterSharding: got compute_kernel {kernel.value!r}, which acts as 'fused' here: the table is "
                    "in the memory of its rank's device, and its optimizer updates it. The plan keeps the name.",
                    stacklevel=3,
                )
        if self.cache_params is not None:
            fill("cache_params", _cache_params(self.cache_params))
        if self.key_value_params is not None:
            fill("key_value_params", KeyValueParams.of(self.key_value_params))
        for name, kernels in (
            ("cache_params", CACHING_KERNELS),
            ("key_value_params", (EmbeddingComputeKernel.KEY_VALUE,)),
        ):
            if getattr(self, name) is not None and self.kernel not in kernels:
                kernel_text = "None" if self.kernel is None else repr(self.kernel.value)
                warnings.warn(
                    f"ParameterSharding: {name} have no effect with compute_kernel={kernel_text}; expected "
                    f"{' or '.join(repr(kernel.value) for kernel in kernels)}. Pass it, or leave out {name}.",
                    stacklevel=3,
                )
                fill(name, None)
        if self.ids_per_bag is not None and not (isinstance(self.ids_per_bag, (int, float)) and self.ids_per_bag >= 0):
            raise ConfigError(
                f"ParameterSharding: got ids_per_bag={self.ids_per_bag!r}; expected a number from 0. Leave it out if "
                "it is unknown."
            )
        if self.tiling is None and self.sharding_spec is not None:
            fill("tiling", _read_spec(self.sharding_spec))
        if self.ranks is not None:
            fill("ranks", text_to_ranks(list(self.ranks), "ParameterSharding: ranks"))
        elif self.tiling is not None:
            fill("ranks", _ranks_in_order(self.kind, self.tiling))
        if self.tiling is not None and not _matches_type(self.kind, self.tiling):
            raise ConfigError(
                f"ParameterSharding: got sharding_type={self.kind.value!r} with a tiling of another type; expected "
                "both to match. Leave the tiling out to make it from sharding_type and ranks, or pass 'explicit'."
            )
        if self.tiling is not None and self.ranks is not None:
            stray = sorted(set(self.tiling.ranks()) - set(self.ranks))
            if stray:
                raise ConfigError(
                    f"ParameterSharding: got a tiling on ranks {ranks_to_text(stray)}; expected only ranks="
                    f"{ranks_to_text(self.ranks)!r}. Correct one of them, or leave out the tiling to make it from "
                    "sharding_type and ranks."
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
        """Build the sharding that a strategy made from `kind` and `ranks`, without checks.

        A planner builds a hundred thousand of them, each with thousands of ranks, so the checks would be slow.
        """
        made = ParameterSharding.__new__(ParameterSharding)
        vars(made).update(
            sharding_type=kind, compute_kernel=None, ranks=ranks, sharding_spec=None, cache_params=None,
            key_value_params=None, tiling=tiling, wire=wire, data_type=data_type, ids_per_bag=ids_per_bag, hot=None,
        )  # fmt: skip
        return made

    @property
    def kind(self) -> ShardingType:
        """`sharding_type` with the type in which it is stored."""
        assert isinstance(self.sharding_type, ShardingType)
        return self.sharding_type

    @property
    def kernel(self) -> EmbeddingComputeKernel | None:
        """`compute_kernel` with the type in which it is stored."""
        assert self.compute_kernel is None or isinstance(self.compute_kernel, EmbeddingComputeKernel)
        return self.compute_kernel

    @property
    def cache(self) -> CacheParams | None:
        """`cache_params` with the type in which they are stored."""
        assert self.cache_params is None or isinstance(self.cache_params, CacheParams)
        return self.cache_params

    @property
    def files(self) -> KeyValueParams | None:
        """`key_value_params` with the type in which they are stored."""
        assert self.key_value_params is None or isinstance(self.key_value_params, KeyValueParams)
        return self.key_value_params

    @property
    def element_bytes(self) -> int | None:
        """Bytes per cell; None if the data type is unknown."""
        return None if self.data_type is None else data_type_to_dtype(self.data_type).itemsize

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values, without fields that are unknown or have their default."""
        out: dict[str, Any] = {"sharding_type": self.kind._value_}
        if self.kernel is not None:
            out["compute_kernel"] = self.kernel._value_
        if self.cache is not None:
            out["cache_params"] = self.cache.to_json()
        if self.files is not None:
            out["key_value_params"] = self.files.to_json()
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
            out["wire"] = self.wire.to_json()
        if self.hot is not None:
            out["hot"] = self.hot.to_json()
        return out

    @staticmethod
    def from_json(
        name: str, data: Mapping[str, Any] | JsonValue, world_size: int | None = None
    ) -> ParameterSharding:  # fmt: skip
        """Build from a dict that `to_json` returned. `sharding_type` is required, and `rows` and `dim` with `tiling`.

        Args:
            name: the table's name, for messages.
            world_size: number of ranks; the tiling then has the hot rows as its head. None: unknown.
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
        hot = HotRows.from_json(given["hot"]) if "hot" in given else None
        try:
            if tiling is not None and world_size is not None:
                tiling = tiling.with_hot(name, hot, world_size)
            return ParameterSharding(
                found["sharding_type"].text('a sharding type such as "row_wise"'),
                given["compute_kernel"].text() if "compute_kernel" in given else None,
                ranks,
                cache_params=given["cache_params"].value if "cache_params" in given else None,
                key_value_params=given["key_value_params"].value if "key_value_params" in given else None,
                tiling=tiling,
                wire=wire,
                data_type=_data_type(found["data_type"]) if "data_type" in found else None,
                ids_per_bag=given["ids_per_bag"].number(0) if "ids_per_bag" in given else None,
                hot=hot,
            )
        except ConfigError as error:
            if str(error).startswith(value.where):
                raise
            raise value.refused(error) from error


_FIELDS = (
    "sharding_type", "compute_kernel", "cache_params", "key_value_params", "rows", "dim", "data_type", "ids_per_bag",
    "ranks", "tiling", "wire", "hot",
)  # fmt: skip


def read_wire(value: JsonValue) -> Wire:
    """Read a `Wire` from `{"forward": "bf16", "backward": "bf16", "distinct": true}`; a missing direction is fp32."""
    for name, each in value.record(("forward", "backward", "distinct")).items():
        if name == "distinct":
            if each.value is not None and not isinstance(each.value, bool):
                raise each.error("true, false or null")
        elif each.value not in CODECS:
            raise each.error(f"one of {CODECS}")
    return Wire(**value.value)


def _cache_params(given: Any) -> CacheParams:
    if isinstance(given, CacheParams):
        return given
    if isinstance(given, Mapping):
        return CacheParams.from_json(given)
    # Accept another library's record with the same fields.
    names = ("algorithm", "load_factor", "reserved_memory")
    if not all(hasattr(given, name) for name in names):
        raise ConfigError(
            f"ParameterSharding: got cache_params={given!r:.200}; expected a CacheParams, or a dict of its fields. "
            "Pass one of them."
        )
    return CacheParams(*(getattr(given, name) for name in names))


def _data_type(value: JsonValue) -> DataType:
    word = value.text('a data type such as "FP32"').upper()
    known = [kind.value for kind in DataType]
    if word not in known:
        raise value.error(f"one of {', '.join(known)}")
    return DataType(word)


def _matches_type(kind: ShardingType, tiling: Tiling) -> bool:
    """Return True if a tiling has only cuts that the sharding type allows. Any type may have replicas."""
    one_block = len(tiling.blocks) == 1
    no_rows = all(len(block.owners) == 1 for block in tiling.blocks)
    if kind in (ShardingType.DATA_PARALLEL, ShardingType.TABLE_WISE):
        return one_block and no_rows
    if kind in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE):
        return no_rows
    if kind in (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE):
        return one_block
    return True


def _ranks_in_order(kind: ShardingType, tiling: Tiling) -> tuple[int, ...]:
    """Return a tiling's ranks: ascending if it is explicit or has replicas, else in the order of the tiles."""
    owners = [own for block in tiling.blocks for own in block.owners]
    if kind is ShardingType.EXPLICIT or any(len(own) > 1 for own in owners):
        return tiling.ranks()
    return tuple(rank for (rank,) in owners)


def _read_spec(spec: Any) -> Tiling:
    """Convert an enumerable sharding spec of `torch.distributed` (shards: offsets, sizes, placements) to a tiling."""
    tiles: list[tuple[int, int, int, int, int]] = []
    for shard in spec.shards:
        (r0, c0), (rows, width) = shard.shard_offsets, shard.shard_sizes
        placement = shard.placement
        rank = placement.rank() if hasattr(placement, "rank") else placement_to_rank(str(placement))
        tiles.append((r0, r0 + rows, c0, c0 + width, rank))
    if not tiles:
        raise ConfigError(
            "ParameterSharding: got a sharding_spec without shards; expected at least one. Leave it out, or pass "
            "tiling=."
        )
    rows, dim = max(tile[1] for tile in tiles), max(tile[3] for tile in tiles)
    return Tiling.of("of a sharding_spec", rows, dim, tiles)
