"""Documents: their limits, and errors that name the place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilerec import json_document
from tilerec.errors import ConfigError, FileError
from tilerec.json_document import MOST_DEPTH, JsonValue, read_json, shown


def _read(folder: Path, text: str | bytes) -> JsonValue:
    path = folder / "f.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_json(path, "File")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff\xfe", r" is not JSON: got byte 0xff at 0; expected UTF-8"),
        ("{]", r" is not JSON: got Expecting property name"),
        ("", r" is not JSON: got Expecting value"),
        ("\ufeff{}", r" is not JSON: got Unexpected UTF-8 BOM"),
        ("9" * 5000, " is not JSON: got a number of thousands of digits"),
        ("[" * 200_000, f": got lists and objects nested more than {MOST_DEPTH} deep"),
        ("[" * 65 + "1" + "]" * 65, f": got lists and objects nested more than {MOST_DEPTH} deep"),
        ('{"a": [{"b": 1, "b": 2}]}', r': a\[0\]: got "b" more than once; expected each key once'),
        ('{"a": NaN}', ": a: got nan; expected a finite number"),
        ('{"a": [-Infinity]}', r": a\[0\]: got -inf; expected a finite number"),
        ('{"a": 1e400}', ": a: got inf; expected a finite number"),
        ('{"a": ' + "1" * 400 + "}", ": a: got a whole number of about 397 digits; expected a number below"),
        ('{"a": "\\ud800"}', r': a: got "\\ud800"; expected text without half of a surrogate pair'),
        ('{"\\udfff": 1}', ": got an object with .*; expected keys without half of a surrogate pair"),
        ('{"\\u001b[31m": {"b": 1e999}}', r': \["\\u001b\[31m"\]\.b: got inf'),
    ],
)
def test_what_no_document_may_have_is_refused_with_its_place(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^File: .*f\.json{message}") as caught:
        _read(tmp_path, text)
    assert len(str(caught.value)) < 500


def test_a_file_that_is_too_large_is_not_read_to_its_end(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"f\.json: got more than 10 bytes; expected fewer"):
        json_document.read_json(_file(tmp_path), "File", most_bytes=10)
    if Path("/dev/zero").exists():
        with pytest.raises(ConfigError, match="got more than 1,000 bytes"):
            json_document.read_json("/dev/zero", "File", most_bytes=1000)


def _file(folder: Path) -> Path:
    path = folder / "f.json"
    path.write_text("[1, 2, 3, 4, 5]")
    return path


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"File: .*none\.json cannot be read: got 'No such file or directory'"):
        read_json(tmp_path / "none.json", "File")
    with pytest.raises(FileError, match="Is a directory"):
        read_json(tmp_path, "File")


def test_the_deepest_document_is_read(tmp_path: Path) -> None:
    assert _read(tmp_path, "[" * 63 + "1" + "]" * 63).items()[0].value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"), (True, "true"), (3, "3"), (2.5, "2.5"), ("a\x1b", '"a\\u001b"'), ("é", '"é"'), ([], "[]"),
        ([1, None], "[1, null]"), (list(range(9)), "a list of 9"), ([[1]], "a list of 1"), ({}, "{}"),
        ({"a": 1}, 'an object with "a"'), ("x" * 100, '"' + "x" * 80 + '…"'), (object(), "a object"),
    ],
)  # fmt: skip
def test_values_are_shown_as_json_writes_them(value: Any, text: str) -> None:
    assert shown(value) == text


def test_each_kind_refuses_the_others() -> None:
    value = JsonValue.of({"a": {"b": [True]}}, "File").members()["a"].members()["b"].items()[0]
    assert value.flag()
    for call, expected in (
        (value.whole, "a whole number from 0"),
        (value.number, "a number"),
        (value.text, "a string"),
        (value.items, "a list"),
        (value.members, "an object"),
        (value.wholes, "a list of whole numbers from 0"),
    ):
        with pytest.raises(ConfigError, match=rf"^File: a\.b\[0\]: got true; expected {expected}\. Correct the file"):
            call()
