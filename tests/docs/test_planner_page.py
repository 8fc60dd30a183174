"""`docs/planner.md`: what it names is there, and its commands run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilerec.cli import app
from tilerec.planner import ParameterConstraints, PlanReport
from tilerec.planner.report.plan_report import TableEntry

PAGE = Path(__file__).parents[2] / "docs" / "planner.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are part of the repository, not of the wheel")


def test_the_first_lines_make_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(compile(block, str(PAGE), "exec"), {})
    assert "no plan takes less than" in capsys.readouterr().out
    assert (tmp_path / "plan.json").exists()


def test_every_figure_of_the_report_is_there() -> None:
    rows = re.findall(r"^\| (`.*?) \| ", PAGE.read_text().split("| `plan.report` |")[1].split("\n\n")[0], re.MULTILINE)
    names = [re.match(r"\w+", word) for row in rows for word in re.findall(r"`([^`]*)`", row)]
    known = {
        *dir(PlanReport),
        *PlanReport.__dataclass_fields__,
        *TableEntry.__dataclass_fields__,
        "PlanReport",
    }
    found = [match.group() for match in names if match]
    assert len(found) > 10
    assert set(found) <= known


def test_every_word_for_a_constraint_is_there() -> None:
    table = PAGE.read_text().split("| to | say |")[1].split("\n\n")[0]
    said = set(re.findall(r"`(\w+)=", table))
    assert len(said) > 8
    assert said <= set(ParameterConstraints.__dataclass_fields__)


def test_the_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # One what-if for each report: tests/planner/report/test_report.py has them all.
    monkeypatch.setattr("tilerec.planner.report.what_if.LARGE", 0)
    monkeypatch.setattr("tilerec.planner.report.what_if.FEW", 1)
    text = PAGE.read_text()
    (table,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (tmp_path / "tables.json").write_text(f"[{table}]")
    (block,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    commands = [shlex.split(re.split(r"\s{2,}", line)[0]) for line in block.strip().splitlines()]
    ran = 0
    for words in commands:
        if "stats.json" in words:
            continue  # of tilerec stats, and a topology of tilerec calibrate
        if "diff" in words:
            for name in ("a.json", "b.json"):
                (tmp_path / name).write_text((tmp_path / "plan.json").read_text())
        result = CliRunner(env={"TERM": "dumb"}).invoke(app, words[1:])
        assert result.exit_code == 0, (words, result.output)
        ran += 1
    assert ran >= 6
    assert json.loads((tmp_path / "plan.json").read_text())["world_size"] == 32
