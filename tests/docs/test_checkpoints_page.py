"""The loop of docs/checkpoints.md saves a job and continues it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tilerec.checkpoint.manager import checkpoints

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are part of the repository, not of the wheel")


def test_the_loop_of_the_page_continues_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = (
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "manager.resume" in block
    )
    text = text.replace("every=1000", "every=10")
    model = nn.Linear(3, 1)
    model.fused_optimizer = torch.optim.SGD(model.parameters())  # type: ignore[assignment]
    job: dict[str, Any] = {"model": model, "dense": torch.optim.Adam(model.parameters())}
    steps = []
    for last in ("25", "40"):
        exec(text.replace("10_000", last), job)
        steps.append([found.step for found in checkpoints("runs/a/checkpoints")])
    assert steps == [[10, 20], [30, 40]]
    assert job["found"][0] == 20
