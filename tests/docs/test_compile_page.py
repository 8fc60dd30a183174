"""docs/compile.md: its example runs, and the names that it uses exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

import tilerec.parallel as parallel
import tilerec.pipelines as pipelines

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compile.md"


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_the_example_trains(one_rank: None) -> None:
    torch._dynamo.reset()
    (source,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    named: dict[str, object] = {}
    exec(
        compile(source.replace("compile_model(model)", 'compile_model(model, backend="eager")'), str(PAGE), "exec"),
        named,
    )
    model = named["model"]
    assert isinstance(model, torch.nn.Module)
    assert all(table.rows.updates == 4 for table in model.sparse_arch.embedding_bag_collection.embedding_bags.values())


def test_names_on_the_page_exist() -> None:
    text = PAGE.read_text()
    for op in re.findall(r"`(\w*sharded_lookup\w*)`", text):
        assert hasattr(torch.ops.tilerec, op)
    for name in ("TrainPipelinePT2", "TorchCompileConfig", "TrainPipelineSparseDist"):
        assert name in text
        assert hasattr(pipelines, name)
    assert hasattr(parallel, "compile_model")
