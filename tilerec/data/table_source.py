"""The source of a `TableDataset` for each kind of data: row groups, a table, or a data set of PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tilerec.data.map_groups import MapGroups
from tilerec.data.row_groups import RowGroups, TableGroups
from tilerec.data.stream_groups import StreamGroups
from tilerec.errors import InputError

__all__ = ["MapGroups", "RowGroups", "StreamGroups", "TableGroups", "as_source", "opened"]
_TABLES = ("__arrow_c_stream__", "__arrow_c_array__", "__dataframe__")
"""Methods of objects that Arrow reads as tables."""


def opened(source: RowGroups | StreamGroups, columns: Iterable[str]) -> RowGroups:
    """Return a source as row groups; of a stream, a new pass that reads the columns."""
    return source.begin(columns) if isinstance(source, StreamGroups) else source


def as_source(data: Any) -> RowGroups | StreamGroups:
    """Return the source of rows for data of any kind.

    Args:
        data: a `RowGroups` or `StreamGroups`; a pyarrow table, a pandas or Polars frame, or a dict of columns; a
            map-style or an iterable data set of `torch.utils.data`, or a `DataLoader`. Other objects with
            `__getitem__` and `__len__` are map-style data sets, those with `__iter__` are iterable.

    Raises:
        InputError: the data are of no such kind, or cannot be read.
    """
    if isinstance(data, (RowGroups, StreamGroups)):
        return data
    if isinstance(data, (str, Path)):
        raise InputError(
            f"TableDataset: got the path {str(data)!r}; expected data. Pass ParquetGroups({str(data)!r}), or "
            "DelimitedGroups for text files."
        )
    if isinstance(data, (IterableDataset, DataLoader)):
        return StreamGroups(data)
    if isinstance(data, Dataset):
        return MapGroups(data)
    # A frame of an older pandas has none of the methods.
    frame = type(data).__module__.partition(".")[0] == "pandas" or any(hasattr(data, name) for name in _TABLES)
    if frame or isinstance(data, (pa.Table, pa.RecordBatch, Mapping, bytes)):
        return TableGroups(data)
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return MapGroups(data)
    return StreamGroups(data) if hasattr(data, "__iter__") else TableGroups(data)
