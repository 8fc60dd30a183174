"""The collections of a model, their paths, and the tables that several collections share.

Nouns
  path  path of a collection, as in `named_modules` ("" for the model itself)
  tie   tables of several collections that share their rows: one table with one state, under several names
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.table import Table
from tilerec.sharding.embedding import ShardedCollection
from tilerec.sharding.update import TileRows
from tilerec.spec.table import AnyTableConfig
from tilerec.spec.tile import Tiling

Name = tuple[str, str]
"""(path of a collection, name of a table)"""


def table_word(name: Name) -> str:
    """Return a table's name for messages: `'t' of module 'ebc'`."""
    path, table = name
    return f"'{table}' of module '{path}'" if path else f"'{table}'"


def collections_of(module: nn.Module, only: Collection[str] | None = None) -> dict[str, TableCollection]:
    """Return the unsharded collections of a model by path; leave out collections without tables.

    Args:
        only: paths to search; None: all.

    Raises:
        ConfigError: a collection is sharded already.
    """
    found: dict[str, TableCollection] = {}
    for path, part in module.named_modules():
        if only is not None and path not in only:
            continue
        if isinstance(part, ShardedCollection):
            raise ConfigError(
                f"shard: module '{path}' is sharded already; shard a model once, as a whole, or shard its other parts "
                "one by one."
            )
        if isinstance(part, TableCollection) and part._configs:
            found[path] = part
    return found


def sizes_of(collections: Mapping[str, TableCollection]) -> dict[str, dict[str, tuple[int, int]]]:
    """Return path -> table -> (rows, dim), the form that `ShardingPlan.check` takes."""
    return {
        path: {config.name: (config.num_embeddings, config.embedding_dim) for config in part._configs}
        for path, part in collections.items()
    }


def ties_of(collections: Mapping[str, TableCollection]) -> list[dict[Name, Table]]:
    """Return the distinct tables, each under all its names, ordered by their first names.

    Raises:
        ConfigError: a table belongs to a collection outside `collections`, too.
    """
    ties: dict[int, dict[Name, Table]] = {}
    for path, part in collections.items():
        for name, table in part._tables.items():
            ties.setdefault(id(table.rows), {})[(path, name)] = table
    for names in ties.values():
        inside = {id(table) for table in names.values()}
        rows = next(iter(names.values())).rows
        # Resharding calls this, too, with collections that are all sharded.
        path, name = next(iter(names))
        if isinstance(rows, TileRows) and not isinstance(collections[path], ShardedCollection):
            raise ConfigError(
                f"shard: table '{name}' of module '{path}' is also in a collection that is sharded already; shard "
                "a module that holds both."
            )
        if any(id(holder) not in inside for holder in rows.holders):
            path, name = next(iter(names))
            raise ConfigError(
                f"shard: table '{name}' of module '{path}' is shared with a collection that is not below the module; "
                "shard a module that holds both. If that collection is no longer in use, delete it first "
                "(gc.collect() deletes one with a reference cycle)."
            )
    return list(ties.values())


def check_ties(ties: Sequence[Mapping[Name, Table]], tilings: Mapping[Name, Tiling]) -> None:
    """Raise a `ConfigError` if the names of one table have different tilings."""
    for names in ties:
        first, *others = names
        for other in others:
            if tilings[first] != tilings[other]:
                raise ConfigError(
                    f"shard: table '{other[1]}' of module '{other[0]}' is the same table as '{first[1]}' of "
                    f"'{first[0]}', but the plan gives them different tilings; give both the same tiling."
                )


def device_type_of(device: torch.device | None, collections: Mapping[str, TableCollection]) -> str:
    """Return the type of the given device; without one, of the first table's that is not on meta, else "cpu"."""
    types = [part.device.type for part in collections.values()]
    return device.type if device is not None else next((kind for kind in types if kind != "meta"), "cpu")


def warn_of_no_tables(module: nn.Module, who: str) -> None:
    """Warn if the model has no collections; the warning names torch's own embeddings."""
    if any(isinstance(part, TableCollection) for part in module.modules()):
        return
    plain = [path for path, part in module.named_modules() if isinstance(part, (nn.EmbeddingBag, nn.Embedding))]
    warnings.warn(
        f"{who}: {type(module).__name__} has no EmbeddingBagCollection or EmbeddingCollection, so "
        "nothing is sharded and every rank holds the whole model, as under DistributedDataParallel."
        + (f" {plain[:8]} are torch's own embeddings: put their tables into a collection." if plain else ""),
        stacklevel=4,
    )


def properties_to_compare(collections: Mapping[str, TableCollection]) -> dict[str, Any]:
    """Return the properties of the collections that must be equal on all ranks, as strings and numbers."""
    return {
        path: {
            "kind": type(part).__name__,
            "weighted": getattr(part, "_is_weighted", False),
            "tables": {name: _described(table.config, table) for name, table in part._tables.items()},
        }
        for path, part in collections.items()
    }


def _described(config: AnyTableConfig, table: Table) -> dict[str, Any]:
    spec = table.rows.spec
    return {
        "rows": config.num_embeddings,
        "dim": config.embedding_dim,
        "dtype": str(table.weight.dtype),
        "features": list(config.feature_names),
        "pooling": str(getattr(config, "pooling", None)),
        "init": (
            config.weight_init_min,
            config.weight_init_max,
            getattr(config.init_fn, "__qualname__", None),
        ),
        "optimizer": None if spec is None else spec.to_json(),
        "trained": table.weight.requires_grad,
        "on meta": table.weight.is_meta,
    }
