"""`FilesData`: your own files as the data of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tilerec.data.columns import Columns
from tilerec.data.dataset import Dataset
from tilerec.data.file_list import FilePath
from tilerec.data.hold_out import NO_HOLD_OUT, HoldOut
from tilerec.data.id_types import typed
from tilerec.data.parquet_files import ENDINGS as PARQUET_ENDINGS
from tilerec.data.parquet_files import ParquetGroups
from tilerec.data.row_groups import RowGroups
from tilerec.data.table_dataset import TableDataset
from tilerec.data.text_files import ENDINGS as TEXT_ENDINGS
from tilerec.data.text_files import DelimitedGroups, ListColumn
from tilerec.errors import ConfigError
from tilerec.train.config import DataConfig

_EVERY_TENTH = HoldOut(every=10)


@dataclass(frozen=True)
class FilesData(DataConfig):
    """Parquet, CSV or TSV files with columns that you choose.

    Attributes:
        path: files, folders, patterns or fsspec URLs; relative paths begin at `base`.
        columns: roles of the columns.
        hold_out: rows for evaluation; by default every tenth row.
        format: "auto" decides by the ending of the first path; a folder or URL without an ending is Parquet.
        base: folder of relative paths; "": the current folder.
        seed: of the order of the training rows.
        shuffle_rows: row groups are shuffled together until they have this many rows.
        lanes: row groups that each batch takes rows from; 1, or a multiple of the largest number of ranks, so that each
            rank decodes its own row groups only. It defines the order of the rows.
        group_by_session: column with equal values for consecutive samples of one session, which then share their ids.
        read_ahead_mb: megabytes of batches that are read ahead of training.
        keys: columns that name the samples in files of predictions; by default the id columns with one id per sample.
        items: for tasks that rank items: files with one row per item and the columns of the item's features; []: the
            items are those of `path`.
    """

    path: tuple[FilePath, ...]
    columns: Columns
    hold_out: HoldOut = _EVERY_TENTH
    format: Literal["auto", "parquet", "text"] = "auto"
    base: str = ""
    seed: int = 0
    shuffle_rows: int = 1 << 17
    lanes: int = 1
    group_by_session: str = ""
    read_ahead_mb: int = 64
    keys: tuple[str, ...] = ()
    items: tuple[FilePath, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _as_tuple(self.path))
        object.__setattr__(self, "items", _as_tuple(self.items))
        if self.format not in ("auto", "parquet", "text"):
            raise ConfigError(f"data.format: got {self.format!r}; expected 'auto', 'parquet' or 'text'. Correct it.")

    def open(self) -> TableDataset:
        held, source = self.hold_out, self._source(self.path)
        others = replace(self, columns=typed(self.columns, source))  # files that are read by the types of `path`
        return TableDataset(
            source,
            others.columns,
            hold_out=NO_HOLD_OUT if held.path else held,
            held_out_data=others._source(held.path) if held.path else None,
            seed=self.seed,
            shuffle_rows=self.shuffle_rows,
            lanes=self.lanes,
            group_by_session=self.group_by_session,
            read_ahead_bytes=self.read_ahead_mb << 20,
            items=others._source(self.items) if self.items else None,
        )

    def as_opened(self, dataset: Dataset) -> FilesData:
        return replace(self, columns=dataset.columns) if isinstance(dataset, TableDataset) else self

    def open_rows(self, path: tuple[str, ...], *, labels: bool = True) -> TableDataset:
        """Open other files with the same columns, for `TableDataset.rows`: nothing is held out.

        Args:
            path: as the attribute, but relative paths begin at the current folder.
            labels: False for samples without labels.
        """
        other = replace(self, path=path, base="")
        return TableDataset(
            other._source(other.path),
            self.columns,
            read_ahead_bytes=self.read_ahead_mb << 20,
            labels=labels,
            items=self._source(self.items) if self.items else None,
            samples=lambda: self._source(self.path),
        )

    def _source(self, path: tuple[str, ...]) -> RowGroups:
        lists = tuple(ListColumn(column.column, column.separator) for column in self.columns.ids if column.separator)
        return file_source(path, format=self.format, base=self.base, lists=lists, id_types=self.columns.id_types)


def file_source(
    path: tuple[str, ...],
    *,
    format: Literal["auto", "parquet", "text"] = "auto",
    base: str = "",
    lists: Sequence[ListColumn] = (),
    id_types: Mapping[str, str] | None = None,
) -> RowGroups:
    """Return the row groups of files.

    Args:
        path, format, base: see `FilesData`.
        lists: of text files, the columns with several ids per field.
        id_types: of text files, the types of ids that are known, by column.
    """
    name = path[0] if path else ""
    auto_text = name.endswith(TEXT_ENDINGS) and not name.endswith(PARQUET_ENDINGS)
    if format == "text" or (format == "auto" and auto_text):
        return DelimitedGroups(path, base=base, lists=lists, id_types=id_types)
    return ParquetGroups(path, base=base)


def _as_tuple(path: object) -> tuple[str, ...]:
    """Return one path as a tuple, too: a string is the likely mistake."""
    return tuple(map(str, path)) if isinstance(path, (tuple, list)) else (str(path),)
