"""`InteractionsData`: an interaction log, such as (user, item, time), as the data of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pyarrow as pa

from tilerec.data.file_list import FilePath
from tilerec.data.interaction_log import InteractionLog, LogColumns, read_log
from tilerec.data.interactions import Interactions, LogSplit
from tilerec.data.parquet_files import ENDINGS as PARQUET_ENDINGS
from tilerec.data.parquet_files import ParquetGroups
from tilerec.data.text_files import DelimitedGroups
from tilerec.errors import ConfigError
from tilerec.train.config import DataConfig
from tilerec.train.vocabulary_files import read_vocabularies

_DELIMITERS = {"auto": "", "comma": ",", "tab": "\t", "space": " ", "semicolon": ";"}
_LAST = LogSplit()


@dataclass(frozen=True)
class InteractionsData(DataConfig):
    """Parquet, CSV or TSV files with one interaction per row: a user, an item, and a time.

    The features are `user`, `item` (the target), `history` (the items of the user before it) and `seen` (all items of
    the user in the training part, for held-out samples). All interactions are in memory.

    Attributes:
        path: files, folders, patterns or fsspec URLs.
        user, item: columns of integers or text.
        time: column of numbers, dates or times; "": the rows of each user are in order of time.
        rating: column of numbers; "": none.
        at_least: with `rating`, rows with a lower number are left out.
        format: "auto" decides by the ending of the first path; a folder or URL without an ending is Parquet.
        names: names of the columns of text files without a header; []: the first line has them.
        delimiter: of text files; "auto" decides by the first line, between comma, tab and semicolon.
        samples: "interactions": a training sample for each interaction. "users": one for each user, with the last
            `max_length` items and the next one; for next-item tasks.
        max_length: items of a history, the last ones.
        hold_out: the held-out part. Users without training interactions are left out of it.
        vocabulary: folder with the vocabularies of an earlier run, or a checkpoint of it, to keep its rows; "": those
            of the training part.
        seed: of the order of the training samples.
        keys: as in `FilesData`; the only column is that of the user.
    """

    path: tuple[FilePath, ...]
    user: str = "user"
    item: str = "item"
    time: str = ""
    rating: str = ""
    at_least: float = 0.0
    format: Literal["auto", "parquet", "text"] = "auto"
    names: tuple[str, ...] = ()
    delimiter: Literal["auto", "comma", "tab", "space", "semicolon"] = "auto"
    samples: Literal["interactions", "users"] = "interactions"
    max_length: int = 50
    hold_out: LogSplit = _LAST
    vocabulary: FilePath = ""
    seed: int = 0
    keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        path = self.path if isinstance(self.path, (tuple, list)) else (self.path,)
        object.__setattr__(self, "path", tuple(map(str, path)))
        if self.delimiter not in _DELIMITERS:
            raise ConfigError(f"data.delimiter: got {self.delimiter!r}; expected one of {', '.join(_DELIMITERS)}.")
        if self.format not in ("auto", "parquet", "text"):
            raise ConfigError(f"data.format: got {self.format!r}; expected 'auto', 'parquet' or 'text'. Correct it.")
        if self.samples not in ("interactions", "users"):
            raise ConfigError(f"data.samples: got {self.samples!r}; expected 'interactions' or 'users'. Correct it.")

    def open(self) -> Interactions:
        return self.of_log(self.read_log(self.path), self.hold_out, self._vocabulary())

    def with_vocabulary(self, folder: Path) -> InteractionsData:
        return replace(self, vocabulary=str(folder)) if folder.is_dir() else self

    def open_catalog(self) -> Interactions:
        vocabulary = self._vocabulary()
        if vocabulary is None:
            return self.open()
        users, items = vocabulary["user"].slice(0, 0), vocabulary["item"].slice(0, 0)
        return self.of_log(InteractionLog(users, items, None, 0, "vocabulary"), LogSplit("none"), vocabulary)

    def open_rows(self, path: tuple[str, ...], *, labels: bool = True) -> Interactions:
        """Open another log: a sample per user.

        Args:
            path: as the attribute.
            labels: True: the last interaction of each user is the item, those before it the history. False: all
                interactions are the history.
        """
        vocabulary = self._vocabulary() or self.open().vocabularies()
        return self.of_log(self.read_log(path), LogSplit("none"), vocabulary, labelled=labels)

    def of_log(
        self,
        log: InteractionLog,
        hold_out: LogSplit,
        vocabulary: Mapping[str, pa.Array] | None,
        *,
        labelled: bool = True,
    ) -> Interactions:
        """Return the samples of a log, with these settings; see `Interactions`."""
        return Interactions(
            log,
            samples=self.samples,
            max_length=self.max_length,
            hold_out=hold_out,
            vocabulary=vocabulary,
            seed=self.seed,
            user_key=self.user,
            labelled=labelled,
        )

    def read_log(self, path: tuple[str, ...]) -> InteractionLog:
        """Read the log of some files with these columns."""
        columns = LogColumns(self.user, self.item, self.time, self.rating, self.at_least)
        first = path[0] if path else ""
        bare = not Path(first).suffix and not self.names
        if self.format == "parquet" or (self.format == "auto" and (first.endswith(PARQUET_ENDINGS) or bare)):
            return read_log(ParquetGroups(path), columns)
        delimiter = _DELIMITERS[self.delimiter]
        return read_log(DelimitedGroups(path, delimiter=delimiter, names=self.names), columns)

    def _vocabulary(self) -> dict[str, pa.Array] | None:
        return read_vocabularies(Path(self.vocabulary), ("user", "item")) if self.vocabulary else None
