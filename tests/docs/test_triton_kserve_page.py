"""docs/triton-kserve.md: its commands take the options that it shows, and its client compiles."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilerec.cli import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "triton-kserve.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are part of the repository, not of the wheel")


def test_the_options_of_the_page_exist() -> None:
    help_text = CliRunner().invoke(app, ["serve-files", "--help"], env={"COLUMNS": "200"}).output
    lines = re.findall(r"^tilerec serve-files .*$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(lines) == 2
    assert all(option in help_text for line in lines for option in re.findall(r"--[a-z-]+", line))


def test_the_client_of_the_page_is_python() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    compile(code, str(PAGE), "exec")
