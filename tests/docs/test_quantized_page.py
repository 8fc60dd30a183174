"""docs/quantized.md: its code runs and prints what it says, and its table of row types is that of the code."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tilerec.quantized.row_type import ROW_TYPES, row_type

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "quantized.md").read_text()


def test_the_code_runs_and_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/quantized.md", "exec"), scope)
        assert capsys.readouterr().out.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", block, re.MULTILINE)


def test_every_row_type_is_in_the_table_with_its_share() -> None:
    section = PAGE.partition("## Row types")[2].partition("\n## ")[0]
    found: dict[str, float] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        names = re.findall(r"`(\w+)`", cells[1]) if len(cells) > 5 else []
        found |= dict.fromkeys(names, float(cells[4]) if names else 0.0)
        for dtype in re.findall(r"`torch\.(\w+)`", cells[2]) if names else []:
            torch_dtype = getattr(importlib.import_module("torch"), dtype)
            assert row_type(torch_dtype).name in names
    assert found == {name: round(own.row_bytes(64) / 256, 3) for name, own in ROW_TYPES.items()}


def test_names_of_the_page_exist() -> None:
    for module, name in (("tilerec.quantized", "QuantManagedCollisionEmbeddings"), ("tilerec.compat.quantized", "")):
        assert f"`{name or module}`" in PAGE
        found = importlib.import_module(module)
        assert not name or hasattr(found, name)
    for name in ("quantize_embeddings", "quantize_inference_model"):
        assert f"`{name}`" in PAGE
        assert hasattr(importlib.import_module("tilerec.compat.quantized"), name)
