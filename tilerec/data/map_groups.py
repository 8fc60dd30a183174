"""`MapGroups`: map-style data sets of PyTorch as row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from tilerec.data.row_groups import GroupReader, RowGroups
from tilerec.data.sample_table import first_table, sample_table
from tilerec.errors import ConfigError, InputError

FIRST_SAMPLES = 64
"""Samples whose types are those of the columns."""


class MapGroups(RowGroups):
    """Rows of a map-style `torch.utils.data.Dataset` whose samples are dicts.

    Values are numbers, text, None, or one-dimensional lists, arrays or tensors. The samples of a group are fetched one
    by one, or with the data set's `__getitems__` if it has one. Only the columns that are read are converted.

    Args:
        dataset: the data set; it is read from a background thread.
        rows_per_group: samples that are fetched and kept in memory together.

    Raises:
        ConfigError: `rows_per_group` is below 1.
        InputError: there are no samples, or fewer than `__len__` states, or they are no dicts.
    """

    sampled = True

    def __init__(self, dataset: Any, *, rows_per_group: int = 1 << 13) -> None:
        if rows_per_group < 1:
            raise ConfigError(f"rows_per_group: got {rows_per_group}; expected at least 1. Leave it out.")
        self._dataset = dataset
        self._step = rows_per_group
        self.name = type(dataset).__name__
        if not hasattr(dataset, "__len__"):
            raise InputError(
                f"{self.name}: got a map-style data set without __len__; expected its number of samples. Define it, or "
                "make the data set an IterableDataset."
            )
        rows = len(dataset)
        if not rows:
            raise InputError(f"{self.name}: got no samples; expected some. Check the data set.")
        self.group_rows = tuple(min(self._step, rows - at) for at in range(0, rows, self._step))
        first = self._fetch(0, min(rows, FIRST_SAMPLES))
        table = first_table(first, f"{self.name}, samples 0 to {len(first) - 1}")
        self.schema = table.schema
        self._first = table.slice(0, 1).to_pylist()

    @property
    def fingerprint(self) -> str:
        return f"{sum(self.group_rows)} samples, the first {self._first}"

    def where(self, group: int) -> str:
        start = group * self._step
        return f"{self.name}, samples {start} to {start + self.group_rows[group] - 1}"

    @contextmanager
    def open(self, group: int) -> Iterator[GroupReader]:
        samples = self._fetch(group * self._step, self.group_rows[group])
        yield SampleReader(samples, self.where(group), self.schema)

    def check_columns(self, columns: Sequence[str]) -> None:
        """Return: each group is checked when it is read."""

    def _fetch(self, start: int, count: int) -> list[Any]:
        indices = list(range(start, start + count))
        many = getattr(self._dataset, "__getitems__", None)
        try:
            return list(many(indices)) if many is not None else [self._dataset[index] for index in indices]
        except IndexError as error:
            raise InputError(
                f"{self.name}, samples {start} to {start + count - 1}: got IndexError '{error}'; expected "
                f"{len(self._dataset)} samples, as __len__ states. Correct one of both."
            ) from error


class SampleReader(GroupReader):
    """Samples in memory; a column is converted when it is read.

    Args:
        samples: dicts.
        where: their place, for messages.
        schema: types of the columns.
    """

    def __init__(self, samples: Sequence[Any], where: str, schema: pa.Schema) -> None:
        self._samples, self._where, self._types = samples, where, schema

    def read(self, columns: Sequence[str]) -> pa.Table:
        return sample_table(self._samples, columns, self._where, self._types)
