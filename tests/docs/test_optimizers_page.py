"""docs/optimizers.md: its examples run, and its tables say what the code says."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tilerec.optim.rowwise_adagrad import RowWiseAdagrad as TorchRowWiseAdagrad
from tilerec.optim.warmup import WarmupPolicy
from tilerec.spec import optimizer as spec
from tilerec.spec.optimizer import SPECS, OptimizerSpec
from tilerec.spec.torch_optimizer import from_torch

PAGE = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text()


def _section(title: str) -> str:
    return PAGE.split(f"## {title}\n")[1].split("\n## ")[0]


def _table(title: str, number: int = 0) -> list[list[str]]:
    """The body of a section's table, cell by cell."""
    tables = re.findall(r"(?:^\|.*\n)+", _section(title) + "\n", flags=re.M)
    lines = tables[number].strip().splitlines()[2:]
    return [[cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_the_examples_run_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.M | re.S):
        exec(compile(block, "docs/optimizers.md", "exec"), scope)
    assert scope["losses"][-1] < 0.8 * scope["losses"][0]
    model = scope["model"]
    assert all(parameter.grad is None for parameter in model.tables.parameters())
    assert scope["names"] == [
        "tables.embedding_bags.user.weight",
        "tables.embedding_bags.item.weight",
        "dense.over.weight",
        "dense.over.bias",
        "dense.__warmup",
    ]
    assert [group["lr"] for group in scope["optimizer"].param_groups] == [0.05, 0.01]
    assert capsys.readouterr().out == ""
    # The example's GradScaler would be taken for that of the tables of later tests.
    del model
    scope.clear()
    gc.collect()


def test_the_table_of_rules_has_the_slots_and_row_sums_of_the_specs() -> None:
    rows = {cells[0].strip("`"): cells for cells in _table("The rules")}
    specs = [cls for cls in SPECS.values() if cls.__module__ == spec.__name__]  # a program may register others
    assert set(rows) == {cls.__name__ for cls in specs}
    for name, (_, _, state, sums) in rows.items():
        cls = getattr(spec, name)
        made = cls(momentum=0.9) if name == "SGD" else cls()
        listed = re.findall(r"`(\w+)` \[(1|D)\]", state)
        assert listed == [(slot.name, "1" if slot.per == "row" else "D") for slot in made.slots], name
        assert sums.startswith(str(made.phases)), name
    assert spec.RowWiseAdagrad(max_norm=1.0).phases == 2
    assert "2 with max_norm" in rows["RowWiseAdagrad"][3]
    takes_row_step = [cls for cls in specs if "row_step" in cls().to_json()]  # type: ignore[call-arg]
    assert len(takes_row_step) == 5
    assert all(cls(row_step=True).slots[-1] == spec.Slot("step", "row") for cls in takes_row_step)  # type: ignore[call-arg]


def test_the_table_of_attachable_classes_is_what_from_torch_does() -> None:
    named = {f"torch.optim.{cls.__name__}": cls for cls in (torch.optim.SGD, torch.optim.Adagrad)}
    named |= {f"torch.optim.{cls.__name__}": cls for cls in (torch.optim.Adam, torch.optim.AdamW)}
    named["tilerec.optim.RowWiseAdagrad"] = TorchRowWiseAdagrad
    rows = _table("Attaching")
    assert [cells[0].strip("`") for cells in rows] == list(named)
    for passed, runs, refused in rows:
        cls = named[passed.strip("`")]
        assert type(from_torch(cls)).__name__ == runs.strip("`")
        for setting in re.findall(r"`(\w+)`[^;]*: only (?:off|0)", refused.replace("`, `", "`: only off; `")):
            with pytest.raises(ValueError, match=setting):
                from_torch(cls, {setting: True})
            from_torch(cls, {setting: False})
    assert type(from_torch(torch.optim.Adam, {"decoupled_weight_decay": True})) is spec.AdamW


def test_the_table_of_policies_is_complete() -> None:
    assert [cells[0].strip("`") for cells in _table("Learning rates")] == [
        "NONE",
        "CONSTANT",
        "LINEAR",
        "POLY",
        "STEP",
        "INVSQRT",
        "COSINE_ANNEALING_WARM_RESTARTS",
        "INTERPOLATE",
    ]
    assert {cells[0].strip("`") for cells in _table("Learning rates")} == set(WarmupPolicy.__members__)


def test_the_bytes_of_state_are_those_of_the_slots() -> None:
    def megabytes(made: OptimizerSpec) -> int:
        return sum(4 * torch.Size(slot.shape(10**6, 128)).numel() for slot in made.slots) // 10**6

    text = " ".join(PAGE.split())
    figures = re.search(r"row-wise Adagrad adds (\d+) MB, partial row-wise Adam (\d+) MB, Adam ([\d,]+) MB", text)
    assert figures is not None
    assert [int(figure.replace(",", "")) for figure in figures.groups()] == [
        megabytes(spec.RowWiseAdagrad()),
        megabytes(spec.PartialRowWiseAdam()),
        megabytes(spec.Adam()),
    ]
