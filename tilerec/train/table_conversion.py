"""`TrainedTables`: the tables of a served model, converted one by one from the rows of its training.

A table has its float rows, or is converted from them block by block. A converted table can be converted again, as the
float rows stay where they are: in a file, a checkpoint, or memory.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from tilerec.ops.quantized.row_format import check_quantizable, quantize_rows
from tilerec.quantized.collection import quant_tables, set_rows
from tilerec.quantized.row_type import RowType
from tilerec.quantized.table import QuantTable, row_memory
from tilerec.train.saved_rows import HeldRows, SavedRows


@final
class TrainedTables:
    """Tables of a model by name. Tables of several collections with one name are converted together.

    Args:
        model: of `build_quantized`, with the row types of floats.
        source: rows of the tables. If they are in memory or mapped, the model gets them, and can be called.
        device: of converted tables.
    """

    def __init__(self, model: nn.Module, source: SavedRows, device: torch.device) -> None:
        self.model = model
        self._source, self._device = source, device
        self._places: dict[str, dict[str, QuantTable]] = {}  # table name -> names in the state dict
        self._floats: dict[str, Tensor] = {}
        found = source.tables if isinstance(source, HeldRows) else {}
        seen: set[QuantTable] = set()
        for place, table in quant_tables(model).items():
            if table in seen:  # tied
                continue
            seen.add(table)
            self._places.setdefault(table.config.name, {})[place] = table
            if place in found:
                self._floats[place] = found[place].to(table.row_type.dtype)
                set_rows(model, table, table.row_type, self._floats[place])
        self._trained = {name: next(iter(tables.values())).row_type for name, tables in self._places.items()}

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return list(self._places)

    def trained_type(self, name: str) -> RowType:
        """Return the row type with which a table was trained."""
        return self._trained[name]

    def shape(self, name: str) -> tuple[int, int]:
        """Return the rows of all tables with a name, and their columns."""
        configs = [table.config for table in self._places[name].values()]
        return sum(config.num_embeddings for config in configs), configs[0].embedding_dim

    def bytes(self, name: str, row_type: RowType) -> int:
        """Return the bytes of the tables with a name as rows of a type."""
        configs = [table.config for table in self._places[name].values()]
        return sum(config.num_embeddings * row_type.row_bytes(config.embedding_dim) for config in configs)

    @torch.no_grad()
    def convert(self, name: str, row_type: RowType) -> None:
        """Give the tables with a name the rows of a type. Earlier converted rows are freed before.

        Raises:
            InputError: a number is NaN, or beyond the range of fp16.
        """
        for place, table in self._places[name].items():
            if table.row_type == row_type and not table.weight.is_meta:
                continue
            if place in self._floats:
                set_rows(self.model, table, self._trained[name], self._floats[place])
            if table.row_type != row_type or table.weight.is_meta:
                set_rows(self.model, table, row_type, self._converted(place, table, row_type))

    def _converted(self, place: str, table: QuantTable, row_type: RowType) -> Tensor:
        (rows,) = row_memory([table.config], [row_type], self._device)
        for first, block in self._source.blocks(place):
            part = rows[first : first + block.shape[0]]
            if row_type.bits:
                check_quantizable(block, table.config.name, first)
                quantize_rows(block.to(self._device), row_type.bits, part)
            else:
                part.copy_(block)
        return rows
