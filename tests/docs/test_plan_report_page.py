"""docs/plan-report.md: its examples run one after another on a real plan, and it explains every field of the file."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from tilerec.data.ids import open_ids
from tilerec.data.statistics import FeatureStatistics, gather
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.planner.constraints import ParameterConstraints
from tilerec.planner.planner import EmbeddingShardingPlanner
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.topology import Topology

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plan-report.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are part of the repository, not of the wheel")


def test_the_examples_run_from_data_to_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [f"{i % 50},{i % 7} {i % 11}" for i in range(4_000)]
    Path("clicks.csv").write_text("\n".join(["user,tags", *lines]))
    gather(open_ids("clicks.csv", features=["user", "tags"], separator=" ")).save("stats.json")
    ebc = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(100, 8, "t_user", feature_names=["user"]),
            EmbeddingBagConfig(40, 16, "t_tags", feature_names=["tags"]),
        ],
        device=torch.device("meta"),
    )
    pictures, statistics = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    scope: dict[str, object] = {"ebc": ebc}
    exec(statistics, scope)
    constraints: dict[str, ParameterConstraints] = scope["constraints"]  # type: ignore[assignment]
    assert constraints["t_tags"].pooling_factors == (2.0,)
    assert constraints["t_user"].skew is not None
    assert constraints["t_user"].skew.distinct == 50
    planner = EmbeddingShardingPlanner(topology=Topology(2, "cpu"), batch_size=64, constraints=constraints)
    scope["plan"] = planner.plan(torch.nn.ModuleDict({"ebc": ebc}), None)
    exec(pictures, scope)
    page = Path("report.html").read_text(encoding="utf-8")
    assert "2 tables on 2 cpu ranks of 1 host, 64 samples on each rank" in page


def test_every_field_of_the_file_is_explained() -> None:
    text = PAGE.read_text()
    for field in fields(FeatureStatistics):
        assert f"`{field.name}`" in text or field.name == "distinct_error"
