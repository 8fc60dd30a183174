"""Errors of the readers have one form: what it is, what was got, what is expected, and the next move."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tilerec.data

FOLDER = Path(tilerec.data.__file__).parent
ERRORS = {"InputError", "ConfigError", "FileError"}


def _messages() -> Iterator[tuple[str, str]]:
    """Yield the place and the source of each error's message."""
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ERRORS and node.args:
                yield f"{path.name}:{node.lineno}", ast.unparse(node.args[0])


@pytest.mark.parametrize(("place", "message"), list(_messages()))
def test_errors_state_what_was_got_and_what_is_expected(place: str, message: str) -> None:
    assert "got " in message, place
    assert "expected " in message or "nearest(" in message, f"{place}: {message}"
