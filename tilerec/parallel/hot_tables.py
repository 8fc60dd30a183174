"""Tables that cannot have hot rows, refused by name."""

from __future__ import annotations

from tilerec.errors import ConfigError
from tilerec.parallel.model_tables import table_word
from tilerec.spec.plan import ShardingPlan


def refuse_hot_tables(plan: ShardingPlan) -> None:
    """Raise `ConfigError` if a table of a complete plan has hot rows, for replicas that are averaged.

    Each rank would average its copies with those of its replica group, and groups may add in another order: copies of a
    row would not be equal any longer.
    """
    for path, name, sharding in plan.tables():
        if sharding.tiling is not None and sharding.tiling.head is not None:
            why = "replicas that are averaged (2D parallelism), where copies of a row would differ"
            raise refused(path, name, why, ", or pass sync='exact'")


def refused(path: str, name: str, why: str, instead: str = "") -> ConfigError:
    """Return the error for a table with hot rows. why: what it cannot be together with."""
    return ConfigError(
        f"table {table_word((path, name))}: got hot rows with {why}; expected one of the two. Leave hot= out of its "
        f"ParameterSharding{instead}."
    )
