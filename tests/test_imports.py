"""What a fresh process imports: nothing heavy before it is needed."""

from __future__ import annotations

import subprocess
import sys

HEAVY = (
    "torch._dynamo",
    "sympy",
    "torchmetrics",
    "pyarrow",
    "tensorboard",
    "rich.progress",
    "tilerec.train.loop",
)


def _modules_after(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('modules', *sys.modules)"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_help_imports_no_data_metrics_or_training() -> None:
    found = _modules_after(
        "from typer.testing import CliRunner\n"
        "from tilerec.cli import app\n"
        "for more in ([], ['plan'], ['train']):\n"
        "    assert CliRunner().invoke(app, [*more, '--help']).exit_code == 0\n"
    )
    assert "tilerec.plan_cli" in found
    assert found.isdisjoint(HEAVY)


def test_evaluating_and_sharding_managed_collision_imports_no_compiler() -> None:
    """It took 823 modules and two seconds at the first batch."""
    found = _modules_after(
        """
import sys
import torch
from tilerec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tilerec.modules import (
    HashZchManagedCollisionModule, ManagedCollisionCollection, ManagedCollisionEmbeddingBagCollection
)
from tilerec.parallel import shard
from tilerec.testing import run_virtual_ranks

def users():
    config = EmbeddingBagConfig(num_embeddings=64, embedding_dim=4, name="user", feature_names=["user"])
    ids = HashZchManagedCollisionModule(64, "cpu", eviction_policy_name="LRU_EVICTION", total_num_buckets=2)
    collection = ManagedCollisionCollection({"user": ids}, [config])
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection([config]), collection, return_remapped_features=True
    )

def run(module):
    batch = KeyedJaggedTensor.from_lengths_sync(["user"], torch.tensor([-1, 10**18, -1]), torch.tensor([1, 0, 2]))
    for training in (True, False):
        module.train(training)
        with torch.no_grad():
            pooled, _ = module(batch)
            pooled = getattr(pooled, "wait", lambda: pooled)()

alone = users()
before = set(sys.modules)
run(alone)
assert not set(sys.modules) - before, sorted(set(sys.modules) - before)
run_virtual_ranks(2, lambda group: run(shard(users(), mesh=group)))
"""
    )
    assert found.isdisjoint({*HEAVY} - {"pyarrow"})  # tilerec.testing draws from tilerec.data
