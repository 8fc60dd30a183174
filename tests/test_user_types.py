"""A user's program passes mypy --strict, and the types that it sees are the ones that it gets."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import torch
from typing_extensions import assert_type

import tilerec
from tilerec import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    ShardingPlan,
    shard,
)
from tilerec.optim import RowWiseAdagrad


def train(features: KeyedJaggedTensor) -> torch.Tensor:
    bags = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item", feature_names=["item"])], device="meta")
    tilerec.apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.05})
    assert_type(shard(bags), EmbeddingBagCollection)
    assert_type(bags.plan, ShardingPlan)
    assert_type(bags(features), KeyedTensor)
    rows = EmbeddingCollection([EmbeddingConfig(10, 4, "word", feature_names=["word"])])
    assert_type(rows(features), dict[str, JaggedTensor])
    model = DistributedModelParallel(bags)
    assert_type(model.plan, ShardingPlan)
    assert_type(model(features), KeyedTensor)
    return model(features).values()


def wrap(model: torch.nn.Module) -> DistributedModelParallel:
    return DistributedModelParallel(model)
"""


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy: pip install 'tilerec[dev]'")
def test_a_program_of_a_user_passes_mypy_strict(tmp_path: Path) -> None:
    program, wrong = tmp_path / "program.py", tmp_path / "wrong.py"
    program.write_text(PROGRAM)
    wrong.write_text(PROGRAM.replace("assert_type(bags.plan, ShardingPlan)", "bags.plan.no_such_name"))
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "--config-file", ""]
    for file, code in ((program, 0), (wrong, 1)):
        done = subprocess.run([*command, str(file)], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
    assert "no_such_name" in done.stdout
