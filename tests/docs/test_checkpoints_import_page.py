"""The names that docs/checkpoints-import.md gives are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

import tilerec.checkpoint
from tilerec.cli import app

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints-import.md").read_text()


def test_functions_and_options_of_the_page_exist() -> None:
    for name in set(re.findall(r"(?:import|export)_(?:dcp|torchrec)", PAGE)):
        assert name in tilerec.checkpoint.__all__
    texts = {
        command: CliRunner().invoke(app, ["checkpoint", command, "--help"], env={"COLUMNS": "200"}).output
        for command in ("import", "export")
    }
    for line in PAGE.splitlines():
        found = re.match(r"tilerec checkpoint (\w+) ", line)
        for option in re.findall(r"--[a-z-]+", line) if found else []:
            assert option in texts[found[1]], option  # type: ignore[index]
    for option in re.findall(r"`(--[a-z-]+)", PAGE):
        assert any(option in text for text in texts.values()), option
