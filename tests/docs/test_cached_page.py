"""docs/cached.md: its code runs from top to bottom, and what it names exists."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import tilerec
from tilerec.storage.cache_stats import CacheStats

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cached.md").read_text()


def test_the_code_runs_and_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/cached.md", "exec"), scope)
    said = re.search(r"# (CacheStats\(.*), \.\.\.\)", PAGE)
    assert said is not None
    assert capsys.readouterr().out.startswith(said.group(1))


def test_names_of_the_page_are_there() -> None:
    for name in re.findall(r"`tilerec\.(\w+)\(", PAGE):
        assert hasattr(tilerec, name), name
    for field in fields(CacheStats):
        assert f"`{field.name}`" in PAGE, field.name
