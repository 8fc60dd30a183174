"""`RowEncoding`: rows of a tensor that are saved in another form than in memory: quantized, or as shorter floats.

A saved row is a function of the whole row in memory, so a tensor that is cut by columns cannot be encoded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilerec.checkpoint.pieces import Box
from tilerec.errors import ConfigError
from tilerec.ops.quantized.row_format import check_quantizable, dequantize_rows, quantize_rows
from tilerec.quantized.row_type import RowType

Form = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""


@dataclass(frozen=True)
class RowEncoding:
    """The saved form of one tensor's rows.

    Args:
        name: of the table, for errors.
        columns: of the rows in memory.
    """

    name: str
    columns: int
    row_type: RowType

    def form(self, form: Form) -> Form:
        """Return dtype and shape of the saved tensor."""
        return self.row_type.dtype, (form[1][0], self.row_type.width(self.columns))

    def box(self, box: Box) -> Box:
        """Return the box of the saved tensor for a box of the tensor.

        Raises:
            ConfigError: the box has not all columns.
        """
        if box.sizes[1] != self.columns:
            raise ConfigError(
                f"Table '{self.name}': got columns {box.offsets[1]} to {box.offsets[1] + box.sizes[1]} of "
                f"{self.columns} on this rank; expected whole rows, as {self.row_type.name} needs the whole row. Cut "
                "the table by rows, or publish it in its own type."
            )
        return Box((box.offsets[0], 0), (box.sizes[0], self.row_type.width(self.columns)))

    def encode(self, rows_RD: Tensor) -> Tensor:
        """Return the saved form of some rows, contiguous.

        Raises:
            InputError: a number cannot be quantized.
        """
        if not self.row_type.bits:
            return rows_RD.to(self.row_type.dtype).contiguous()
        check_quantizable(rows_RD, self.name)
        return quantize_rows(rows_RD, self.row_type.bits)

    def decode(self, rows_Rk: Tensor) -> Tensor:
        """Return the numbers of saved rows, float32 [R, D]."""
        if not self.row_type.bits:
            return rows_Rk.float()
        return dequantize_rows(rows_Rk, self.columns, self.row_type.bits)
