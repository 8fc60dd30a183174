"""The words of a plan: how a table is cut, how it is updated and where it is kept.

Nouns
  kind        `ShardingType`: the word for how a table is cut; a description, the tiling is what counts
  kernel      `EmbeddingComputeKernel`: `fused` where the table's optimizer is attached and updates in the backward
              pass, `fused_uvm_caching` where it does and the rows lie in host memory behind a cache, `dense` where none
              is, whatever sharders say, and gradients go to `.grad`; unsaid: as it comes
"""

from __future__ import annotations

from enum import Enum, unique
from typing import TypeVar

from tilerec.errors import ConfigError


@unique
class ShardingType(str, Enum):
    """How a table is cut."""

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
    """How a table is updated, and where it is kept.

    `DENSE` tables get no optimizer from a sharder: gradients go to `.grad`. All others are updated in the backward pass
    by the optimizer that is attached or that a sharder gives. `FUSED` tables lie in the memory of their rank's device;
    `FUSED_UVM_CACHING` ones in host memory, and the rows that batches name in a cache on the device; `FUSED_UVM` ones
    in host memory, and rows are on the device only while a batch is in flight (on CPU: as `FUSED`). The others are as
    `FUSED` here, and warned about.
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


HOST_KERNELS = (EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING)
"""Those that keep rows in host memory."""
KERNELS_IN_USE = (EmbeddingComputeKernel.DENSE, EmbeddingComputeKernel.FUSED, *HOST_KERNELS)
_E = TypeVar("_E", bound=Enum)


def to_enum(kind: type[_E], value: object, what: str) -> _E:
    """A member of a string-valued enum, given it or its value (`"row_wise"`, `"ROW_WISE"`)."""
    if isinstance(value, kind):
        return value
    words = {member.value: member for member in kind}
    # Another library's enum of the same values is understood: its members are (or hold) the same strings.
    word = getattr(value, "value", value)
    if isinstance(word, str) and word.lower() in words:
        return words[word.lower()]
    raise ConfigError(f"{what} got {value!r}, wanted {kind.__name__} or one of {list(words)}.")
