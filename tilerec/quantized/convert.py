"""Conversion of float tables to served rows, table by table, with the float rows freed on the way.

The tables of a float collection share one flat storage, so none of them can be freed alone. Its pages can: once a table
is converted, its pages go back to the system. Peak memory is then that of the float tables. This happens only if the
tables are the storage's only owners. If another tensor reads it (a state dict, a tied module), the storage stays as it
is, and the peak is the float tables and the result together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.modules.collection import TableCollection
from tilerec.modules.table import Table
from tilerec.ops.backends import release_pages
from tilerec.ops.quantized.row_format import check_quantizable, quantize_rows
from tilerec.quantized.row_type import RowType
from tilerec.quantized.table import QuantTable, row_memory
from tilerec.storage.table_rows import TableRows
from tilerec.torch_private import storage_holders


class TableConverter:
    """Makes served tables of float ones. Tied tables become one table.

    Args:
        collections: all that will be converted.
        consume: free the float rows; the float tables then have no memory.
        device: of the served tables; None: that of the float ones.
    """

    def __init__(
        self, collections: Iterable[TableCollection], consume: bool, device: torch.device | None = None
    ) -> None:
        self._consume, self._device = consume, device
        self._tables = {table for collection in collections for table in collection._tables.values()}
        self._made: dict[TableRows, QuantTable] = {}

    @torch.no_grad()
    def convert(self, collection: TableCollection, row_types: Sequence[RowType]) -> list[QuantTable]:
        """Return a collection's tables in these row types. Call `check` for all collections before."""
        tables = list(collection._tables.values())
        new = [t for t, table in enumerate(tables) if table.rows not in self._made]
        configs = [tables[t].config for t in new]
        leaves = [cast(Tensor, tables[t].weight).detach() for t in new]  # settles caches
        device = leaves[0].device if leaves else None
        memory = row_memory(configs, [row_types[t] for t in new], self._device or device)
        # A table that is tied to one of another model is still read.
        freed = _owned(leaves) if self._consume and all(tables[t].rows.holders <= self._tables for t in new) else {}
        for t, leaf, rows in zip(new, leaves, memory, strict=True):
            if leaf.is_meta:
                pass  # its rows are to be loaded
            elif not row_types[t].bits:
                rows.copy_(leaf)
            elif rows.device == leaf.device:
                quantize_rows(leaf, row_types[t].bits, rows)
            else:
                rows.copy_(quantize_rows(leaf, row_types[t].bits))
            if leaf.untyped_storage().data_ptr() in freed:
                release_pages(leaf)
            self._made[tables[t].rows] = QuantTable(tables[t].config, row_types[t], rows)
        for storage in freed.values():
            storage.resize_(0)
        return [self._made[table.rows] for table in tables]


def check(collection: TableCollection, row_types: Sequence[RowType]) -> None:
    """Raise unless every table of a collection can be converted. Reads all rows; changes nothing.

    Raises:
        ConfigError: the collection is sharded.
        InputError: a table to quantize has a NaN, or a number beyond the range of fp16.
    """
    for table, row_type in zip(collection._tables.values(), row_types, strict=True):
        if type(table) is not Table:
            raise ConfigError(
                f"Table '{table.config.name}': got a sharded table; expected a whole one. Load "
                "tilerec.parallel.full_state_dict(sharded_module) into an unsharded module, and quantize that."
            )
        leaf = cast(Tensor, table.weight).detach()
        if row_type.bits and not leaf.is_meta:
            check_quantizable(leaf, table.config.name)


def _owned(leaves: Sequence[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Return the CPU storages that only tables own, by address. `leaves`: detached, so each table has two tensors."""
    storages = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage() for leaf in leaves}
    tensors = Counter(leaf.untyped_storage().data_ptr() for leaf in leaves)
    return {
        place: storage
        for place, storage in storages.items()
        if place
        and storage.device.type == "cpu"
        and storage.resizable()  # not the memory of a numpy array or a file
        and not storage.is_shared()
        and storage_holders(storage) == 2 * tensors[place] + 1
    }
