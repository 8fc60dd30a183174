"""docs/managed-collision.md: its code runs from top to bottom, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tilerec.modules.evict import HashZchEvictionPolicyName
from tilerec.modules.hash_zch import HashZchManagedCollisionModule

PAGE = Path(__file__).resolve().parents[2] / "docs" / "managed-collision.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are part of the repository, not of the wheel")


def test_the_code_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    scope: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)
    assert "rows taken" in capsys.readouterr().out


def test_every_policy_is_in_the_table() -> None:
    text = PAGE.read_text()
    assert all(f"`{name.value}`" in text for name in HashZchEvictionPolicyName)


def test_the_message_it_quotes_is_the_message() -> None:
    with pytest.raises(ValueError) as caught:
        HashZchManagedCollisionModule(1000)
    quoted = re.search(r"`(got 1000 rows in 768 buckets[^`]*)`", PAGE.read_text())
    assert quoted is not None
    assert quoted[1] in str(caught.value)
