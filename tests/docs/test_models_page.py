"""docs/models.md: its code runs, its run file is a run, and every kind has its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tilerec.recipes.model import MMoEConfig
from tilerec.train.kinds import MODEL_KINDS
from tilerec.train.run_file import run_of_toml

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="pages are part of the repository, not of the wheel")


def test_the_code_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec", flags=0, dont_inherit=True), scope)


def test_the_run_file_is_a_run_also_with_managed_ids_and_with_another_model() -> None:
    text, managed = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    run = run_of_toml(text)
    assert isinstance(run.model, MMoEConfig)
    assert run.task.weights == (1.0, 0.5)
    (line,) = re.findall(r"^managed = .*$", managed, re.MULTILINE)
    assert run_of_toml(text.replace("tower = [32]", f"tower = [32]\n{line}")).model.managed.admission_threshold == 2  # type: ignore[attr-defined]
    (other,) = re.findall(r"`\{(kind = \"dcn\".*?)\}`", PAGE.read_text())
    start, _, rest = text.partition("[model]")
    model = "\n".join(re.split(r", (?=[a-z])", other))
    assert run_of_toml(f"{start}[model]\n{model}\n[train]{rest.partition('[train]')[2]}").model.embedding_dim == 16  # type: ignore[attr-defined]


def test_every_kind_of_a_click_model_has_its_place() -> None:
    text = PAGE.read_text()
    for kind, path in MODEL_KINDS.items():
        if path.startswith("tilerec.recipes.model"):
            assert text.count(f"`{kind}`") + text.count(f'kind = "{kind}"') >= 2, kind
