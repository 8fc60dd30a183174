"""Enums of a plan: the sharding type and the compute kernel of a table.

Nouns
  kind    `ShardingType`: describes how a table is cut. Placement depends on the tiling alone
  kernel  `EmbeddingComputeKernel`: where the rows are kept, and which code updates them

    kernel             rows in                               updated by
    fused              device memory                         the attached optimizer, in the backward pass
    fused_uvm_caching  host memory, with a device cache      the attached optimizer, in the backward pass
    key_value          files, with a cache on the device     the attached optimizer, in the backward pass
    dense              device memory                         your own optimizer, from `.grad`; a sharder's is ignored
    None               sharding fills it in: `fused` if an optimizer is attached or a sharder gives one, else `dense`
"""

from __future__ import annotations

from enum import Enum, unique
from typing import TypeVar

from tilerec.errors import ConfigError


@unique
class ShardingType(str, Enum):
    """Pattern by which a table is cut into tiles."""

    DATA_PARALLEL = "data_parallel"  # a copy on every rank
    TABLE_WISE = "table_wise"  # whole, on one rank
    COLUMN_WISE = "column_wise"  # blocks of columns on several ranks
    ROW_WISE = "row_wise"  # ranges of rows on several ranks, by default all
    TABLE_ROW_WISE = "table_row_wise"  # ranges of rows on the ranks of one host
    TABLE_COLUMN_WISE = "table_column_wise"  # blocks of columns on the ranks of one host
    GRID_SHARD = "grid_shard"  # blocks of columns on hosts, ranges of each block's rows on the host's ranks
    EXPLICIT = "explicit"  # any tiling, written out


@unique
class EmbeddingComputeKernel(str, Enum):
    """Memory of a table's rows, and the code that updates them.

    `DENSE` tables get no optimizer from a sharder: gradients are written to `.grad`. The backward pass updates all
    other tables, with the optimizer that is attached or that a sharder gives.

    `FUSED` tables are in the memory of their rank's device. `FUSED_UVM_CACHING` tables are in host memory, with a cache
    on the device for the rows that batches look up. `FUSED_UVM` tables are in host memory; rows are on the device only
    while a batch is in flight (on CPU: as `FUSED`). `KEY_VALUE` tables are in files of a folder (`KeyValueParams`),
    with a cache on the device. All other kernels act as `FUSED`, with a warning.
    """

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"
    QUANT = "quant"
    QUANT_UVM = "quant_uvm"
    QUANT_UVM_CACHING = "quant_uvm_caching"
    KEY_VALUE = "key_value"
    CUSTOMIZED_KERNEL = "customized_kernel"
    SSD_VIRTUAL_TABLE = "ssd_virtual_table"
    DRAM_VIRTUAL_TABLE = "dram_virtual_table"
    DRAM_SSD_VIRTUAL_TABLE = "dram_ssd_virtual_table"
    FUSED_TRITON = "fused_triton"


CACHING_KERNELS = (EmbeddingComputeKernel.FUSED_UVM_CACHING, EmbeddingComputeKernel.KEY_VALUE)
"""Kernels that keep rows in slower memory, behind a cache."""
HOST_KERNELS = (EmbeddingComputeKernel.FUSED_UVM, *CACHING_KERNELS)
"""Kernels that keep rows outside of device memory."""
KERNELS_IN_USE = (EmbeddingComputeKernel.DENSE, EmbeddingComputeKernel.FUSED, *HOST_KERNELS)
_E = TypeVar("_E", bound=Enum)


def to_enum(kind: type[_E], value: object, what: str) -> _E:
    """Return a member of a string-valued enum, given the member or its value (`"row_wise"`, `"ROW_WISE"`)."""
    if isinstance(value, kind):
        return value
    words = {member.value: member for member in kind}
    # Accept another library's enum with the same values: its members are (or hold) the same strings.
    word = getattr(value, "value", value)
    if isinstance(word, str) and word.lower() in words:
        return words[word.lower()]
    raise ConfigError(f"{what}: got {value!r}; expected a {kind.__name__} or one of {list(words)}. Use one of these.")
