"""Checks of a source's columns against their roles, before any row is read."""

from __future__ import annotations

from collections.abc import Sequence

from tilerec.data.arrow_values import kind_of
from tilerec.data.columns import Columns, nearest
from tilerec.data.fields import wanted_kinds
from tilerec.data.row_groups import RowSource
from tilerec.data.sample_table import is_unknown
from tilerec.errors import ConfigError, InputError


def check_source(source: RowSource, columns: Columns, *, labels: bool = True, session: str = "") -> None:
    """Check that the source has every column of a role, of a fitting type, and the same in all files.

    Args:
        labels: False leaves the label columns out.
        session: a further column that must exist; "": none.

    Raises:
        ConfigError: a column does not exist; the message has the nearest name.
        InputError: a column of a wrong type, or files with different schemas.
    """
    unread = set() if labels else {label.column for label in columns.labels}
    wanted = [entry for entry in wanted_kinds(columns) if entry[0] not in unread]
    for name, role, kinds in wanted:
        check_exists(source, name, role)
        kind = source.schema.field(name).type
        if source.sampled and is_unknown(kind):
            continue
        if kind_of(kind) not in kinds:
            raise _wrong_kind(source, columns, name, role, kinds)
    if session:
        check_exists(source, session, "group_by_session column")
    source.check_columns(list(dict.fromkeys([*(name for name, _, _ in wanted), *([session] if session else [])])))


def check_id_types(source: RowSource, columns: Columns) -> None:
    """Raise `InputError` if ids of the source have another type than the roles state; it may lack columns."""
    for name, role, kinds in wanted_kinds(columns):
        if role != "id column" or name not in columns.id_types or source.schema.names.count(name) != 1:
            continue
        kind = source.schema.field(name).type
        if not (source.sampled and is_unknown(kind)) and kind_of(kind) not in kinds:
            raise _wrong_kind(source, columns, name, role, kinds)


def check_exists(source: RowSource, name: str, role: str) -> None:
    """Raise unless the source has the column once."""
    count = source.schema.names.count(name)
    if not count:
        raise ConfigError(
            f"{source.name}: got {role} {name!r}, which is not there; {nearest(name, source.schema.names)}"
        )
    if count > 1:
        raise InputError(f"{source.name}: got column {name!r} {count} times; expected it once. Rename one.")


def _wrong_kind(source: RowSource, columns: Columns, name: str, role: str, kinds: Sequence[str]) -> InputError:
    kind = source.schema.field(name).type
    any_type = ("integer", "text", "boolean")
    inner, found_inner = kinds[0].removeprefix("list of "), kind_of(kind).removeprefix("list of ")
    same_form = kinds[0].startswith("list of ") == kind_of(kind).startswith("list of ")
    if role == "id column" and name in columns.id_types and same_form and found_inner in any_type:
        move = f"Store them as {inner}s, as in the data that the run trains on: others have other rows."
    else:
        move = _next_move(kind_of(kind), kinds)
    return InputError(
        f"{source.name}: {role} {name!r}: got {'text' if str(kind) == 'binary' else kind}; expected "
        f"{' or '.join(kinds)}. {move}"
    )


def _next_move(kind: str, kinds: Sequence[str]) -> str:
    if f"list of {kind}" in kinds:
        return "Set kind='single' on the column, or store lists."
    if kind.startswith("list of ") and kind.removeprefix("list of ") in kinds:
        return "Set kind='list' on the column, if it holds ids."
    if kind == "number" and "integer" in kinds:
        return "Store ids as integers or text, or set boundaries on the column."
    if kind == "text" and "integer" in kinds and "number" not in kinds:
        return "Set ids='hash' on its table, or store row numbers."
    return "Choose another column, or convert it."
