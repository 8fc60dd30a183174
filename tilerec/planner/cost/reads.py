"""Reads of a table's features in a step, from the constraints that the user gives."""

from __future__ import annotations

from collections.abc import Sequence

from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.ways import Limits
from tilerec.planner.cost.workload import Reads

BATCH_SIZE = 512
"""Samples of a rank if the user does not give a number."""


def reads_of(
    table: str, features: Sequence[str], batch_size: int | None, limits: ParameterConstraints | None
) -> tuple[Reads, ...]:
    """One `Reads` for each feature: bags = samples x lookups per sample, ids per bag = pooling factor.

    A list of one number in the constraints holds for all features.

    Raises:
        ConfigError: as many numbers as there are features were wanted, or a number is negative or none.
    """
    count = len(features)
    given = limits or ParameterConstraints()
    samples = _each(table, "batch_sizes", given.batch_sizes, count, batch_size or BATCH_SIZE)
    lookups = _each(table, "num_poolings", given.num_poolings, count, 1.0)
    ids = _each(table, "pooling_factors", given.pooling_factors, count, 1.0)
    return tuple(
        Reads(bags * per_sample, length, given.is_weighted)
        for bags, per_sample, length in zip(samples, lookups, ids, strict=True)
    )


def limits_of(limits: ParameterConstraints | None) -> Limits:
    """What constraints allow."""
    if limits is None:
        return Limits()
    return Limits(limits.types_allowed(), limits.min_partition)


def _each(table: str, name: str, given: Sequence[float] | None, count: int, default: float) -> list[float]:
    if given is None:
        return [float(default)] * count
    values = list(given) * (count if len(given) == 1 else 1)
    if len(values) != count:
        raise ConfigError(
            f"Table '{table}': {name} has {len(values)} numbers for {count} features; give one for each, or one for "
            "all."
        )
    for value in values:
        if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise ConfigError(f"Table '{table}': {name} has {value!r}; it must be a number from 0.")
    return [float(value) for value in values]
