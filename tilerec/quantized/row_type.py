"""`RowType`: the format of a served table's rows, quantized or floats, and its names."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilerec.errors import ConfigError
from tilerec.spec.quantized_row import row_bytes
from tilerec.spec.table import DataType


@dataclass(frozen=True)
class RowType:
    """Format of a table's rows.

    Args:
        name: "int8", "int4", "int2", "fp16", "bf16" or "fp32".
        bits: per number, for quantized rows; 0 for floats.
        dtype: of the tensor that holds the rows.
    """

    name: str
    bits: int
    dtype: torch.dtype

    def width(self, dim: int) -> int:
        """Return the columns of the tensor that holds rows of `dim` numbers."""
        return row_bytes(dim, self.bits) if self.bits else dim

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of a row of `dim` numbers."""
        return self.width(dim) * self.dtype.itemsize


ROW_TYPES = {
    row.name: row
    for row in (
        RowType("int8", 8, torch.uint8),
        RowType("int4", 4, torch.uint8),
        RowType("int2", 2, torch.uint8),
        RowType("fp16", 0, torch.float16),
        RowType("bf16", 0, torch.bfloat16),
        RowType("fp32", 0, torch.float32),
    )
}
"""Row types by name."""

_NAMES: dict[object, str] = {
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.qint8: "int8",
    torch.quint8: "int8",
    torch.quint4x2: "int4",
    torch.quint2x4: "int2",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    DataType.INT8: "int8",
    DataType.UINT8: "int8",
    DataType.INT4: "int4",
    DataType.INT2: "int2",
    DataType.FP16: "fp16",
    DataType.BF16: "bf16",
    DataType.FP32: "fp32",
}

AnyRowType = RowType | DataType | torch.dtype | str


def row_type(value: AnyRowType, what: str = "dtype") -> RowType:
    """Return the row type of a name, a `DataType` or a torch dtype.

    torch has no 4-bit or 2-bit integers; `torch.quint4x2` and `torch.quint2x4` stand for them, as in TorchRec. All
    8-bit dtypes stand for int8 rows, whose codes are unsigned.

    Example: `row_type("int4")`, `row_type(torch.quint4x2)` and `row_type(DataType.INT4)` are the same.

    Raises:
        ConfigError: another value. `what` names the argument.
    """
    if isinstance(value, RowType):
        return value
    name = value.lower() if isinstance(value, str) else _NAMES.get(value)
    if name not in ROW_TYPES:
        raise ConfigError(
            f"{what}: got {value!r}; expected one of {list(ROW_TYPES)}, a DataType or a torch dtype for it. Use one of "
            "these."
        )
    return ROW_TYPES[name]
