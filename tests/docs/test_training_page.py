"""The page about training: its reference is that of the code, and its example run is a run."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tilerec.recipes.files import FilesData
from tilerec.spec.optimizer import SPECS
from tilerec.train.config import RunConfig
from tilerec.train.run_file import run_of_toml

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "training.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="pages are part of the repository, not of the wheel")


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("run_file_reference", ROOT / "scripts" / "run_file_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_that_of_the_dataclasses(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text()
    for name in [name for name, spec in SPECS.items() if spec.__module__ != "tilerec.spec.optimizer"]:
        monkeypatch.delitem(SPECS, name)  # registered by a program
    assert script.replaced(page) == page, "run: python scripts/run_file_reference.py --write"


def test_fields_of_a_run_have_descriptions(script: Any) -> None:
    parts = {"name", "data", "model", "train", "log_dir", "parallel", "trace", "task", "checkpoint", "delta"}
    assert script.descriptions(RunConfig).keys() == parts
    assert set(script.descriptions(FilesData)) >= {"path", "columns", "hold_out", "lanes", "keys"}


def test_the_example_is_a_run() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    run = run_of_toml(text)
    assert isinstance(run.data, FilesData)
    assert [label.name for label in run.data.columns.labels] == ["click", "rating"]
    assert [feature.table for feature in run.data.columns.sparse_features] == ["items", "items"]
