"""`QuantTable`: the module that holds one served table's rows, a plain buffer `<collection>.<table>.weight`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilerec.quantized.row_type import RowType
from tilerec.spec.table import AnyTableConfig
from tilerec.storage.flat_storage import flat_memory
from tilerec.torch_private import submodules


class QuantTable(nn.Module):
    """One table: a buffer `weight`, `[num_embeddings, row_type.width(embedding_dim)]` of the row type's dtype.

    Args:
        config: of the table; its `data_type` is the type it was trained with.
        row_type: of the rows.
        memory: becomes the buffer.
    """

    weight: Tensor

    def __init__(self, config: AnyTableConfig, row_type: RowType, memory: Tensor) -> None:
        super().__init__()
        self.config = config
        self.row_type = row_type
        self.register_buffer("weight", memory)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, missing_keys: list[str],
        unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        value = state_dict.get(f"{prefix}weight")
        is_quantized = self.row_type.bits > 0
        # torch would convert: codes read as floats, or floats cut to bytes, are rows of garbage.
        if isinstance(value, Tensor) and is_quantized != (value.dtype == torch.uint8):
            error_msgs.append(
                f"Table '{self.config.name}': got {prefix}weight as {value.dtype}; expected {self.weight.dtype}, "
                f"{self.row_type.name} rows. Quantize the float model, or load rows of the same type."
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        return f"{self.config.num_embeddings}, {self.config.embedding_dim}, {self.row_type.name}"


class QuantTables(nn.Module):
    """Tables by name. Unlike `nn.ModuleDict`, it accepts names of module attributes, such as `type`."""

    def __init__(self, tables: Mapping[str, QuantTable]) -> None:
        super().__init__()
        submodules(self).update(tables)

    def __getitem__(self, name: str) -> QuantTable:
        table = submodules(self)[name]
        assert isinstance(table, QuantTable)
        return table


def row_memory(
    configs: Sequence[AnyTableConfig], row_types: Sequence[RowType], device: torch.device | str | None
) -> list[Tensor]:
    """Return uninitialised memory for tables' rows, contiguous in one storage per data type."""
    found: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(own.dtype for own in row_types):
        members = [t for t, own in enumerate(row_types) if own.dtype == dtype]
        shapes = [(configs[t].num_embeddings, row_types[t].width(configs[t].embedding_dim)) for t in members]
        found.update(zip(members, flat_memory(shapes, dtype, device), strict=True))
    return [found[t] for t in range(len(configs))]
