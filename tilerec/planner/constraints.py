"""`ParameterConstraints`: restrictions on the placement of one table, and facts about its ids, given by the user."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Any

from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue
from tilerec.planner.cost.workload import Skew
from tilerec.spec.cache import CacheParams
from tilerec.spec.key_value import KeyValueParams
from tilerec.spec.plan import HOST_KERNELS, EmbeddingComputeKernel, ParameterSharding, ShardingType, to_enum
from tilerec.spec.ranks import ranks_to_text, read_ranks, text_to_ranks
from tilerec.spec.table import DataType
from tilerec.spec.tile import Tiling

FIELDS_READ = (
    "sharding_types", "compute_kernels", "min_partition", "pooling_factors", "num_poolings", "batch_sizes",
    "is_weighted", "device_group", "forbidden_types", "ranks", "hosts", "max_ranks", "with_table", "sharding", "skew",
    "cache_params", "key_value_params", "enforce_hbm",
)  # fmt: skip
"""Fields that the planner reads. It warns about the others."""


@dataclass(frozen=True)
class ParameterConstraints:
    """Restrictions on the placement of one table, and facts about its ids.

    Args:
        sharding_types: allowed sharding types, in any order. None: all of them.
        compute_kernels: allowed kernels. None: rows in device memory, or in host memory behind a cache if the tables
            do not fit otherwise. A table with an attached optimizer is "fused".

            - "dense" alone: no sharder attaches its optimizer to the table.
            - "fused_uvm_caching": rows in host memory, with a cache on the rank's GPU.
            - "fused_uvm": rows in host memory, without a cache.
            - "key_value": rows in files of a folder (`key_value_params`), with a cache on the rank's device.
            - one of these three next to "fused": the planner chooses the better one.
        min_partition: least number of columns of a column tile.
        pooling_factors: ids per bag, for each feature (or one number for all). None: planned as 1, and the plan states
            no number.
        num_poolings, batch_sizes: lookups per sample, and samples per batch of a rank, for each feature. None: 1, and
            the planner's batch_size.
        is_weighted: ids have weights. Ids of a weighted collection have weights in any case.
        cache_params: cache of the table if its rows are in host memory or in files: a `CacheParams`, or a dict of its
            fields.
        enforce_hbm: keep the rows in device memory even if they do not fit there.
        key_value_params: folder of the table if its rows are in files: a `KeyValueParams`, or a dict of its fields.
        use_virtual_table: a setting of another library; no effect.
        stochastic_rounding, bounds_check_mode, output_dtype: no effect; set them on the module and its optimizer.
        feature_names: no effect; the planner reads the table's config.
        device_group: kind of device for the table. All tables of a plan are on one kind of device.
        forbidden_types: sharding types that are not allowed.
        ranks, hosts: ranks or hosts that may hold pieces of the table: `"0-3"` or `[0, 1, 2, 3]`.
        max_ranks: largest number of ranks that may hold pieces of the table.
        with_table: name of another table. Both tables get the same split over the same ranks. In a split by rows, a
            table with fewer rows than ranks lies on the first of them only.
        sharding: a pin: a `ParameterSharding` or `Tiling` made by hand, which the plan contains unchanged.
        skew: how unevenly the ids are distributed, as measured by `tilerec stats`.

    Enum values are accepted, too: `sharding_types=["row_wise"]`. The planner warns about fields that have no effect.

    Raises:
        ConfigError: an unknown word, an empty list, a sharding type that a planner cannot choose, a number out of
            range, or fields that contradict each other.
    """

    sharding_types: Sequence[ShardingType | str] | None = None
    compute_kernels: Sequence[EmbeddingComputeKernel | str] | None = None
    min_partition: int | None = None
    pooling_factors: Sequence[float] | None = None
    num_poolings: Sequence[float] | None = None
    batch_sizes: Sequence[int] | None = None
    is_weighted: bool = False
    cache_params: Any = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: Any = None
    feature_names: Sequence[str] | None = None
    output_dtype: DataType | None = None
    device_group: str | None = None
    key_value_params: Any = None
    use_virtual_table: bool = False
    forbidden_types: Sequence[ShardingType | str] = field(default=(), kw_only=True)
    ranks: Sequence[int] | str | None = field(default=None, kw_only=True)
    hosts: Sequence[int] | str | None = field(default=None, kw_only=True)
    max_ranks: int | None = field(default=None, kw_only=True)
    with_table: str | None = field(default=None, kw_only=True)
    sharding: ParameterSharding | Tiling | None = field(default=None, kw_only=True)
    skew: Skew | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        def fill(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        self._read_words(fill)
        if ShardingType.EXPLICIT in self.sharding_types_said():
            raise ConfigError(
                "ParameterConstraints: sharding_types has explicit, which a planner cannot choose; give the table's "
                "tiling with sharding=."
            )
        for name, what in (("min_partition", "of columns"), ("max_ranks", "of ranks")):
            least = getattr(self, name)
            if least is not None and (isinstance(least, bool) or not isinstance(least, int) or least < 1):
                raise ConfigError(
                    f"ParameterConstraints: {name} is {least!r}; it must be a whole number {what} from 1."
                )
        if isinstance(self.cache_params, Mapping):
            fill("cache_params", CacheParams.from_json(self.cache_params))
        if self.key_value_params is not None:
            fill("key_value_params", KeyValueParams.of(self.key_value_params))
        if self.feature_names is not None:
            fill("feature_names", tuple(self.feature_names))
        for name, meaning in (
            ("pooling_factors", "ids per bag"),
            ("num_poolings", "lookups per sample"),
            ("batch_sizes", "samples per batch"),
        ):
            given = getattr(self, name)
            if given is None:
                continue
            numbers = _as_tuple(given)
            whole = name == "batch_sizes"
            if not numbers or not all(_is_number(n) and not (whole and n % 1) for n in numbers):
                raise ConfigError(
                    f"ParameterConstraints: {name} is {given!r}; give {'whole ' * whole}{meaning}, from 0, for each "
                    "feature."
                )
            fill(name, tuple(int(n) for n in numbers) if whole else numbers)
        for name in ("ranks", "hosts"):
            if getattr(self, name) is not None:
                given = getattr(self, name)
                found = text_to_ranks(
                    given if isinstance(given, (str, int)) else list(_as_tuple(given)),
                    f"ParameterConstraints: {name}",
                )
                if not found:
                    raise ConfigError(
                        f"ParameterConstraints: {name} is empty, so no rank may hold the table; leave it out."
                    )
                fill(name, tuple(sorted(set(found))))
        self._check_kinds()
        self._check_contradictions()

    def _check_kinds(self) -> None:
        for name, kind, wanted in (
            ("is_weighted", bool, "True or False"),
            ("device_group", str, "a kind of device such as 'cuda'"),
            ("with_table", str, "the name of a table"),
            ("skew", Skew, "a Skew, such as `tilerec stats` finds"),
            ("cache_params", CacheParams, "a CacheParams"),
            ("enforce_hbm", bool, "True or False"),
        ):
            given = getattr(self, name)
            if name == "is_weighted" and hasattr(given, "tolist"):
                given = given.tolist()
                object.__setattr__(self, name, given)
            if given is not None and not isinstance(given, kind):
                raise ConfigError(
                    f"ParameterConstraints: {name} is {given!r:.80} ({type(given).__name__}); wanted {wanted}."
                )

    def _read_words(self, fill: Any) -> None:
        for name, kind in (
            ("sharding_types", ShardingType),
            ("compute_kernels", EmbeddingComputeKernel),
            ("forbidden_types", ShardingType),
        ):
            given = getattr(self, name)
            if given is None:
                continue
            words = [given] if isinstance(given, (str, kind)) else list(given)
            if not words and name != "forbidden_types":
                raise ConfigError(f"ParameterConstraints: {name} is empty, so nothing is allowed; leave it out.")
            fill(name, tuple(dict.fromkeys(to_enum(kind, w, f"ParameterConstraints: {name}") for w in words)))

    def _check_contradictions(self) -> None:
        if self.sharding_types is not None and not self.types_allowed():
            raise ConfigError(
                f"ParameterConstraints: sharding_types {[k.value for k in self.sharding_types_said()]} are all among "
                "forbidden_types, so nothing is allowed; leave one of the two out."
            )
        slower = set(HOST_KERNELS) & set(self.kernels_allowed())
        if EmbeddingComputeKernel.KEY_VALUE in slower and len(slower) > 1:
            raise ConfigError(
                f"ParameterConstraints: got compute_kernels {sorted(k.value for k in slower)}; expected one of them: "
                "the planner compares one slower memory with the device's. Leave out the others."
            )
        if self.sharding is None:
            return
        if not isinstance(self.sharding, (ParameterSharding, Tiling)):
            raise ConfigError(
                f"ParameterConstraints: sharding is a {type(self.sharding).__name__}; wanted a ParameterSharding or a "
                "Tiling."
            )
        others = [
            name
            for name in (
                "sharding_types", "forbidden_types", "ranks", "hosts", "max_ranks", "with_table", "min_partition",
            )
            if getattr(self, name)
        ]  # fmt: skip
        if others:
            raise ConfigError(
                f"ParameterConstraints: sharding gives the placement of the table, so {', '.join(others)} cannot "
                "restrict it; leave one of them out."
            )

    def sharding_types_said(self) -> tuple[ShardingType, ...]:
        """Return `sharding_types`; () if it is None."""
        return self.sharding_types or ()  # type: ignore[return-value]

    def types_allowed(self) -> tuple[ShardingType, ...]:
        """Return the allowed sharding types, without `forbidden_types`; () if all are allowed."""
        given = self.sharding_types_said()
        if not self.forbidden_types:
            return given
        all_types = given or tuple(kind for kind in ShardingType if kind is not ShardingType.EXPLICIT)
        return tuple(kind for kind in all_types if kind not in self.forbidden_types)

    def kernels_allowed(self) -> tuple[EmbeddingComputeKernel, ...]:
        """Return `compute_kernels`; () if all are allowed."""
        return self.compute_kernels or ()  # type: ignore[return-value]

    def only_dense(self) -> bool:
        """Return True if no optimizer may be attached to the table."""
        return self.kernels_allowed() == (EmbeddingComputeKernel.DENSE,)

    def ids_per_bag(self) -> float | None:
        """Return the largest pooling factor; None if unknown."""
        return float(max(self.pooling_factors)) if self.pooling_factors else None

    def said(self) -> tuple[str, ...]:
        """Return the names of the fields that differ from their defaults."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)

    def to_json(self) -> dict[str, Any]:
        """Return a dict of JSON values: the fields in `FIELDS_READ` that differ from their defaults."""
        out: dict[str, Any] = {}
        for name in self.said():
            value = getattr(self, name)
            if name not in FIELDS_READ:
                continue
            if name in ("sharding_types", "compute_kernels", "forbidden_types"):
                value = [word.value for word in value]
            elif name in ("ranks", "hosts"):
                value = ranks_to_text(value)
            elif name in ("cache_params", "key_value_params"):
                value = value.to_json()
            elif name == "sharding":
                if isinstance(value, Tiling):
                    value = ParameterSharding(ShardingType.EXPLICIT, tiling=value)
                value = value.to_json()
            elif name == "skew":
                value = {f.name: getattr(value, f.name) for f in fields(value)}
                lists = {name: list(value.pop(name)) for name in ("curve", "hot")}
                value |= {name: numbers for name, numbers in lists.items() if numbers}
            out[name] = list(value) if isinstance(value, tuple) else value
        return out

    @staticmethod
    def from_json(name: str, data: Mapping[str, Any] | JsonValue) -> ParameterConstraints:
        """Read constraints that `to_json` returned.

        Args:
            name: the table's name, for error messages.
        """
        value = JsonValue.of(data, f"Table '{name}'")
        found = value.record([f.name for f in fields(ParameterConstraints)])
        found = {key: each for key, each in found.items() if each.value is not None}
        for key in ("sharding_types", "compute_kernels", "forbidden_types", "feature_names"):
            if key in found and not isinstance(found[key].value, str):
                found[key].texts()
        kwargs = {key: each.value for key, each in found.items()}
        for key in ("ranks", "hosts"):
            if key in found:
                kwargs[key] = read_ranks(found[key])
        if "sharding" in found:
            kwargs["sharding"] = ParameterSharding.from_json(name, found["sharding"])
        try:
            if "skew" in found:
                names = [f.name for f in fields(Skew)]
                kwargs["skew"] = Skew(**{k: v.value for k, v in found["skew"].record(names).items()})
            return ParameterConstraints(**kwargs)
        except (TypeError, ValueError) as error:
            raise error if str(error).startswith(value.where) else value.refused(error) from error


NO_CONSTRAINTS = ParameterConstraints()
FREE_PLACEMENT: dict[str, Any] = {
    "sharding_types": None, "forbidden_types": (), "ranks": None, "hosts": None, "max_ranks": None,
}  # fmt: skip
"""Fields that restrict sharding types and ranks, each with the value that allows all of them."""


def _as_tuple(given: Any) -> tuple[Any, ...]:
    """Return one item or several as a tuple; arrays and tensors become Python numbers."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    several = given if isinstance(given, (Sequence, Set)) and not isinstance(given, str) else (given,)
    return tuple(item.tolist() if hasattr(item, "tolist") else item for item in several)


def _is_number(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]
