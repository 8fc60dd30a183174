"""`ParameterConstraints`: what a user says about one table before it is placed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Any

from tilerec.errors import ConfigError
from tilerec.json_document import JsonValue
from tilerec.planner.cost.workload import Skew
from tilerec.spec.cache import CacheParams
from tilerec.spec.plan import EmbeddingComputeKernel, ParameterSharding, ShardingType, to_enum
from tilerec.spec.ranks import ranks_to_text, read_ranks, text_to_ranks
from tilerec.spec.table import DataType
from tilerec.spec.tile import Tiling

USED = (
    "sharding_types", "compute_kernels", "min_partition", "pooling_factors", "num_poolings", "batch_sizes",
    "is_weighted", "device_group", "forbidden_types", "ranks", "hosts", "max_ranks", "with_table", "sharding", "skew",
    "cache_params", "enforce_hbm",
)  # fmt: skip
"""What planning reads; a planner warns of the others."""


@dataclass(frozen=True)
class ParameterConstraints:
    """What a planner may do with a table, and what is known about its ids.

    Args:
        sharding_types: those allowed, in any order; all of them if None.
        compute_kernels: those allowed. "dense" alone keeps the optimizers of sharders off the table; a table with an
            attached optimizer is "fused". "fused_uvm_caching" puts its rows into host memory behind a cache on its
            rank's GPU, "fused_uvm" without one; beside "fused", where that is better. None: device memory, and host
            memory behind a cache where the tables would not fit else.
        min_partition: least number of columns of a column tile.
        pooling_factors: ids per bag, for each feature (or one number for all); 1 if None, and the plan does not say.
        num_poolings, batch_sizes: lookups per sample, and samples per batch of a rank, for each feature; 1 and the
            planner's batch_size if None.
        is_weighted: ids have weights; those of a collection that says so have anyway.
        cache_params: of the table's cache, if its rows lie in host memory: a `CacheParams`, or a dict of its fields.
        enforce_hbm: its rows lie in device memory, whatever is short.
        key_value_params, use_virtual_table: of tables in stores of another library.
        stochastic_rounding, bounds_check_mode, output_dtype: of the table's lookups; said on the module and its
            optimizer here.
        feature_names: of the table; those of its config hold.
        device_group: kind of device the table belongs on; there is one kind in a plan.
        forbidden_types: sharding types that are not allowed.
        ranks, hosts: where its pieces may lie: `"0-3"` or `[0, 1, 2, 3]`.
        max_ranks: on how many ranks they may lie at most.
        with_table: the name of another table. Both are cut alike and lie on the same ranks.
        sharding: a pin: a `ParameterSharding` or a `Tiling` made by hand, which the plan has as it is.
        skew: how unevenly its ids are drawn, as `tilerec stats` finds.

    Enums are accepted as their values, too: `sharding_types=["row_wise"]`. A planner warns about what it was told and
    does not use.

    Raises:
        ConfigError: an unknown word, an empty list, a sharding type that no planner can choose, a number out of range,
            things that contradict each other.
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
            numbers = _listed(given)
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
                    given if isinstance(given, (str, int)) else list(_listed(given)),
                    f"ParameterConstraints: {name}",
                )
                if not found:
                    raise ConfigError(
                        f"ParameterConstraints: {name} is empty, so the table may lie nowhere; leave it out."
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
                raise ConfigError(
                    f"ParameterConstraints: {name} is empty, so nothing is allowed; leave it out."
                )
            fill(name, tuple(dict.fromkeys(to_enum(kind, w, f"ParameterConstraints: {name}") for w in words)))

    def _check_contradictions(self) -> None:
        if self.sharding_types is not None and not self.types_allowed():
            raise ConfigError(
                f"ParameterConstraints: sharding_types {[k.value for k in self.sharding_types_said()]} are all among "
                "forbidden_types, so nothing is allowed; leave one of the two out."
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
                f"ParameterConstraints: sharding says where the table lies, so {', '.join(others)} cannot say it too; "
                "leave one of them out."
            )

    def sharding_types_said(self) -> tuple[ShardingType, ...]:
        """`sharding_types`, as it is stored; () if nothing was said."""
        return self.sharding_types or ()  # type: ignore[return-value]

    def types_allowed(self) -> tuple[ShardingType, ...]:
        """Sharding types that are allowed; () if all are."""
        said = self.sharding_types_said()
        if not self.forbidden_types:
            return said
        all_types = said or tuple(kind for kind in ShardingType if kind is not ShardingType.EXPLICIT)
        return tuple(kind for kind in all_types if kind not in self.forbidden_types)

    def kernels_allowed(self) -> tuple[EmbeddingComputeKernel, ...]:
        """`compute_kernels`, as it is stored; () if all are allowed."""
        return self.compute_kernels or ()  # type: ignore[return-value]

    def ids_per_bag(self) -> float | None:
        """The largest of the pooling factors, if they are known."""
        return float(max(self.pooling_factors)) if self.pooling_factors else None

    def said(self) -> tuple[str, ...]:
        """Names of the fields that differ from their default."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values, of what was said and is used."""
        out: dict[str, Any] = {}
        for name in self.said():
            value = getattr(self, name)
            if name not in USED:
                continue
            if name in ("sharding_types", "compute_kernels", "forbidden_types"):
                value = [word.value for word in value]
            elif name in ("ranks", "hosts"):
                value = ranks_to_text(value)
            elif name == "cache_params":
                value = value.to_json()
            elif name == "sharding":
                if isinstance(value, Tiling):
                    value = ParameterSharding(ShardingType.EXPLICIT, tiling=value)
                value = value.to_json()
            elif name == "skew":
                value = {f.name: getattr(value, f.name) for f in fields(value)}
            out[name] = list(value) if isinstance(value, tuple) else value
        return out

    @staticmethod
    def from_json(name: str, data: Mapping[str, Any] | JsonValue) -> ParameterConstraints:
        """The inverse of `to_json`.

        Args:
            name: of the table, for messages.
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


def _listed(given: Any) -> tuple[Any, ...]:
    """One or several, as plain numbers: an array's and a tensor's are taken, too."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    several = given if isinstance(given, (Sequence, Set)) and not isinstance(given, str) else (given,)
    return tuple(item.tolist() if hasattr(item, "tolist") else item for item in several)


def _is_number(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0  # type: ignore[arg-type, operator]
