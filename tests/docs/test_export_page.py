"""docs/export.md: its code runs, and its options and names exist."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import tilerec.export
from tilerec.cli import app

PAGE = Path(__file__).resolve().parents[2] / "docs" / "export.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are part of the repository, not of the wheel")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="compiles a model; tests/export does so, too")
def test_the_code_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    first, second = _blocks("python")
    exec(compile(first, str(PAGE), "exec", flags=0, dont_inherit=True), scope)
    with torch.no_grad():
        assert torch.equal(scope["logits"], scope["model"](scope["dense"], scope["features"]))
    exec(compile(second, str(PAGE), "exec", flags=0, dont_inherit=True), scope)
    assert not scope["package"].weights[scope["table"].weight][3].any()


def test_options_and_names_of_the_page_exist() -> None:
    help_text = CliRunner().invoke(app, ["export", "--help"], env={"COLUMNS": "200"}).output
    for line in _blocks("sh")[0].splitlines():
        for option in re.findall(r"--[a-z-]+", line):
            assert option in help_text
    for name in ("cpp_flags", "export", "load"):
        assert f"{name}(" in PAGE.read_text()
        assert name in tilerec.export.__all__
