"""Conversion of plain values to the types of a config's fields, for run files and for `--set`.

    TOML value   ------------------------>  fit(hint, value)  ->  value of the field
    text  ->  plain_value(hint, text)  -->  fit(hint, value)  ->  value of the field

A hint is a type hint of a frozen dataclass: bool, int, float, str, None, `Literal`, unions, tuples, sequences, mappings
of texts, other dataclasses, and base classes whose kinds have names (`kinds.py`).

Nouns
  place   the dotted name of a field in a file, such as `data.columns.ids[2].table`
  record  a frozen dataclass; in a file, a table
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tilerec.errors import ConfigError, FileError, TilerecError
from tilerec.json_document import shown
from tilerec.train.kinds import class_of_kind, has_kinds, kinds_of

_NO_FIT = object()
_LISTS = (tuple, Sequence)


def fit(hint: Any, value: Any, place: str) -> Any:
    """Return a plain value (number, text, bool, None, list, mapping) as a value of the hinted type.

    Args:
        place: the field's dotted name; errors begin with it.

    Raises:
        ConfigError: the value has another type, or a table has an unknown, a missing or an invalid field.
    """
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _fit_union(hint, value, place)
    if origin in _LISTS:
        return _fit_tuple(hint, value, place)
    if origin is Mapping:
        return _fit_mapping(hint, value, place)
    if isinstance(hint, type) and (is_dataclass(hint) or has_kinds(hint)):
        return fit_record(hint, value, place)
    fitted = _fit_scalar(hint, value)
    if fitted is _NO_FIT:
        got = repr(value) if isinstance(value, str) else shown(value)
        near = difflib.get_close_matches(str(value), _choices(hint), 1)
        move = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{place}: got {got}; expected {type_name(hint)}.{move}")
    return fitted


def _fit_scalar(hint: Any, value: Any) -> Any:
    if get_origin(hint) is Literal:
        same = [one for one in get_args(hint) if one == value and type(one) is type(value)]
        return same[0] if same else _NO_FIT
    if hint is type(None):
        # TOML has no null, so the word stands for it.
        return None if value is None or (isinstance(value, str) and value.lower() == "none") else _NO_FIT
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (int, float, str, bool):
        return value if type(value) is hint else _NO_FIT
    return value if hint is Any else _NO_FIT


def _fit_union(hint: Any, value: Any, place: str) -> Any:
    parts = sorted(get_args(hint), key=lambda part: part is not type(None))
    reasons = []
    for part in parts:
        try:
            return fit(part, value, place)
        except ConfigError as error:
            reasons.append((part, error))
    records = [error for part, error in reasons if isinstance(part, type) and _is_record(part)]
    if len(records) == 1 and isinstance(value, Mapping):
        raise records[0]
    raise ConfigError(f"{place}: got {shown(value)}; expected {type_name(hint)}.")


def _is_record(hint: type) -> bool:
    return is_dataclass(hint) or has_kinds(hint)


def _fit_tuple(hint: Any, value: Any, place: str) -> tuple[Any, ...]:
    inner = _elements(hint)
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{place}: got {shown(value)}; expected {type_name(hint)}.")
    if ... in inner:
        inner = (inner[0],) * len(value)
    if len(inner) != len(value):
        raise ConfigError(f"{place}: got {shown(value)}; expected {type_name(hint)}.")
    if any(isinstance(kind, type) and _is_record(kind) for kind in inner):
        return tuple(fit(kind, one, f"{place}[{i}]") for i, (kind, one) in enumerate(zip(inner, value, strict=True)))
    try:
        return tuple(fit(kind, one, place) for kind, one in zip(inner, value, strict=True))
    except ConfigError:
        raise ConfigError(f"{place}: got {shown(value)}; expected {type_name(hint)}.") from None


def _fit_mapping(hint: Any, value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place}: got {shown(value)}; expected {type_name(hint)}.")
    _, kind = get_args(hint)
    return {name: fit(kind, one, f"{place}.{name}") for name, one in value.items()}


def _elements(hint: Any) -> tuple[Any, ...]:
    """Return the types of the elements of a tuple, as its hint; a sequence is a tuple of any length."""
    return get_args(hint) if get_origin(hint) is tuple else (*get_args(hint), ...)


def fit_record(
    cls: type, value: Any, place: str, defaults: Mapping[str, Any] | None = None, where: str | None = None
) -> Any:
    """Return a table's values as a frozen dataclass.

    Args:
        cls: the dataclass, or a base class; then the table's `kind` selects the dataclass.
        place: dotted name of the table; "" for a whole file.
        defaults: values of fields that the table lacks, besides those of the dataclass.
    """
    at = place or "the file"
    if not isinstance(value, Mapping):
        raise ConfigError(f"{at}: got {shown(value)}; expected a table of settings.")
    given = dict(value)
    if has_kinds(cls):
        cls = class_of_kind(cls, given.pop("kind", None), place)
    known = record_fields(cls)
    for name in given:
        if name not in known:
            raise ConfigError(_unknown(name, given, cls, place))
    prefix = f"{place}." if place else ""
    hints = hints_of(cls)
    values = {name: fit(hints[name], one, prefix + name) for name, one in given.items()}
    for name, one in (defaults or {}).items():
        values.setdefault(name, one)
    for name, item in known.items():
        if name not in values and is_required(item):
            values[name] = _absent(hints[name], prefix + name, cls)
    try:
        return cls(**values)
    except FileError:
        raise
    except TilerecError as error:
        text = str(error)
        own = not place or text.startswith((f"{place}.", f"{place}:"))
        raise ConfigError(text if own else f"{place}: {text}") from error


def _absent(hint: Any, place: str, cls: type) -> Any:
    """Return the default record of an absent table; raise for a field without a default."""
    plain = isinstance(hint, type) and is_dataclass(hint) and not has_kinds(hint)
    if plain and not any(is_required(item) for item in record_fields(hint).values()):
        return hint()
    needed = [name for name, item in record_fields(cls).items() if is_required(item)]
    what = "a table" if isinstance(hint, type) and _is_record(hint) else type_name(hint)
    raise ConfigError(f"{place}: got nothing; expected {what}. Add it ({cls.__name__} needs {', '.join(needed)}).")


def _unknown(name: str, given: Mapping[str, Any], cls: type, place: str) -> str:
    prefix = f"{place}." if place else ""
    known = [*record_fields(cls), *(["kind"] if has_kinds(cls) else [])]
    near = difflib.get_close_matches(name, [one for one in known if one not in given], 1)
    near = near or difflib.get_close_matches(name, known, 1)
    hint = f"Did you mean {prefix + near[0]!r}?" if near else f"Use one of {', '.join(known)}."
    return f"{prefix}{name}: got an unknown setting; expected a setting of {cls.__name__}. {hint}"


def record_fields(cls: type) -> dict[str, Field[Any]]:
    """Return the fields of a dataclass that its constructor accepts, by name."""
    return {item.name: item for item in fields(cls) if item.init}


def is_required(item: Field[Any]) -> bool:
    """Return True if a field has no default."""
    return item.default is MISSING and item.default_factory is MISSING


def hints_of(cls: type) -> dict[str, Any]:
    """Return the type hints of a class's fields."""
    return get_type_hints(cls)


def plain_value(hint: Any, text: str) -> Any:
    """Return text as the plain value that it writes, for `fit`; text that does not fit is returned unchanged."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        # Try str last, because any text is a str.
        for part in sorted(get_args(hint), key=lambda part: part is str):
            value = plain_value(part, text)
            try:
                fit(part, value, "")
            except ConfigError:
                continue
            return value
        return text
    if origin is Literal:
        return next((choice for choice in get_args(hint) if str(choice) == text), text)
    if origin is Mapping:
        pairs = [part.partition("=") for part in text.split(",") if part.strip()]
        if not all(equals for _, equals, _ in pairs):
            return text
        return {name.strip(): plain_value(get_args(hint)[1], one.strip()) for name, _, one in pairs}
    if origin in _LISTS:
        parts = [part.strip() for part in text.strip("()[] ").split(",") if part.strip()]
        inner = _elements(hint)
        kinds: Iterable[Any] = (
            (inner[0],) * len(parts) if ... in inner else (*inner, *(str,) * (len(parts) - len(inner)))
        )
        return [plain_value(kind, part) for kind, part in zip(kinds, parts, strict=False)]
    if hint is type(None):
        return None if text.lower() in ("none", "null") else text
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            return text
    return text


def type_name(hint: Any) -> str:
    """Return the name of a hinted type in a message."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(part) for part in get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if origin is Mapping:
        return "a table of texts, such as old=new"
    if origin in _LISTS:
        inner = _elements(hint)
        if ... in inner:
            if isinstance(inner[0], type) and _is_record(inner[0]):
                return "a list of tables"
            example = ", such as 64,32" if inner[0] in (int, float) else ""
            return f"a list of {_PLURAL.get(inner[0], type_name(inner[0]))}{example}"
        return "a list of " + ", ".join(type_name(part) for part in inner)
    if isinstance(hint, type) and _is_record(hint):
        return f"a table with kind = one of {', '.join(kinds_of(hint))}" if has_kinds(hint) else "a table"
    return _SINGULAR.get(hint, str(hint))


def _choices(hint: Any) -> list[str]:
    return [str(one) for one in get_args(hint)] if get_origin(hint) is Literal else []


_SINGULAR: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "none",
}
_PLURAL: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "words"}
