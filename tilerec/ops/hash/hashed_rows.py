"""Rows of hashed ids in tables without a map: `hash_rows_`. Ids may share a row. Terms as in `definition.py`."""

from __future__ import annotations

from torch import Tensor

from tilerec.ops.hash.checks import check_hash_rows
from tilerec.ops.hash.place import mixed, shifted
from tilerec.ops.runtime.library import LIBRARY


@LIBRARY.op(
    "hash_rows_(Tensor ids_N, int rows, int first_row, Tensor(a!) rows_N) -> ()",
    check=check_hash_rows,
    check_fake=True,
)
def hash_rows_reference(ids_N: Tensor, rows: int, first_row: int, rows_N: Tensor) -> None:
    """Write the row of every id: first_row + mixed mod (rows - first_row), with `mixed` an unsigned number.

    ids [1, 2, -1], rows 1000, first_row 0 -> [789, 730, 67]
    """
    mixed_N, divisor = mixed(ids_N), rows - first_row
    # Half of an unsigned number is a signed one. Twice its quotient is the number's own, or one less.
    quotient_N = (shifted(mixed_N, 1) // divisor) << 1
    rest_N = mixed_N - quotient_N * divisor  # unsigned, in [0, 2 divisor)
    rest_N -= divisor * ((rest_N < 0) | (rest_N >= divisor))
    rows_N.copy_(rest_N + first_row)
