"""`TileLeaves`: this rank's leaves of a sharded collection, and how its tables train."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import cast

import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.cached_lookup import check_trained
from tilerec.modules.table import Table
from tilerec.sharding.header import ATTACHED, TRAINED, LookupFacts
from tilerec.sharding.table import ShardedTable
from tilerec.sharding.update import TileRows


def dense_leaves(tables: Mapping[str, Table]) -> tuple[tuple[str, str], ...]:
    """Return (table, leaf) of each leaf whose gradient becomes a dense `.grad`, with rows or empty, table by table."""
    return tuple(
        [
            (name, leaf)
            for name, table in tables.items()
            for rows, leaf in zip(
                cast(ShardedTable, table).tile_rows, cast(ShardedTable, table).leaf_names, strict=True
            )
            if not rows.takes_gradients
        ]
    )


class TileLeaves:
    """Leaves of a collection at one moment. Lists per table are the same on every rank.

    Attributes:
        tables: the sharded tables.
        first: per table `<table>.weight`, a leaf that every rank has; it is empty on ranks without rows of the table.
    """

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._names = tuple(tables)
        self.tables = cast("list[ShardedTable]", list(tables.values()))
        self.first = cast("list[nn.Parameter]", [table._parameters["weight"] for table in self.tables])

    def follow_first(self) -> TileLeaves:
        """Copy `requires_grad` of each table's first leaf to its other leaves, and return this object."""
        for table in self.tables:
            if len(table.tiles) > 1:
                first, *others = table.leaves()
                for leaf in others:
                    if leaf.requires_grad != first.requires_grad:
                        leaf.requires_grad_(first.requires_grad)
        return self

    def accum_dtype(self) -> torch.dtype:
        """Return the dtype in which rows are added."""
        return torch.float64 if torch.float64 in {leaf.dtype for leaf in self.first} else torch.float32

    def held(self) -> list[nn.Parameter]:
        """Return the leaves with rows, in the order in which the layout lists the rectangles that this rank holds."""
        return [leaf for table in self.tables for leaf, _ in zip(table.leaves(), table.tiles, strict=False)]

    def rows(self) -> list[TileRows]:
        """Return the rows of each leaf of `held`."""
        return [rows for table in self.tables for rows, _ in zip(table.tile_rows, table.tiles, strict=False)]

    def bare_rows(self) -> list[TileRows]:
        """Return the empty rows of the tables of which this rank holds none."""
        return [table.tile_rows[0] for table in self.tables if not table.tiles]

    def sinks(self) -> list[int]:
        """Return per leaf of `held` the handle of the sink of its gradients; -1: a dense `.grad`, or no gradient."""
        return [
            rows.handle if rows.takes_gradients and leaf.requires_grad and rows.leaf is leaf else -1
            for table in self.tables
            for rows, leaf, _ in zip(table.tile_rows, table.leaves(), table.tiles, strict=False)
        ]

    def dense_places(self) -> list[int]:
        """Return the places of the `dense_leaves` in the list of leaves with rows, then empty ones."""
        held, bare = itertools.count(), itertools.count(len(self.held()))
        return [
            place
            for table in self.tables
            for rows, place in zip(table.tile_rows, held if table.tiles else bare, strict=False)
            if not rows.takes_gradients
        ]

    def trained(self) -> list[bool]:
        """Return per table whether its weight requires a gradient."""
        return [leaf.requires_grad for leaf in self.first]

    def attached(self) -> list[bool]:
        """Return per table whether the backward pass updates it.

        A weight swapped in by torch.func.functional_call has no sink.
        """
        return [
            leaf.requires_grad and rows.takes_gradients and rows.leaf is leaf
            for leaf, rows in zip(self.first, [table.rows for table in self.tables], strict=True)
        ]

    def check_cached(self) -> None:
        """Raise a `ConfigError` if a cached table or one with hot rows trains without an attached optimizer.

        All ranks raise alike.
        """
        for table in self.tables:
            if table.tiling.head is not None and table.rows.spec is None and table.rows.leaf.requires_grad:
                raise ConfigError(
                    f"Table '{table.config.name}': it has hot rows and no attached optimizer, so its rows and their "
                    "copies would be stepped one by one. Attach one with apply_optimizer_in_backward, freeze the table "
                    "(requires_grad_(False)), or leave hot= out of its ParameterSharding."
                )
        cached = [table.rows for table in self.tables if table.rows.cache is not None]
        check_trained(cached, range(len(cached)))

    def facts(self, number: int, collection: str) -> LookupFacts:
        """Return the facts of a lookup that must be equal on all ranks; if they differ, no rank routes."""
        trained, attached = self.trained(), self.attached()
        trains = torch.is_grad_enabled() and any(trained)
        rules = {}
        for name, table, updated in zip(self._names, self.tables, attached, strict=True) if trains else ():
            if updated and table.rows.group is not None:
                rules[name] = table.rows.group
        training = bytes([TRAINED * t | ATTACHED * a for t, a in zip(trained, attached, strict=True)])
        return LookupFacts(number, collection, self._names, trains, training, rules)
