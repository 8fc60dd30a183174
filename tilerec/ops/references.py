"""The op families: importing this file defines every op and registers its reference kernel."""

from __future__ import annotations

from tilerec.ops.cache import definition as cache
from tilerec.ops.cross import definition as cross
from tilerec.ops.distinct import definition as distinct
from tilerec.ops.exchange import definition as exchange
from tilerec.ops.hash import definition as hash
from tilerec.ops.hot import definition as hot
from tilerec.ops.jagged import definition as jagged
from tilerec.ops.lookup import definition as lookup
from tilerec.ops.marks import definition as marks
from tilerec.ops.quantize import definition as quantize
from tilerec.ops.quantized import definition as quantized
from tilerec.ops.random import renew
from tilerec.ops.row_file import definition as row_file
from tilerec.ops.search import definition as search
from tilerec.ops.update import definition as update

REFERENCES = (
    cache, cross, distinct, exchange, hash, hot, jagged, lookup, marks, quantize, quantized, renew, row_file, search,
    update,
)  # fmt: skip
"""Files that define the ops. Importing them registers the reference kernels. `lookup` imports those of `gradient`."""
