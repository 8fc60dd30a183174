"""Every notebook runs from its first cell to its last, and is stored without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"

pytestmark = pytest.mark.skipif(not NOTEBOOKS.exists(), reason="examples are part of the repository, not of the wheel")


def _cells(name: str) -> list[dict[str, Any]]:
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def _output(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the cells as Jupyter does, in one namespace; return the printed text."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(_cells(name)):
        assert cell["outputs"] == [], "outputs are made when the site is built"
        exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), namespace)
    return capsys.readouterr().out


def test_every_notebook_is_run_here() -> None:
    source = Path(__file__).read_text()
    assert [path.stem for path in NOTEBOOKS.glob("*.ipynb") if f'"{path.stem}"' not in source] == []


def test_outputs_do_not_depend_on_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    text = _output("sharding_on_a_laptop", capsys)
    assert text.count("largest difference") == 3
    errors = text.splitlines()[-4:]
    assert [line.split(":")[0] for line in errors] == [f"rank {rank}" for rank in range(4)]
    assert "expected ids in [0, 1000)" in errors[2], "rank 2 has the ids that no table has"


def test_a_plan_is_explored(capsys: pytest.CaptureFixture[str]) -> None:
    text = _output("explore_a_plan", capsys)
    assert "above the bound" in text
    assert text.count("times the predicted step of the free plan") == 2


def test_a_model_moves_between_steps_without_a_change_of_its_losses(capsys: pytest.CaptureFixture[str]) -> None:
    text = _output("move_a_model", capsys)
    assert "1 table moved" in text
    assert "rank 3:     0 rows, then   250" in text
