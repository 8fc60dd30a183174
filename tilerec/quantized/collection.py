"""Base class of quantized collections: named tables of served rows, and the routing of a batch's features to them.

The tables are buffers, so a collection has no parameters, optimizers or gradients. Rows of several types may be mixed;
one op call reads them all.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.modules.batch_format import check_format
from tilerec.modules.collection import TableCollection
from tilerec.modules.feature_reads import feature_reads, key_positions
from tilerec.modules.id_clamp import IdClamp, OnBadId
from tilerec.ops.quantized.served_tables import ServedTables
from tilerec.quantized.convert import TableConverter, check
from tilerec.quantized.row_type import AnyRowType, RowType, row_type
from tilerec.quantized.table import QuantTable, QuantTables, row_memory
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import AnyTableConfig, DataType
from tilerec.torch_private import buffers, submodules


@dataclass(frozen=True)
class QuantLookup:
    """Reads that one op call looks up; fields as in `modules/collection.Lookup`."""

    reads: tuple[int, ...]
    tables: tuple[int, ...]
    keys: tuple[int, ...]
    means: tuple[int, ...]
    names: str
    form: int


class QuantTableCollection(nn.Module):
    """Tables of one collection (abstract; see the two collections)."""

    def __init__(
        self,
        tables: Sequence[AnyTableConfig],
        row_types: Sequence[AnyRowType],
        device: torch.device | str | None,
        holder: str,
        output_dtype: torch.dtype,
        on_bad_id: OnBadId,
        modules: Sequence[QuantTable] | None,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        self._configs = tuple(tables)
        self._row_types = tuple(row_type(value, f"{kind}: row_types") for value in row_types)
        if len(self._row_types) != len(self._configs):
            raise ConfigError(
                f"{kind}: got {len(self._row_types)} row_types for {len(self._configs)} tables; expected one per table."
            )
        if output_dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ConfigError(
                f"{kind}: got output_dtype={output_dtype}; expected torch.float32, float16 or bfloat16. Use one of "
                "these."
            )
        self._reads = feature_reads(self._configs, kind)
        self._on_bad_id: OnBadId = on_bad_id
        self._id_clamp = IdClamp(kind, on_bad_id, self._configs, self._reads)
        self._output_dtype = output_dtype
        self._table_dims = tuple(config.embedding_dim for config in self._configs)
        self._bits = tuple(own.bits for own in self._row_types)
        self._routes: dict[tuple[str, ...], tuple[QuantLookup, ...]] = {}
        self._holder = holder
        self._served = ServedTables(())
        if modules is None:
            memory = row_memory(self._configs, self._row_types, device)
            modules = [QuantTable(c, r, m) for c, r, m in zip(self._configs, self._row_types, memory, strict=True)]
        own_tables = {config.name: table for config, table in zip(self._configs, modules, strict=True)}
        self.add_module(holder, QuantTables(own_tables))

    def _weights(self) -> list[Tensor]:
        """Return the tables' rows. Reads the module dicts directly, as it runs per call."""
        tables = submodules(cast(nn.Module, submodules(self)[self._holder])).values()
        weights: list[Tensor] = [buffers(table)["weight"] for table in tables]  # type: ignore[arg-type, misc]
        if torch.compiler.is_compiling():
            return weights
        if not self._served.holds(weights):  # `.to()`, `load_state_dict(assign=True)`
            self._served = ServedTables(weights)
        return self._served

    @property
    def device(self) -> torch.device:
        """Device of the tables; the CPU if there are no tables."""
        weights = self._weights()
        return weights[0].device if weights else torch.device("cpu")

    def tables(self) -> dict[str, QuantTable]:
        """Return the tables by name."""
        holder = cast(QuantTables, submodules(self)[self._holder])
        return {config.name: holder[config.name] for config in self._configs}

    def row_types(self) -> dict[str, RowType]:
        """Return the row type of each table."""
        return {config.name: own for config, own in zip(self._configs, self._row_types, strict=True)}

    def output_dtype(self) -> torch.dtype:
        """Return the dtype of results."""
        return self._output_dtype

    def size_in_bytes(self) -> int:
        """Return the bytes of all rows."""
        return sum(weight.nbytes for weight in self._weights())

    def _lookups(self, keys: Sequence[str]) -> tuple[QuantLookup, ...]:
        if torch.compiler.is_compiling():
            return self._route(keys)
        mark = tuple(keys)
        found = self._routes.get(mark)
        if found is None:
            if len(self._routes) > 64:  # bound the memory for key lists that keep changing
                self._routes.clear()
            found = self._routes[mark] = self._route(keys)
        return found

    def _route(self, keys: Sequence[str]) -> tuple[QuantLookup, ...]:
        position = key_positions(type(self).__name__, self._reads, keys)
        order = {config.name: t for t, config in enumerate(self._configs)}
        groups: dict[Any, list[int]] = {}
        for r in range(len(self._reads)):
            groups.setdefault((self._id_clamp.forms[r], self._split(r)), []).append(r)
        lookups = []
        for (form, _), members in groups.items():
            reads = [self._reads[r] for r in members]
            lookups.append(
                QuantLookup(
                    tuple(members),
                    tuple([order[read.table] for read in reads]),
                    tuple([position[read.feature] for read in reads]),
                    tuple([int(read.mean) for read in reads]),
                    ",".join([f"{read.feature}@{read.table}" for read in reads]),
                    form,
                )
            )
        return tuple(lookups)

    def _split(self, read: int) -> int:
        """Return a mark of a read; reads with different marks need separate lookups."""
        return 0

    def _ids(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """Check the batch, and return its ids for every `QuantLookup.form`."""
        check_format(type(self).__name__, features, tuple)
        if not self._id_clamp.active:
            return [features.values()]
        forms = self._id_clamp(features)
        if not torch.compiler.is_compiling() and features.values().device.type == "cpu":
            bad = int((forms[0] != features.values()).sum())
            if bad:
                warnings.warn(
                    f"{type(self).__name__}: {bad} ids of this batch lay outside their tables and were clamped.",
                    stacklevel=3,
                )
        return forms

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_routes": {}, "_served": ServedTables(())}


def converted(
    module: TableCollection, row_types: AnyRowType | Sequence[AnyRowType], converter: TableConverter | None
) -> tuple[list[QuantTable], list[RowType]]:
    """Return the served tables of a float collection and their row types, for `from_float`.

    Args:
        row_types: one for all tables, or one per table.
        converter: of several collections, after `check`; None: of this one alone.
    """
    count, kind = len(module._configs), f"{type(module).__name__}: row_types"
    if isinstance(row_types, (str, RowType, DataType, torch.dtype)):
        row_types = [row_types] * count
    if len(row_types) != count:
        raise ConfigError(f"{kind}: got {len(row_types)} for {count} tables; expected one, or one per table.")
    types = [row_type(value, kind) for value in row_types]
    if converter is None:
        check(module, types)
        converter = TableConverter([module], consume=False)
    tables = converter.convert(module, types)
    return tables, [table.row_type for table in tables]  # of a tied table: that of the first collection


def quant_tables(model: nn.Module) -> dict[str, QuantTable]:
    """Return the quantized tables of a model by the names of their rows in a state dict; a tied table by each name."""
    parts = model.named_modules(remove_duplicate=False)
    return {f"{path}.weight": part for path, part in parts if isinstance(part, QuantTable)}


def set_rows(model: nn.Module, table: QuantTable, row_type: RowType, rows: Tensor) -> None:
    """Give a table of a model other rows, of any type. The earlier rows are freed if nothing else holds them.

    Args:
        rows: `[num_embeddings, row_type.width(embedding_dim)]` of the row type's dtype.
    """
    table.row_type, table.weight = row_type, rows
    for part in model.modules():
        if isinstance(part, QuantTableCollection):
            part._row_types = tuple(own.row_type for own in part.tables().values())
            part._bits = tuple(own.bits for own in part._row_types)
