"""The tables that a planner places: read off a model."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tilerec.modules.collection import TableCollection
from tilerec.modules.table import Table
from tilerec.planner.sharder import Sharder, sharder_of
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.spec.plan import EmbeddingComputeKernel
from tilerec.spec.table import DataType, dtype_to_data_type


@dataclass(frozen=True)
class PlannedTable:
    """A table as a planner sees it.

    Args:
        names: (path of a collection in the model, table) pairs; more than one where collections share the table.
        row_bytes: of what goes with a row and is cut by columns with it: weights, the optimizer's state per element, a
            dense gradient.
        fixed_row_bytes: of the optimizer's state per row, which every column tile has a copy of.
        kernel: FUSED where an optimizer is attached, or will be by a sharder; else None: nothing says it yet.
    """

    names: tuple[tuple[str, str], ...]
    rows: int
    dim: int
    data_type: DataType
    row_bytes: int
    fixed_row_bytes: int
    kernel: EmbeddingComputeKernel | None = None

    @property
    def bytes(self) -> int:
        """Of the whole table."""
        return self.bytes_of(self.rows, self.dim)

    def bytes_of(self, rows: int, width: int) -> int:
        """Of a tile."""
        return rows * (-(-self.row_bytes * width // self.dim) + self.fixed_row_bytes)

    def __str__(self) -> str:
        path, name = self.names[0]
        return f"Table '{name}'" + (f" of module '{path}'" if path else "")


def tables_of(
    module: nn.Module, sharders: Sequence[Sharder] = (), dense: Container[str] = ()
) -> list[PlannedTable]:
    """The tables of all collections below a module (and of the module itself, if it is one), in their order there.

    Args:
        sharders: each gives its optimizer to the tables of its kind that have none, while sharding.
        dense: names of tables that will take none from a sharder.
    """
    names: dict[int, list[tuple[str, str]]] = {}
    tables: dict[int, Table] = {}
    given: dict[int, OptimizerSpec] = {}
    refuse: set[int] = set()
    for path, part in module.named_modules():
        if isinstance(part, TableCollection):
            sharder = sharder_of(part, sharders)
            for name, table in part._tables.items():
                mark = id(table.rows)
                names.setdefault(mark, []).append((path, name))
                tables.setdefault(mark, table)
                if name in dense:
                    refuse.add(mark)
                if sharder is not None and sharder.optimizer is not None and table.weight.requires_grad:
                    given.setdefault(mark, sharder.optimizer)
    return [
        _planned(tuple(names[mark]), table, None if mark in refuse else given.get(mark))
        for mark, table in tables.items()
    ]


def _planned(names: tuple[tuple[str, str], ...], table: Table, given: OptimizerSpec | None) -> PlannedTable:
    config, leaf = table.config, table.weight
    spec = given if table.rows.spec is None else table.rows.spec
    slots = () if spec is None else spec.slots
    wide = 8 if leaf.dtype == torch.float64 else 4  # the type of slots
    per_cell = leaf.dtype.itemsize + wide * sum(slot.per == "element" for slot in slots)
    if spec is None and leaf.requires_grad:
        per_cell += leaf.dtype.itemsize  # `.grad`
    return PlannedTable(
        names,
        config.num_embeddings,
        config.embedding_dim,
        dtype_to_data_type(leaf.dtype),
        per_cell * config.embedding_dim,
        wide * sum(slot.per == "row" for slot in slots),
        None if spec is None else EmbeddingComputeKernel.FUSED,
    )


def device_type_of(module: nn.Module) -> str:
    """ "cpu" or "cuda": where the tables are; for tables on meta, what this machine has."""
    types = [part.device.type for part in module.modules() if isinstance(part, TableCollection)]
    at_home = "cuda" if torch.cuda.is_available() else "cpu"
    return next((kind for kind in types if kind != "meta"), at_home)
