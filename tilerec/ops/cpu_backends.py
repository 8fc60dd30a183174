"""Native kernels of all op families, for CPU tensors."""

from __future__ import annotations

import ctypes

from tilerec.ops.cross import cpu as cross
from tilerec.ops.distinct import cpu as distinct
from tilerec.ops.exchange import cpu as exchange
from tilerec.ops.hash import cpu as hash
from tilerec.ops.hot import cpu as hot
from tilerec.ops.jagged import cpu as jagged
from tilerec.ops.lookup import cpu as lookup
from tilerec.ops.marks import cpu as marks
from tilerec.ops.quantize import cpu as quantize
from tilerec.ops.quantized import cpu as quantized
from tilerec.ops.random import cpu as random
from tilerec.ops.row_file import cpu as row_file
from tilerec.ops.runtime.library import LIBRARY
from tilerec.ops.search import cpu as search
from tilerec.ops.update import cpu as update


def register(library: ctypes.CDLL) -> None:
    """Register the kernels over the references."""
    for family in (
        cross, distinct, exchange, hash, hot, jagged, lookup, marks, quantize, quantized, random, row_file, search,
        update,
    ):  # fmt: skip
        LIBRARY.serve("CPU", family.kernels(library))
