"""The tables that a planner places: collected from a model, or given as configs."""

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
from tilerec.storage.row_cache import RowCache


@dataclass(frozen=True)
class PlannedTable:
    """One table, as input of the planner.

    Args:
        names: pairs (path of a collection in the model, table name); several if collections share the table.
        features: names of the features that read the table, from all these collections.
        optimizer: attached to the table, or given by a sharder. None: `.grad` holds a gradient as large as the table.
        trained: the table has gradients.
        pooled: the rows of a bag are summed (a bag collection).
        weighted: ids have weights.
        wire: wire formats from a sharder; None: fp32.
        cached: load factor of the table's cache, if its rows are already in host memory (0: no cache lines); else None.
        files: these rows are in files, not in host memory.
        managed: its ids are those of managed collision. Hot ones are known by their rows, in a running model only.
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
    files: bool = False
    managed: bool = False

    @cached_property
    def key(self) -> str:
        """A name that is unique in the model: `"<path>.<name>"`, or `"<name>"` at path ""."""
        path, name = self.names[0]
        return f"{path}.{name}" if path else name

    @property
    def kernel(self) -> EmbeddingComputeKernel | None:
        """FUSED if an optimizer is attached or a sharder will attach one; None if the kernel is not known yet."""
        return None if self.optimizer is None else EmbeddingComputeKernel.FUSED

    def __str__(self) -> str:
        path, name = self.names[0]
        return f"Table '{name}'" + (f" of module '{path}'" if path else "")


AnyTable = AnyTableConfig | PlannedTable


def tables_of(module: nn.Module, sharders: Sequence[Sharder] = (), dense: Container[str] = ()) -> list[PlannedTable]:
    """Return the tables of all collections in a module (or of the module, if it is a collection), in module order.

    Args:
        sharders: sharders of the later sharding. Each attaches its optimizer to tables of its kind without one.
        dense: names of tables that get no optimizer from a sharder.
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
                _load_factor(table.cache),
                table.cache is not None and table.cache.folder is not None,
                "_managed_by" in vars(part),
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
    """Return the tables of configs, as tables of one collection at path ""; `PlannedTable`s are returned unchanged.

    Raises:
        ConfigError: an item is not a config, or two configs have the same name.
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
            raise ConfigError(f"Table '{config.name}' occurs twice; give every table a unique name.")
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
    """Return the device type of the module's tables; for tables on meta, that of `device_type_at_home`."""
    types = [part.device.type for part in module.modules() if isinstance(part, TableCollection)]
    return next((kind for kind in types if kind != "meta"), device_type_at_home())


def device_type_at_home() -> str:
    """Return "cuda" if this machine has a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"
