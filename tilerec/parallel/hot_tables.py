"""Tables that cannot have hot rows, refused by name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.parallel.model_tables import table_word
from tilerec.sharding.shard_ids import IdsBelow
from tilerec.spec.plan import ShardingPlan


def check_hot_tables(
    plan: ShardingPlan, collections: Mapping[str, TableCollection], ids: Mapping[str, IdsBelow]
) -> None:
    """Check that every table with hot rows in a complete plan can have them.

    Args:
        ids: managed collision of the model.

    Raises:
        ConfigError: its ids are those of managed collision.
    """
    managed: dict[int, set[str]] = {}
    for own in ids.values():
        if own.reader is not None:
            reader: nn.Module = own.reader.embedding_module
            managed.setdefault(id(reader), set()).update(own.collection.modules_by_table)
    for path, name, sharding in plan.tables():
        if sharding.tiling is None or sharding.tiling.head is None:
            continue
        if name in managed.get(id(collections[path]), ()):
            raise refused(path, name, "managed collision, which gives rows to other ids")


def refuse_hot_tables(plan: ShardingPlan, why: str) -> None:
    """Raise `ConfigError` if a table of a complete plan has hot rows. why: what it cannot be together with."""
    for path, name, sharding in plan.tables():
        if sharding.tiling is not None and sharding.tiling.head is not None:
            raise refused(path, name, why)


def refused(path: str, name: str, why: str) -> ConfigError:
    """Return the error for a table with hot rows. why: what it cannot be together with."""
    return ConfigError(
        f"table {table_word((path, name))}: got hot rows with {why}; expected one of the two. Leave hot= out of its "
        "ParameterSharding."
    )
