"""The reads of a table's features in a step, computed from the user's constraints."""

from __future__ import annotations

from collections.abc import Sequence

from tilerec.errors import ConfigError
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.cost.workload import Reads

BATCH_SIZE = 512
"""Default number of samples per rank and step."""


def reads_of(
    table: str, features: Sequence[str], batch_size: int | None, limits: ParameterConstraints
) -> tuple[Reads, ...]:
    """Return one `Reads` per feature: bags = samples x lookups per sample, ids per bag = pooling factor.

    A list of one number in the constraints applies to all features.

    Raises:
        ConfigError: a list has neither one number nor one for each feature, or an item is not a number from 0.
    """
    count = len(features)
    samples = _each(table, "batch_sizes", limits.batch_sizes, count, batch_size or BATCH_SIZE)
    lookups = _each(table, "num_poolings", limits.num_poolings, count, 1.0)
    ids = _each(table, "pooling_factors", limits.pooling_factors, count, 1.0)
    return tuple(
        Reads(bags * per_sample, length, limits.is_weighted)
        for bags, per_sample, length in zip(samples, lookups, ids, strict=True)
    )


def _each(table: str, name: str, given: Sequence[float] | None, count: int, default: float) -> list[float]:
    """Return one number for each feature."""
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
