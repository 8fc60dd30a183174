"""The tables that a planner places: read off a model, or given as configs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.modules.table import Table
from tilerec.planner.sharder import Sharder, sharder_of
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.spec.plan import EmbeddingComputeKernel, Wire
from tilerec.spec.table import (
    AnyTableConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    dtype_to_data_type,
)
from tilerec.storage.cached import RowCache


@dataclass(frozen=True)
class PlannedTable:
    """A table as a planner sees it.

    Args:
        names: (path of a collection in the model, table) pairs; more than one where collections share the table.
        features: names of those that read it, of all these collections.
        optimizer: attached, or given by a sharder; None: a gradient as large as the table goes to `.grad`.
        trained: it has gradients at all.
        pooled: rows of a bag are added up (a bag collection).
        weighted: ids have weights.
        wire: number formats that a sharder gives; None: fp32.
        cached: its rows lie in host memory already, and this is its cache's load factor (0: no lines).
    """

    names: tuple[tuple[str, str], ...]
    rows: int
    dim: int
    data_type: DataType
    features: tuple[str, ...] = ()
    optimizer: OptimizerSpec | None = None
    trained: bool = True
    pooled: bool = True
    weighted: bool = False
    wire: Wire | None = None
    cached: float | None = None

    @cached_property
    def key(self) -> str:
        """One word for it that no other table of the model has: `"<path>.<name>"`."""
        path, name = self.names[0]
        return f"{path}.{name}" if path else name

    @property
    def kernel(self) -> EmbeddingComputeKernel | None:
        """FUSED where an optimizer is attached, or will be by a sharder; else None: nothing says it yet."""
        return None if self.optimizer is None else EmbeddingComputeKernel.FUSED

    def __str__(self) -> str:
        path, name = self.names[0]
        return f"Table '{name}'" + (f" of module '{path}'" if path else "")


AnyTable = AnyTableConfig | PlannedTable


def tables_of(
    module: nn.Module, sharders: Sequence[Sharder] = (), dense: Container[str] = ()
) -> list[PlannedTable]:
    """The tables of all collections below a module (and of the module itself, if it is one), in their order there.

    Args:
        sharders: each gives its optimizer to the tables of its kind that have none, while sharding.
        dense: names of tables that will take none from a sharder.
    """
    names: dict[int, list[tuple[str, str]]] = {}
    tables: dict[int, tuple[Table, TableCollection]] = {}
    features: dict[int, list[str]] = {}
    given: dict[int, OptimizerSpec] = {}
    wires: dict[int, Wire] = {}
    refuse: set[int] = set()
    for path, part in module.named_modules():
        if isinstance(part, TableCollection):
            sharder = sharder_of(part, sharders)
            for name, table in part._tables.items():
                mark = id(table.rows)
                names.setdefault(mark, []).append((path, name))
                tables.setdefault(mark, (table, part))
                features.setdefault(mark, []).extend(table.config.feature_names)
                if name in dense:
                    refuse.add(mark)
                if sharder is not None and sharder.optimizer is not None and table.weight.requires_grad:
                    given.setdefault(mark, sharder.optimizer)
                wire = getattr(sharder, "wire", None)
                if wire is not None:
                    wires.setdefault(mark, wire)
    found = []
    for mark, (table, part) in tables.items():
        config, leaf = table.config, table.weight
        sharders_own = None if mark in refuse else given.get(mark)
        found.append(
            PlannedTable(
                tuple(names[mark]),
                config.num_embeddings,
                config.embedding_dim,
                dtype_to_data_type(leaf.dtype),
                tuple(features[mark]),
                sharders_own if table.rows.spec is None else table.rows.spec,
                leaf.requires_grad,
                isinstance(part, EmbeddingBagCollection),
                isinstance(part, EmbeddingBagCollection) and part.is_weighted(),
                wires.get(mark),
                _load_factor(table.rows.cache),
            )
        )
    return found


def _load_factor(cache: RowCache | None) -> float | None:
    if cache is None:
        return None
    return 0.0 if cache.params is None else cache.params.load_factor


def tables_of_configs(
    configs: Iterable[AnyTable], sharders: Sequence[Sharder] = (), dense: Container[str] = ()
) -> list[PlannedTable]:
    """The tables of configs, as if one collection at the path "" held them; planned tables are as they are.

    Raises:
        ConfigError: something is no config, or two have one name.
    """
    found, seen = [], set()
    for config in configs:
        if isinstance(config, PlannedTable):
            found.append(config)
            continue
        if not isinstance(config, (EmbeddingBagConfig, EmbeddingConfig)):
            raise ConfigError(
                f"Planner: got a {type(config).__name__} among the tables; wanted a module, or a list of "
                "EmbeddingBagConfig or EmbeddingConfig."
            )
        if config.name in seen:
            raise ConfigError(f"Table '{config.name}' is there twice; give every table a name of its own.")
        seen.add(config.name)
        pooled = isinstance(config, EmbeddingBagConfig)
        kind = EmbeddingBagCollection if pooled else EmbeddingCollection
        sharder = next((s for s in sharders if issubclass(kind, s.module_type)), None)
        optimizer = None if sharder is None or config.name in dense else sharder.optimizer
        assert isinstance(config.data_type, DataType)
        found.append(
            PlannedTable(
                (("", config.name),),
                config.num_embeddings,
                config.embedding_dim,
                config.data_type,
                tuple(config.feature_names),
                optimizer,
                pooled=pooled,
                wire=getattr(sharder, "wire", None),
            )
        )
    return found


def device_type_of(module: nn.Module) -> str:
    """ "cpu" or "cuda": where the tables are; for tables on meta, what this machine has."""
    types = [part.device.type for part in module.modules() if isinstance(part, TableCollection)]
    return next((kind for kind in types if kind != "meta"), device_type_at_home())


def device_type_at_home() -> str:
    """What this machine computes on."""
    return "cuda" if torch.cuda.is_available() else "cpu"
