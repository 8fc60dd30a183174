"""Argument checks of lookups in quantized rows, for every backend. Other checks are those of `ops/lookup/checks.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilerec.errors import InputError
from tilerec.ops.lookup.checks import raise_other_dim
from tilerec.ops.quantized.row_format import BITS
from tilerec.spec.quantized_row import row_bytes

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Data types of tables that are not quantized."""


def check_rows(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], dims: Sequence[int], bits: Sequence[int]
) -> None:
    """Raise an `InputError` for tables whose shape or dtype is not that of their rows."""
    if not len(shapes) == len(dims) == len(bits):
        raise InputError(
            f"A quantized lookup of {len(shapes)} tables: got {len(dims)} dims and {len(bits)} bits; expected one of "
            "each per table."
        )
    for t, (shape, dtype, dim, own) in enumerate(zip(shapes, dtypes, dims, bits, strict=True)):
        if own not in (0, *BITS):
            raise InputError(f"Table {t} of a quantized lookup: got bits={own}; expected one of {[0, *BITS]}.")
        width = row_bytes(dim, own) if own else dim
        if len(shape) != 2 or shape[1] != width or (dtype != torch.uint8 if own else dtype not in FLOATS):
            kind = f"uint8 [rows, {width}]" if own else f"float32, bfloat16 or float16 [rows, {width}]"
            raise InputError(
                f"Table {t} of a quantized lookup: got {dtype} of shape {list(shape)}; expected {kind} for {dim} "
                f"columns of {own or 'whole'} bits. Load rows of this format."
            )


def check_one_dim(dims: Sequence[int], tables: Sequence[int], names: str) -> None:
    """Raise an `InputError` for features of a sequence lookup whose tables have several dims; `dims` per table."""
    for feature, table in enumerate(tables):
        if dims[table] != dims[tables[0]]:
            raise_other_dim(names, tables, feature, dims[table], dims[tables[0]])
