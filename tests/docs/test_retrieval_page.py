"""docs/retrieval.md: its code and its five commands run, in order, and its settings exist."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch
from typer.testing import CliRunner

from tilerec.cli import app
from tilerec.retrieval.item_index import Filters
from tilerec.retrieval.next_item_task import NextItemConfig
from tilerec.retrieval.two_tower_task import RetrievalConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "retrieval.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are part of the repository, not of the wheel")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_code_and_the_commands_run_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    data, search, module = _blocks("python")
    exec(compile(data, str(PAGE), "exec", flags=0, dont_inherit=True), scope)
    Path("run.toml").write_text(_blocks("toml")[0])
    commands = [line.partition("#")[0].split() for line in _blocks("sh")[0].splitlines()]
    assert [words[1] for words in commands] == ["train", "eval", "predict", "export-index", "export-index"]
    for words in commands:
        if "--faiss" in words:
            pytest.importorskip("faiss")
        result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, words[1:])
        assert result.exit_code == 0, result.output
        if words[1] == "eval":
            assert all(name in result.output for name in ("popularity", "EASE", "markov"))
    best = parquet.read_table("best.parquet")
    assert best.column_names == ["user_id", "rank", "item", "score"]
    exec(compile(search, str(PAGE), "exec", flags=0, dont_inherit=True), scope)
    assert len(scope["best"]) == 10
    exec(compile(module, str(PAGE), "exec", flags=0, dont_inherit=True), scope)
    assert scope["item"].shape == (2, 10)
    assert not {17, 4} & set(scope["unseen"][0].tolist())
    assert len(scope["index"]) == 201
    given = (scope["history"], Filters(excluded=scope["seen"]))
    assert torch.equal(scope["program"].module()(*given)[1], scope["unseen"])


def test_settings_of_the_tasks_that_matter_are_named() -> None:
    text = PAGE.read_text()
    for config in (RetrievalConfig, NextItemConfig):
        for field in dataclasses.fields(config):
            if field.name != "log_q_rate":
                assert field.name in text, f"{config.__name__}.{field.name}"
