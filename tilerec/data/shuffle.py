"""Batches from chunks of rows, in order or shuffled within a window.

Legend: n rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from tilerec.errors import ConfigError

Rows = tuple[npt.NDArray[Any], ...]
"""Arrays with one entry per row: all have the same first size."""


def check_seed(seed: int) -> None:
    """Raise `ConfigError` unless NumPy's generators take the seed."""
    if seed < 0:
        raise ConfigError(f"seed: got {seed}; expected at least 0. Leave it out for the default.")


def batched(
    chunks: Iterable[Rows], batch_size: int, *, window: int = 0, generator: np.random.Generator | None = None
) -> Iterator[Rows]:
    """Yield batches of `batch_size` rows from chunks of any size; only the last batch may be smaller.

    Args:
        chunks: rows in the order of the source.
        batch_size: rows per batch.
        window: with a generator, the number of rows that are collected and shuffled together. A row moves at most about
            one window. It also bounds the rows in memory (plus one chunk and one batch).
        generator: random generator of the order; None keeps the order of the source.
    """
    if batch_size < 1:
        raise ConfigError(f"batch_size: got {batch_size}; expected at least 1. Set it higher.")
    held: list[Rows] = []
    held_rows = 0
    for chunk in chunks:
        held.append(chunk)
        held_rows += len(chunk[0])
        if held_rows < max(batch_size, window if generator is not None else 0):
            continue
        rows = _joined(held)
        if generator is not None:
            rows = _permuted(rows, generator)
        whole = held_rows - held_rows % batch_size
        yield from (_cut(rows, at, at + batch_size) for at in range(0, whole, batch_size))
        held = [_cut(rows, whole, held_rows)]
        held_rows -= whole
    if held_rows:
        rows = _joined(held)
        if generator is not None:
            rows = _permuted(rows, generator)
        yield from (_cut(rows, at, min(at + batch_size, held_rows)) for at in range(0, held_rows, batch_size))


def _joined(held: list[Rows]) -> Rows:
    return held[0] if len(held) == 1 else tuple(np.concatenate(parts) for parts in zip(*held, strict=True))


def _permuted(rows: Rows, generator: np.random.Generator) -> Rows:
    order_n = generator.permutation(len(rows[0]))
    return tuple(part[order_n] for part in rows)


def _cut(rows: Rows, start: int, stop: int) -> Rows:
    return tuple(part[start:stop] for part in rows)
