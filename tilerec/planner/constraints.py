"""`ParameterConstraints`: what a user says about one table before it is placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from tilerec.errors import ConfigError
from tilerec.spec.plan import EmbeddingComputeKernel, ShardingType, to_enum
from tilerec.spec.table import DataType


@dataclass(frozen=True)
class ParameterConstraints:
    """What a planner may do with a table, and what is known about its ids.

    Args:
        sharding_types: those allowed, the preferred one first; all of them if None.
        compute_kernels: those allowed; all of them if None. "dense" alone keeps the optimizers of sharders off the
            table; a table with an attached optimizer is "fused".
        min_partition: least number of columns of a column tile.
        pooling_factors: ids per bag, for each feature; unknown if None. Says whether adding up rows inside a host
            saves anything.
        num_poolings, batch_sizes: lookups per sample and samples per batch, for each feature.
        is_weighted: ids have weights.
        cache_params, enforce_hbm, key_value_params, use_virtual_table: of tables that are not in device memory.
        stochastic_rounding, bounds_check_mode, output_dtype: of the table's lookups; said on the module and its
            optimizer here.
        feature_names: of the table; those of its config hold.
        device_group: kind of device the table belongs on.

    Enums are accepted as their values, too: `sharding_types=["row_wise"]`. A planner warns about what it was told and
    does not use.

    Raises:
        ConfigError: an unknown word, an empty list, a sharding type that no planner can choose, a size below 1.
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

    def __post_init__(self) -> None:
        for name, kind in (("sharding_types", ShardingType), ("compute_kernels", EmbeddingComputeKernel)):
            given = getattr(self, name)
            if given is None:
                continue
            words = [given] if isinstance(given, (str, kind)) else list(given)
            if not words:
                raise ConfigError(
                    f"ParameterConstraints: {name} is empty, so nothing is allowed; leave it out."
                )
            found = tuple(dict.fromkeys(to_enum(kind, w, f"ParameterConstraints: {name}") for w in words))
            object.__setattr__(self, name, found)
        if ShardingType.EXPLICIT in self.types_allowed():
            raise ConfigError(
                "ParameterConstraints: sharding_types has explicit, which a planner cannot choose; give the table's "
                "tiling in a plan (construct_module_sharding_plan with explicit(tiles))."
            )
        least = self.min_partition
        if least is not None and (isinstance(least, bool) or not isinstance(least, int) or least < 1):
            raise ConfigError(
                f"ParameterConstraints: min_partition is {least!r}; it must be a whole number of columns from 1."
            )
        for name in ("pooling_factors", "num_poolings", "batch_sizes", "feature_names"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.pooling_factors is not None and not all(
            isinstance(f, (int, float)) and f >= 0 for f in self.pooling_factors
        ):
            raise ConfigError(
                f"ParameterConstraints: pooling_factors is {self.pooling_factors!r}; give ids per bag, from 0, for "
                "each feature."
            )

    def types_allowed(self) -> tuple[ShardingType, ...]:
        """`sharding_types`, as it is stored; empty if all are allowed."""
        return self.sharding_types or ()  # type: ignore[return-value]

    def kernels_allowed(self) -> tuple[EmbeddingComputeKernel, ...]:
        """`compute_kernels`, as it is stored; empty if all are allowed."""
        return self.compute_kernels or ()  # type: ignore[return-value]

    def ids_per_bag(self) -> float | None:
        """The largest of the pooling factors, if they are known."""
        return float(max(self.pooling_factors)) if self.pooling_factors else None

    def said(self) -> tuple[str, ...]:
        """Names of the fields that differ from their default."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != f.default)
