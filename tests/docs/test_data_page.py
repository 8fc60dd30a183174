"""docs/data.md: its code runs from top to bottom, and the recipe in it trains."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from tilerec.data import Columns, DenseColumn, IdColumn, LabelColumn, TableRows
from tilerec.train.loop import train

PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are part of the repository, not of the wheel")


def test_the_code_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec", flags=0, dont_inherit=True), scope)
    printed = capsys.readouterr().out
    assert printed.count("torch.Size([256])") == 3
    assert printed.splitlines()[-3:] == ["256 64", "256 64", "132 33"]
    run = scope["clicks"](str(tmp_path))
    assert train(run).held_out.samples == 100


def test_every_role_and_setting_is_named() -> None:
    text = PAGE.read_text()
    for role in (LabelColumn, DenseColumn, IdColumn, TableRows, Columns):
        assert f"`{role.__name__}" in text
        for field in dataclasses.fields(role):
            assert field.name in text, f"{role.__name__}.{field.name}"
