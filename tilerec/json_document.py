"""JSON reader with limits on size, depth and numbers. Errors name the path of the faulty value.

Nouns
  document  the text of a file, or Python values parsed from one
  value     one part of a document, with its path in it: `plan.ebc.user.tiling[0].ranks`

A document is rejected as a whole if it is too large, nested too deeply or not UTF-8. It is also rejected if an object
repeats a key, or if a number is not finite or not below 2^63. The code that reads each kind of file checks the types
and ranges of its values.

    plan.json: plan.ebc.user.tiling[0].ranks: got null; expected ranks such as "0-7,12" or [0, 1, 2]. ...
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from tilerec.errors import ConfigError, FileError

MOST_BYTES = 2**28
"""Largest size of a file. A plan of 100,000 tables has about 30 MB."""
MOST_DEPTH = 64
MOST_NUMBER = 2**63 - 1
MOST_PIECES = 2**25
"""Most ranks and row ranges that the short forms (`"0-7"`) of one document may expand to: about 2 GB."""
_SHOWN = 80
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_FIX_FILE = "Correct the file, or write a new one."


class _DuplicateKeyObject(dict[str, Any]):
    """A JSON object in which `key` occurs more than once."""

    key: str


class _Document:
    """State shared by all values of one document: its name, expansion budget and cache."""

    __slots__ = ("memory", "pieces", "what")

    def __init__(self, what: str) -> None:
        self.what = what
        self.pieces = MOST_PIECES
        self.memory: dict[Any, Any] = {}


@final
class JsonValue:
    """A value of a document.

    Attributes:
        value: None, a bool, a number, a string, a list or a dict, as `json` returns it.
    """

    __slots__ = ("_document", "_key", "_parent", "value")

    def __init__(self, value: Any, document: _Document, parent: JsonValue | None = None, key: str | int = "") -> None:
        self.value = value
        self._document = document
        self._parent = parent
        self._key = key

    @staticmethod
    def of(data: Any, what: str) -> JsonValue:
        """Wrap a caller's Python values as a document; return a `JsonValue` unchanged.

        Args:
            what: name of the document; error messages begin with it.

        Raises:
            ConfigError: the values exceed a limit of documents.
        """
        if isinstance(data, JsonValue):
            return data
        value = JsonValue(data, _Document(what))
        _check(value)
        return value

    # Paths -------------------------------------------------------------------------------------------------------

    @property
    def where(self) -> str:
        """Name of the document and the path of this value: `Plan: plan.json: plan.ebc.user`."""
        keys: list[str | int] = []
        value = self
        while value._parent is not None:
            keys.append(value._key)
            value = value._parent
        return ": ".join(filter(None, (self._document.what, _path(reversed(keys)))))

    def error(self, expected: str, move: str = _FIX_FILE) -> ConfigError:
        """Return the error for a value that is not as expected."""
        return ConfigError(f"{self.where}: got {shown(self.value)}; expected {expected}. {move}")

    def refused(self, why: Exception) -> ConfigError:
        """Return the error for a well-formed value that later code rejects with `why`."""
        return ConfigError(f"{self.where}: {why}")

    # Types -------------------------------------------------------------------------------------------------------

    def members(self, expected: str = "an object") -> dict[str, JsonValue]:
        """Return the members of an object by key."""
        value = self.value
        if not isinstance(value, Mapping):
            raise self.error(expected)
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{self.where}: got key {shown(key)}; expected strings as keys. {_FIX_FILE}")
        return {key: JsonValue(item, self._document, self, key) for key, item in value.items()}

    def record(self, known: Sequence[str], required: Sequence[str] = (), move: str = _FIX_FILE) -> dict[str, JsonValue]:
        """Return the members of an object; raise for unknown or missing keys."""
        members = self.members(f"an object with {_join_names(required or known)}")
        unknown = [key for key in members if key not in known]
        missing = [key for key in required if key not in members]
        if unknown or missing:
            got = f"unknown {_join_names(unknown)}" if unknown else f"an object without {_join_names(missing)}"
            raise ConfigError(f"{self.where}: got {got}; expected {_join_names(known, 40)}. {move}")
        return members

    def items(self, expected: str = "a list") -> list[JsonValue]:
        """Return the items of a list."""
        value = self.value
        if not isinstance(value, (list, tuple)):
            raise self.error(expected)
        return [JsonValue(item, self._document, self, place) for place, item in enumerate(value)]

    def whole(self, least: int = 0, most: int = MOST_NUMBER) -> int:
        """Return a whole number in [least, most]."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            end = "" if most == MOST_NUMBER else f" to {most:,}"
            raise self.error(f"a whole number from {least}{end}")
        return value

    def wholes(self) -> list[Any]:
        """Return a list of whole numbers from 0; lists may be nested to any depth."""
        level: list[Any] = [self.value]
        if isinstance(self.value, (list, tuple)):
            while level:
                for item in level:
                    if type(item) is not int and not isinstance(item, (list, tuple)):
                        raise self.error(f"whole numbers from 0, and not {shown(item)} among them")
                    if type(item) is int and item < 0:
                        raise self.error(f"whole numbers from 0, and not {item} among them")
                level = [x for item in level if isinstance(item, (list, tuple)) for x in item]
            return list(self.value)
        raise self.error("a list of whole numbers from 0")

    def number(self, least: float = -math.inf, most: float = math.inf) -> float:
        """Return a finite number in [least, most]; an int stays an int."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
            start = "" if least == -math.inf else f" from {least:g}"
            raise self.error(f"a number{start}" + ("" if most == math.inf else f" to {most:g}"))
        if not math.isfinite(value):
            raise self.error("a finite number")
        return value

    def text(self, expected: str = "a string") -> str:
        """Return a string."""
        if not isinstance(self.value, str):
            raise self.error(expected)
        return self.value

    def texts(self, expected: str = "a list of strings") -> tuple[str, ...]:
        """Return a list of strings as a tuple."""
        return tuple(item.text() for item in self.items(expected))

    def flag(self) -> bool:
        """Return a bool."""
        if not isinstance(self.value, bool):
            raise self.error("true or false")
        return self.value

    # Bounds ------------------------------------------------------------------------------------------------------

    @property
    def memory(self) -> dict[Any, Any]:
        """Cache of one document: a string that occurs thousands of times is expanded once."""
        return self._document.memory

    def spend(self, pieces: int) -> None:
        """Subtract the pieces of a short form from the document's budget, before the form is expanded."""
        self._document.pieces -= pieces
        if self._document.pieces < 0:
            raise self.error(
                f"a document with at most {MOST_PIECES:,} ranks and row ranges in all",
                "Name fewer ranks or tables.",
            )


def read_json(path: str | Path, what: str, most_bytes: int = MOST_BYTES) -> JsonValue:
    """Read a JSON file as a document.

    Args:
        what: the kind of file; error messages begin with it.

    Raises:
        FileError: the file cannot be read. ConfigError: it is not JSON, or it exceeds a limit of documents.
    """
    return parse_json(read_text(path, what, most_bytes), f"{what}: {path}")


def parse_json(text: str | bytes, origin: str) -> JsonValue:
    """Return the document of a text.

    Args:
        origin: name of the document; error messages begin with it.

    Raises:
        ConfigError: it is not JSON, or it exceeds a limit of documents.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        data = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise _too_deep(origin) from None
    except UnicodeDecodeError as error:
        raise _not_utf8(error, origin) from error
    except ValueError as error:
        # `json` also raises a ValueError for a number with more digits than Python converts.
        reason = str(error) if isinstance(error, json.JSONDecodeError) else "a number of thousands of digits"
        raise ConfigError(f"{origin} is not JSON: got {reason}; expected one JSON value. {_FIX_FILE}") from error
    return JsonValue.of(data, origin)


def read_text(path: str | Path, what: str, most_bytes: int = MOST_BYTES) -> str:
    """Read the UTF-8 text of a file of at most `most_bytes` bytes.

    Raises:
        FileError: the file cannot be read. ConfigError: it is too large, or not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise FileError(
            f"{what}: {path} cannot be read: got '{error.strerror or error}'; expected a file. Check the path.",
            error.errno,
        ) from error
    if len(data) > most_bytes:
        raise ConfigError(f"{what}: {path}: got more than {most_bytes:,} bytes; expected fewer. {_FIX_FILE}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error, f"{what}: {path}") from error


def _not_utf8(error: UnicodeDecodeError, origin: str) -> ConfigError:
    return ConfigError(
        f"{origin} is not JSON: got byte 0x{error.object[error.start]:02x} at {error.start}; expected UTF-8 text. "
        f"{_FIX_FILE}"
    )


def shown(value: Any) -> str:
    """Format a value as JSON for a message; shorten long values."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of about {value.bit_length() * 3 // 10:,} digits"
    if isinstance(value, str):
        return json.dumps(value if len(value) <= _SHOWN else value[:_SHOWN] + "…", ensure_ascii=not value.isprintable())
    if isinstance(value, (list, tuple)):
        if len(value) <= 4 and all(x is None or isinstance(x, (bool, int, float, str)) for x in value):
            return f"[{', '.join(map(shown, value))}]"
        return f"a list of {len(value):,}"
    if isinstance(value, Mapping):
        return f"an object with {_join_names(list(value)[:5])}" if value else "{}"
    return repr(value) if isinstance(value, (int, float)) else f"a {type(value).__name__}"


def _join_names(names: Sequence[Any], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(shown, names[:most])) + more


def _path(keys: Iterator[str | int]) -> str:
    path = ""
    for key in keys:
        if isinstance(key, int):
            path += f"[{key}]"
        elif _PLAIN_KEY.fullmatch(key) and len(key) <= _SHOWN:
            path += f".{key}" if path else key
        else:
            path += f"[{shown(key)}]"
    return path


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    twice = _DuplicateKeyObject(found)
    keys: set[str] = set()
    for key, _ in pairs:
        if key in keys:
            twice.key = key
        keys.add(key)
    return twice


def _check(root: JsonValue) -> None:
    """Raise for values that no document may have. Works level by level, so no depth exceeds the recursion limit."""
    level: list[Any] = [root.value]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is str:
                # JSON can escape half of a surrogate pair; Python can neither print nor encode it.
                if not item.isascii() and _is_broken(item):
                    raise _first_fault(root)
            elif kind is int:
                if not -MOST_NUMBER <= item <= MOST_NUMBER:
                    raise _first_fault(root)
            elif kind is float:
                if not math.isfinite(item):
                    raise _first_fault(root)
            elif kind is dict:
                below += item.values()
                if any(not key.isascii() and _is_broken(key) for key in item if type(key) is str):
                    raise _first_fault(root)
            elif kind is _DuplicateKeyObject:
                raise _first_fault(root)
            elif isinstance(item, (list, tuple)):
                below += item
            elif isinstance(item, Mapping):
                below += item.values()
        if not below:
            return
        level = below
    raise _too_deep(root._document.what)


def _is_broken(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _first_fault(root: JsonValue) -> ConfigError:
    """Return the error for the first value that no document may have."""
    level = [root]
    while level:
        below: list[JsonValue] = []
        for value in level:
            item = value.value
            if isinstance(item, str) and _is_broken(item):
                return value.error("text without half of a surrogate pair")
            if isinstance(item, int) and not -MOST_NUMBER <= item <= MOST_NUMBER:
                return value.error("a number below 2^63")
            if isinstance(item, float) and not math.isfinite(item):
                return value.error("a finite number")
            if isinstance(item, _DuplicateKeyObject):
                return ConfigError(
                    f"{value.where}: got {shown(item.key)} more than once; expected each key once. {_FIX_FILE}"
                )
            if isinstance(item, Mapping):
                if any(isinstance(key, str) and _is_broken(key) for key in item):
                    return value.error("keys without half of a surrogate pair")
                below += [JsonValue(x, value._document, value, key) for key, x in item.items()]
            elif isinstance(item, (list, tuple)):
                below += [JsonValue(x, value._document, value, place) for place, x in enumerate(item)]
        level = below
    raise AssertionError("a fault was found before")


def _too_deep(what: str) -> ConfigError:
    return ConfigError(
        f"{what}: got lists and objects nested more than {MOST_DEPTH} deep; expected fewer levels. {_FIX_FILE}"
    )


def check_version(found: Mapping[str, JsonValue], version: int, move: str) -> None:
    """Raise unless the document has this version; a document without a version counts as this one.

    Raises:
        ConfigError: the document has another version.
    """
    given = found.get("version")
    if given is not None and (given.value != version or isinstance(given.value, bool)):
        raise given.error(f"{version}, the version that this release reads", move)
