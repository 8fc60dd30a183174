"""Roles of a data set's columns: labels, dense features, ids and their tables.

    Columns(
        labels=(LabelColumn("clicked"),),
        dense=(DenseColumn("price", transform="log"),),
        ids=(
            IdColumn("user_id", table="users"),
            IdColumn("friends", kind="list", table="users", missing="empty"),
            IdColumn("watched", kind="sequence", max_length=50),
        ),
        tables=(TableRows("users", 1_000_000), TableRows("watched", 50_000)),
    )

Glossary
    feature   a key of the batch's sparse features; by default it has the name of its column
    table     an embedding table; a feature that names none has one of its own, with the feature's name
    missing   a null, a NaN, or a null inside of a list; an empty list is a value
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tilerec.data.dataset import SparseFeature
from tilerec.data.file_list import FilePath
from tilerec.data.vocabulary import IdVocabulary
from tilerec.errors import ConfigError

IdType = Literal["auto", "integer", "text"]
"""Type of ids; "auto": that of the data."""
MISSING_ROW = 0
"""The row of missing ids where a column has `missing="row"`."""


@dataclass(frozen=True)
class LabelColumn:
    """A column of numbers that the model predicts.

    Attributes:
        column: the name in the data.
        task: name of the task; "": the column's name.
        at_least: the label is 1 for values of at least this number and 0 for others; None keeps the values.
    """

    column: str
    task: str = ""
    at_least: float | None = None

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task or self.column


@dataclass(frozen=True)
class DenseColumn:
    """A column of numbers that the model reads as they are.

    Attributes:
        column: the name in the data, and in the batch.
        transform: "log" is sign(x) log(1 + |x|), for counts; "normalize" is (x - mean) / std.
        mean, std: see `transform`.
        missing: "error" raises an error; "zero" gives 0 after the transform.
    """

    column: str
    transform: Literal["none", "log", "normalize"] = "none"
    mean: float = 0.0
    std: float = 1.0
    missing: Literal["error", "zero"] = "error"

    def __post_init__(self) -> None:
        _check_choice(f"dense column {self.column!r}: transform", self.transform, ("none", "log", "normalize"))
        _check_choice(f"dense column {self.column!r}: missing", self.missing, ("error", "zero"))
        if not (math.isfinite(self.mean) and math.isfinite(self.std) and self.std > 0):
            raise ConfigError(
                f"dense column {self.column!r}: got mean={self.mean} and std={self.std}; expected finite numbers and "
                "a std above 0. Take both from the data."
            )
        if self.transform != "normalize" and (self.mean, self.std) != (0.0, 1.0):
            raise ConfigError(
                f"dense column {self.column!r}: got mean or std with transform={self.transform!r}; expected "
                "transform='normalize'. Set it, or leave both numbers out."
            )


@dataclass(frozen=True)
class IdColumn:
    """A column of ids: integers, text, or lists of either.

    Attributes:
        column: the name in the data.
        name: the feature's name; "": the column's name.
        table: name of its table in `Columns.tables`; "": the feature's name. Columns may share a table.
        kind: "single" is one id per sample, "list" any number, and "sequence" a list in order of time.
        max_length: ids of a list to keep, the last ones; 0 keeps all. A sequence needs it.
        weights: for lists, the column with one number per id; "": no weights.
        boundaries: ascending numbers; a column of numbers then gives the number of boundaries that are <= its value,
            in [0, len(boundaries)], as the row. `Columns.tables` needs no entry for it.
        missing: "error" raises an error; "empty" leaves the id out; "row" gives it row 0, which no other id has (with
            ids="rows", it is the id 0).
        separator: in text files, the text between the ids of a list.
        multi_hot: each id becomes a bag of this many rows: its own, and others drawn by a hash of it, uniform over the
            table. It makes the load of a model with bags from data with one id per sample, as MLPerf's DLRM does.
        type: of the ids, because the text "7" and the integer 7 have different rows. "auto" takes it from the training
            data; a run keeps it for further files. "text" reads fields of text files as text, whatever they look like.
    """

    column: str
    name: str = ""
    table: str = ""
    kind: Literal["single", "list", "sequence"] = "single"
    max_length: int = 0
    weights: str = ""
    boundaries: tuple[float, ...] = ()
    missing: Literal["error", "empty", "row"] = "error"
    separator: str = ""
    multi_hot: int = 1
    type: IdType = "auto"

    def __post_init__(self) -> None:
        who = f"id column {self.column!r}"
        _check_choice(f"{who}: kind", self.kind, ("single", "list", "sequence"))
        _check_choice(f"{who}: missing", self.missing, ("error", "empty", "row"))
        _check_choice(f"{who}: type", self.type, ("auto", "integer", "text"))
        if self.boundaries and self.type != "auto":
            raise ConfigError(
                f"{who}: got type={self.type!r} with boundaries, which read numbers; expected 'auto'. Leave it out."
            )
        if self.max_length < 0 or (self.kind == "sequence" and not self.max_length):
            raise ConfigError(
                f"{who}: got max_length={self.max_length} for kind={self.kind!r}; expected at least "
                f"{1 if self.kind == 'sequence' else 0}. Set the number of latest ids to keep."
            )
        if self.kind == "single" and (self.max_length or self.weights):
            raise ConfigError(f"{who}: got max_length or weights with kind='single'; expected a list. Set kind='list'.")
        if self.multi_hot < 1 or (self.multi_hot > 1 and (self.kind != "single" or self.boundaries)):
            raise ConfigError(
                f"{who}: got multi_hot={self.multi_hot} for kind={self.kind!r}; expected at least 1, and 1 for lists "
                "and boundaries. Leave it out."
            )
        if any(not math.isfinite(edge) for edge in self.boundaries) or any(
            low >= high for low, high in zip(self.boundaries, self.boundaries[1:], strict=False)
        ):
            raise ConfigError(
                f"{who}: got boundaries={list(self.boundaries)[:20]}; expected ascending finite numbers. Sort them."
            )

    @property
    def feature(self) -> str:
        """Name of the feature."""
        return self.name or self.column

    @property
    def table_name(self) -> str:
        """Name of the table."""
        return self.table or self.feature


@dataclass(frozen=True)
class TableRows:
    """Rows of an embedding table, and the way from ids to rows.

    Attributes:
        name: of the table.
        rows: number of rows.
        ids: "hash" maps any id to a row (`hash_rows`; ids may share a row). "rows": ids are row numbers, and others
            raise an error. "managed": ids stay 64-bit hashes, and a managed-collision table assigns rows to them.
            "vocabulary": known ids have rows of their own, and all others share row 0 with missing ids.
        vocabulary: the file of `tilerec data vocabulary` with the known ids.
    """

    name: str
    rows: int
    ids: Literal["hash", "rows", "managed", "vocabulary"] = "hash"
    vocabulary: FilePath = ""

    def __post_init__(self) -> None:
        _check_choice(f"table {self.name!r}: ids", self.ids, ("hash", "rows", "managed", "vocabulary"))
        if (self.ids == "vocabulary") != bool(self.vocabulary):
            raise ConfigError(
                f"table {self.name!r}: got ids={self.ids!r} and vocabulary={self.vocabulary!r}; expected "
                "ids='vocabulary' with a file of `tilerec data vocabulary`, or neither. Set both, or leave both out."
            )
        if self.rows < 1:
            raise ConfigError(f"table {self.name!r}: got rows={self.rows}; expected at least 1. Set its size.")


@dataclass(frozen=True)
class Columns:
    """Roles of all columns that a model reads; all other columns of the data are ignored.

    Attributes:
        labels: in the order of `Batch.labels`. Click tasks need at least one; for tasks that rank items, samples with
            a first label of 0 are left out, and without labels all samples count.
        dense: in the order of `Batch.dense_features`.
        ids: in the order of the keys of `Batch.sparse_features`.
        tables: of the ids; those of columns with boundaries are optional.
        weight: column with the weight of each sample, a number of at least 0; "": all weigh the same.

    Raises:
        ConfigError: a name that occurs twice or has a mark that separates names, an id column without a table, or a
            table that no column uses.
    """

    labels: tuple[LabelColumn, ...] = ()
    dense: tuple[DenseColumn, ...] = ()
    ids: tuple[IdColumn, ...] = ()
    tables: tuple[TableRows, ...] = ()
    weight: str = ""

    def __post_init__(self) -> None:
        _check_distinct("task", (label.name for label in self.labels))
        _check_distinct("dense column", (dense.column for dense in self.dense))
        _check_distinct("feature", (column.feature for column in self.ids))
        _check_distinct("table", (table.name for table in self.tables))
        used = {column.table_name for column in self.ids}
        for table in self.tables:
            if table.name not in used:
                raise ConfigError(
                    f"columns.tables: got table {table.name!r}, which no id column uses; {nearest(table.name, used)}"
                )
        for column in self.ids:
            self._check_names(column)
            self._check_table(column)

    def _check_names(self, column: IdColumn) -> None:
        for what, name, marks in (("feature", column.feature, ",@"), ("table", column.table_name, ".,@")):
            if not name or any(mark in name for mark in marks):
                raise ConfigError(
                    f"id column {column.column!r}: got {what} name {name!r}; expected a name without "
                    f"{' or '.join(map(repr, marks))}, which separate names elsewhere. Set "
                    f"{'name' if what == 'feature' else 'table'}={plain_name(name)!r} on the column"
                    f"{'' if what == 'feature' else ', and the same name in columns.tables'}."
                )

    def _check_table(self, column: IdColumn) -> None:
        table = self._declared.get(column.table_name)
        if column.boundaries:
            wanted = len(column.boundaries) + 1 + self._first_row(column.table_name)
            if table is not None and (table.rows < wanted or table.ids != "rows"):
                raise ConfigError(
                    f"table {table.name!r}: got rows={table.rows} and ids={table.ids!r} for id column "
                    f"{column.column!r} with {len(column.boundaries)} boundaries; expected at least {wanted} rows and "
                    "ids='rows'. Leave the table out of columns.tables, or correct it."
                )
            return
        if table is None:
            raise ConfigError(
                f"id column {column.column!r}: got table {column.table_name!r}, which columns.tables lacks; "
                f"{nearest(column.table_name, self._declared)} Or add TableRows({column.table_name!r}, rows)."
            )
        if table.ids == "hash" and table.rows <= self._first_row(table.name):
            raise ConfigError(
                f"table {table.name!r}: got rows={table.rows}, and row 0 is for missing ids; expected at least 2 "
                "rows. Use a larger table."
            )
        if table.ids == "rows" and column.type == "text":
            raise ConfigError(
                f"id column {column.column!r}: got type='text' and the table {table.name!r} with ids='rows'; expected "
                "integers, which are row numbers. Set ids='hash' on the table, or leave type out."
            )
        if table.ids == "managed" and column.multi_hot > 1:
            raise ConfigError(
                f"id column {column.column!r}: got multi_hot={column.multi_hot} and the managed table {table.name!r}; "
                "expected a table with fixed rows. Set ids='hash' or 'vocabulary' on it."
            )

    @cached_property
    def vocabularies(self) -> dict[str, IdVocabulary]:
        """The vocabularies of tables that have one, by table; read from their files at the first access.

        Raises:
            InputError: a file cannot be read.
            ConfigError: a table has fewer rows than its vocabulary needs.
        """
        found = {table.name: IdVocabulary.read(table.vocabulary) for table in self.tables if table.vocabulary}
        for name, vocabulary in found.items():
            if self._declared[name].rows < vocabulary.num_rows:
                raise ConfigError(
                    f"table {name!r}: got rows={self._declared[name].rows:,} for a vocabulary of "
                    f"{len(vocabulary.hashes):,} ids; expected at least {vocabulary.num_rows:,}, with row 0. Set "
                    f"rows={vocabulary.num_rows}."
                )
        return found

    @cached_property
    def _declared(self) -> dict[str, TableRows]:
        return {table.name: table for table in self.tables}

    @cached_property
    def _with_missing_row(self) -> frozenset[str]:
        return frozenset(column.table_name for column in self.ids if column.missing == "row")

    def _first_row(self, table: str) -> int:
        """Return the number of rows in front of those of ids: 1 if a column of the table maps missing ids to row 0."""
        return int(table in self._with_missing_row)

    def table_of(self, column: IdColumn) -> TableRows:
        """Return the table of an id column."""
        name = column.table_name
        if name in self._declared:
            return self._declared[name]
        edges = max(len(other.boundaries) for other in self.ids if other.table_name == name)
        return TableRows(name, edges + 1 + self._first_row(name), "rows")

    def first_row(self, column: IdColumn) -> int:
        """Return the first row for ids of this column's table; 1 if row 0 is for missing ids."""
        return self._first_row(column.table_name)

    @property
    def sparse_features(self) -> tuple[SparseFeature, ...]:
        """The features, as a `Dataset` lists them."""
        return tuple(
            SparseFeature(
                column.feature,
                self.table_of(column).rows,
                table=column.table_name,
                weighted=bool(column.weights),
                managed=self.table_of(column).ids == "managed",
                max_length=column.max_length,
            )
            for column in self.ids
        )

    @property
    def id_types(self) -> dict[str, IdType]:
        """The type of the ids by column, where it is known."""
        return {column.column: column.type for column in self.ids if column.type != "auto"}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all columns to read, each once."""
        wanted = [
            *(label.column for label in self.labels),
            *(dense.column for dense in self.dense),
            *(name for column in self.ids for name in (column.column, column.weights) if name),
            *((self.weight,) if self.weight else ()),
        ]
        return tuple(dict.fromkeys(wanted))


def plain_name(name: str) -> str:
    """Return a name that any feature or table may have: `user.id` becomes `user_id`."""
    return re.sub(r"[.,@]", "_", name) or "_"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return what was expected and the next move: the known name that is most similar, or all of them."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    if near:
        return f"expected a known name; did you mean {near[0]!r}?"
    shown = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    return f"expected one of {shown}." if names else "expected a known name, and there are none."


def _check_choice(what: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{what}: got {value!r}; {nearest(str(value), choices)} Use one of {list(choices)}.")


def _check_distinct(what: str, names: Iterable[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ConfigError(f"columns: got {what} {twice[0]!r} more than once; expected each once. Rename one.")
