"""Batches assembled from parts of rows, read ahead by a background thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from tilerec.data.batch import Batch
from tilerec.data.batch_join import SessionSavings, join_parts
from tilerec.data.batch_part import BatchPart
from tilerec.data.pass_reader import OrderedParts, RankParts
from tilerec.data.read_ahead import ReadAhead
from tilerec.data.share import Share


def assembled_shares(
    items: Iterable[RankParts],
    features: Sequence[str],
    no_rows: BatchPart,
    savings: SessionSavings | None,
    read_ahead_bytes: int,
) -> Iterator[Share]:
    """Yield a rank's shares of the batches of a pass.

    Args:
        items: of a `PassReader`.
        features: keys of the sparse features.
        no_rows: the part of a batch of which the rank has no rows.
        savings: counts of ids that sessions share; None without sessions.
        read_ahead_bytes: bytes of batches in memory.
    """
    with ReadAhead(iter(items), lambda item: item.bytes, read_ahead_bytes) as ahead:
        for item in ahead:
            batch = join_parts(item.parts or (no_rows,), features, savings)
            yield Share(batch, item.place.first, item.place.total, item.place.end)


def assembled_rows(
    items: Iterator[OrderedParts], features: Sequence[str], read_ahead_bytes: int
) -> Iterator[tuple[Batch, pa.Table]]:
    """Yield batches of `ordered_parts`, each with its key columns."""
    with ReadAhead(items, lambda item: item.bytes, read_ahead_bytes) as ahead:
        for item in ahead:
            yield join_parts(item.parts, features), item.keys
