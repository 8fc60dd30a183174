"""Tables of a job, for saves that know the rows that change.

A save may rely on announced writes (`RowObserver`) only where all writes are announced with their rows, or raise
torch's version counters. These tables' rows are *known*. All others are read while the job stands still, as a whole:

no attached optimizer      torch's optimizers name no rows, and fused ones do not raise the counters
capturable                 replays of a CUDA graph announce nothing
memory that is shared      other processes write it
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from tilerec.modules.cached_tables import iter_table_rows
from tilerec.ops.gradient.definition import live_sinks
from tilerec.storage.table_rows import TableRows
from tilerec.torch_private import version_of

Versions = tuple[tuple[int, int], ...]


def known_rows(parts: Mapping[str, Any]) -> Iterator[TableRows]:
    """Yield the rows of the tables of a job whose changes are known, each leaf once.

    Args:
        parts: of the job. Tables are found in those that are modules.
    """
    seen: set[int] = set()
    for part in parts.values():
        for _, rows in iter_table_rows(part) if isinstance(part, nn.Module) else ():
            if id(rows) not in seen and _is_known(rows):
                seen.add(id(rows))
                yield rows


def _is_known(rows: TableRows) -> bool:
    leaf = rows.leaf
    if rows.group is None or rows.group.get("capturable", False) or leaf.is_meta or not leaf.numel():
        return False
    return leaf.device.type != "cpu" or not leaf.is_shared()


def versions_of(table: TableRows) -> Versions:
    """Return how often the rows and slots of a table were written, as torch counts; () for a cached table.

    Lines that a cache writes back raise the counters, too.
    """
    if table.cache is not None:
        return ()
    return tuple((tensor.data_ptr(), version_of(tensor)) for tensor in (table.leaf, *table.slots))


def announce_write(module: nn.Module) -> None:
    """Announce that you are about to write rows or slots of a module's tables by hand.

    Saves that are in progress copy the rows first, and the next incremental save writes all of them.
    """
    for _, rows in iter_table_rows(module):
        rows.settle()
        rows.about_to_write()


def announce_write_to(memories: Iterable[Tensor]) -> None:
    """Announce that some memory is about to be written, to the tables that it belongs to."""
    written = {(memory.device, memory.untyped_storage().data_ptr()) for memory in memories}
    for rows in live_sinks():
        if isinstance(rows, TableRows) and rows.observers:
            own = {(tensor.device, tensor.untyped_storage().data_ptr()) for tensor in rows.host()}
            if own & written:
                rows.about_to_write()
