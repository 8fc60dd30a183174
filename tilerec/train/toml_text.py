"""Text of a TOML document, with comments.

tomllib only reads. tomli-w writes, but without comments, and a first run file explains its guesses in them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from tilerec.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_WIDTH = 110

Comments = Mapping[str, str]
"""Comments by dotted name: `train.batch_size`, `data.columns`, `data.columns.ids[2]`."""


def toml_text(document: Mapping[str, Any], comments: Comments | None = None) -> str:
    """Return the text of nested mappings and lists of strings, numbers, bools.

    Args:
        comments: written above the setting, the table or the element of an array of tables with this dotted name.

    Raises:
        ConfigError: a value has another type.
    """
    lines: list[str] = []
    _table(lines, document, "", "", comments or {})
    return "\n".join(lines).strip("\n") + "\n"


def _table(lines: list[str], table: Mapping[str, Any], name: str, place: str, comments: Comments) -> None:
    """Append a table: its plain settings first, as TOML assigns everything below a header to that header."""
    prefix, place_prefix = (f"{name}." if name else ""), (f"{place}." if place else "")
    inner = {key: value for key, value in table.items() if _has_header(value)}
    for key, value in table.items():
        if key not in inner:
            lines += _comment(comments.get(place_prefix + key))
            lines.append(f"{_key(key)} = {_value(value, place_prefix + key)}")
    for key, value in inner.items():
        full, at = prefix + _key(key), place_prefix + key
        note = _comment(comments.get(at))
        if isinstance(value, Mapping):
            # A header without settings is needed only for an empty table.
            header = note or not value or any(not _has_header(one) for one in value.values())
            lines += ["", *note, f"[{full}]"] if header else []
            _table(lines, value, full, at, comments)
        else:
            for i, element in enumerate(value):
                lines += ["", *(() if i else note), *_comment(comments.get(f"{at}[{i}]")), f"[[{full}]]"]
                _table(lines, element, full, f"{at}[{i}]", comments)


def _has_header(value: Any) -> bool:
    """Return True for a table and for an array of tables."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _comment(text: str | None) -> list[str]:
    return [f"# {printable_line(line)}".rstrip() for line in (text or "").splitlines()]


def printable_line(line: str) -> str:
    """Return the text without control characters, which TOML forbids in comments."""
    return "".join(char if char.isprintable() else "?" for char in line)


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _value(value: Any, place: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if math.isnan(value):
            return "nan"
        return repr(value) if math.isfinite(value) else ("inf" if value > 0 else "-inf")
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (list, tuple)):
        parts = [_value(one, place) for one in value]
        line = f"[{', '.join(parts)}]"
        if len(line) + len(place) <= _WIDTH:
            return line
        return "[\n" + "".join(f"    {part},\n" for part in parts) + "]"
    raise ConfigError(f"{place}: got {type(value).__name__}; expected a value that TOML has: text, a number, a list.")


def _string(text: str) -> str:
    # JSON's escapes are those of TOML's basic strings, but TOML wants DEL escaped as well.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
