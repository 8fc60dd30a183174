"""The code of docs/delta.md publishes a model's states and follows them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.storage.cached_tables import ebc
from tilerec.spec.optimizer import RowWiseAdagrad

PAGE = Path(__file__).parents[2] / "docs" / "delta.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are part of the repository, not of the wheel")


def test_the_code_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    publish, budget, left_out, follow = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    job: dict[str, Any] = {"model": ebc(RowWiseAdagrad())}
    exec(publish.replace("1001", "301"), job)
    exec(budget + left_out, job)
    assert job["made"].sequence == 3
    job["writer"].publish(400)
    server: dict[str, Any] = {"model": ebc(None), "serving": True}
    exec(follow.replace("while serving", "if serving"), server)
    assert "state 4 of step 400" in capsys.readouterr().out
    for name, value in job["model"].state_dict().items():
        assert torch.equal(server["model"].state_dict()[name], value)
