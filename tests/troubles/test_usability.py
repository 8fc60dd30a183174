"""Troubles of the field with what is allowed, installed and compiled. Numbers are threads of meta-pytorch/torchrec."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.troubles.world import KINDS, SIZE, equals_unsharded, flat, sharded
from tilerec.comms.group import Group
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.env import ShardingEnv
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.model_parallel import DistributedModelParallel
from tilerec.parallel.shard import shard
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, Adagrad, Adam, RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.spec.topology import Topology
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks

ROOT = Path(__file__).parents[2]

# ------------------------------------------ 294, 1388: one dim for all tables; 1495: dims are multiples of 4


DIMS = {"a": 1, "b": 3, "c": 8, "d": 17}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_294_and_1495_every_table_has_the_dim_it_is_given_also_1(kind: str, pooled: bool) -> None:
    base: EmbeddingBagCollection | EmbeddingCollection
    if pooled:
        base = EmbeddingBagCollection(
            [EmbeddingBagConfig(9, dim, name, feature_names=[name]) for name, dim in DIMS.items()]
        )
    else:
        base = EmbeddingCollection([EmbeddingConfig(9, dim, name, feature_names=[name]) for name, dim in DIMS.items()])
    apply_optimizer_in_backward(Adagrad(lr=0.1), list(base.parameters()))
    features = random_batch(list(DIMS), 9, 3)
    out = base(features)
    if pooled:
        assert out.length_per_key() == list(DIMS.values())
    else:
        assert [jagged.values().shape[1] for jagged in out.values()] == list(DIMS.values())
    equals_unsharded(base, kind, lambda rank, step: random_batch(list(DIMS), 9, 3, seed=9 * step + rank))


# ----------------------------------------------------------- 1591: rows that are not a multiple of the ranks


@pytest.mark.parametrize("rows", [1, 3, 5, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_1591_any_number_of_rows_lies_on_any_number_of_ranks(kind: str, rows: int) -> None:
    base = EmbeddingBagCollection([EmbeddingBagConfig(rows, 4, "t", feature_names=["f"])])
    apply_optimizer_in_backward(SGD(lr=0.1), list(base.parameters()))
    equals_unsharded(base, kind, lambda rank, step: random_batch(["f"], rows, 3, seed=4 * step + rank), steps=1)


# ------------------------------------------------------ 2268: one table, pooled here and as a sequence there


class Shared(nn.Module):
    """Items are averaged for the user's profile and read one by one by the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "items", feature_names=["bought"])])
        self.ec = EmbeddingCollection([EmbeddingConfig(9, 4, "items", feature_names=["seen"])])
        self.ec.embeddings["items"].weight = self.ebc.embedding_bags["items"].weight

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled, each = flat(self.ebc(features)), flat(self.ec(features))
        return (pooled * pooled).sum() + (each * each).sum()


@pytest.mark.parametrize("rule", [SGD(lr=0.1), RowWiseAdagrad(lr=0.1), Adam(lr=0.1)], ids=["sgd", "rows", "adam"])
def test_2268_a_table_serves_bags_and_sequences_and_moves_once_per_step(
    rule: SGD | RowWiseAdagrad | Adam,
) -> None:
    base = Shared()
    apply_optimizer_in_backward(rule, list(base.ebc.parameters()))
    whole = copy.deepcopy(base)
    dense = whole.ebc.embedding_bags["items"].weight.detach().clone().requires_grad_()
    features = random_batch(["bought", "seen"], 9, 5)
    jagged = features.to_dict()
    offsets = jagged["bought"].offsets()[:-1]
    pooled = nn.functional.embedding_bag(jagged["bought"].values(), dense, offsets, mode="sum")
    (pooled.square().sum() + dense[jagged["seen"].values()].square().sum()).backward()
    before = dense.detach().clone()
    whole(features).backward()
    moved = whole.ebc.embedding_bags["items"].weight.detach() - before
    if isinstance(rule, SGD):
        torch.testing.assert_close(moved, -0.1 * dense.grad)
    (state,) = whole.ebc.fused_optimizer.state_dict()["state"].values()
    assert int(state.get("step", 1)) == 1

    def run(group: Group) -> Tensor:
        model = copy.deepcopy(base)
        shard(model, plan=None, mesh=group, topology=Topology(SIZE, "cpu"))
        own = features if group.rank == 0 else random_batch(["bought", "seen"], 9, 0)
        (model(own) * SIZE).backward()
        return full_state_dict(model)["ec.embeddings.items.weight"]

    for got in run_virtual_ranks(SIZE, run):
        torch.testing.assert_close(got, before + moved, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------- 1888, 1890: torch.compile


class Scorer(nn.Module):
    """What a model does with the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 1))

    def forward(self, pooled: Tensor) -> Tensor:
        scores: Tensor = self.layers(pooled)
        return scores.square().sum()


# Dynamo looks for a gradient on every input, also where there is none to be had, and silences torch's own warning.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_1888_the_dense_part_of_a_sharded_model_compiles_whole() -> None:
    """In one graph without breaks, on rows that a sharded collection gave, gradients included."""
    base = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, name, feature_names=[name]) for name in ("a", "b", "c")])
    apply_optimizer_in_backward(SGD(lr=0.1), list(base.parameters()))
    scorer = Scorer()
    twin = copy.deepcopy(scorer)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    results = []

    def run(over: nn.Module) -> tuple[float, Tensor]:
        module = sharded(base, "data_parallel", ShardingEnv.from_local(1, 0).group(), None)
        total = 0.0
        for step in range(2):
            loss = over(flat(module(random_batch(["a", "b", "c"], 9, 4, seed=step))))
            loss.backward()
            total += float(loss.detach())
        (weight, *_) = full_state_dict(module).values()
        return total, weight

    for over, own in ((scorer, scorer), (compiled, twin)):
        total, weight = run(over)
        results.append((total, weight, [p.grad for p in own.parameters()]))
    (eager, graph) = results
    assert graph[0] == pytest.approx(eager[0], rel=1e-6)
    torch.testing.assert_close(graph[1:], eager[1:])


class Model(nn.Module):
    """Tables and what is made of their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(9, 4, name, feature_names=[name]) for name in ("a", "b", "c")]
        )
        self.scorer = Scorer()

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        total: Tensor = self.scorer(self.ebc(features).values())
        return total


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_1888_a_sharded_model_is_one_graph_for_all_batches() -> None:
    model = Model()
    apply_optimizer_in_backward(SGD(lr=0.1), list(model.ebc.parameters()))
    eager = copy.deepcopy(model)
    dmp = DistributedModelParallel(model, ShardingEnv.from_local(1, 0))
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(dmp, backend=graphs, dynamic=True, fullgraph=True)
    seen = []
    for step in range(4):
        features = random_batch(["a", "b", "c"], 9, 4 + step, seed=step)
        got, want = compiled(features), eager(features)
        torch.testing.assert_close(got.detach(), want.detach())
        got.backward()
        want.backward()
        seen.append(graphs.frame_count)
    assert seen == [1] * 4
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(full_state_dict(dmp.module)[name], value)


# ----------------------------------------------------------- 551, 557, 392, 1483: another package's binaries


def trained_on_two_ranks() -> list[list[list[float]]]:
    """Small tables under the planner's plan after two steps: every rank's tiles."""

    def run(group: Group) -> list[list[float]]:
        torch.manual_seed(0)
        module = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, name, feature_names=[name]) for name in ("a", "b")])
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), list(module.parameters()))
        shard(module, mesh=group, topology=Topology(2, "cpu"))
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view(p.shape))
        for step in range(2):
            y = flat(module(random_batch(["a", "b"], 9, 4, seed=2 * step + group.rank)))
            (y * y).sum().backward()
        return [p.detach().flatten().tolist() for p in module.parameters()]

    return run_virtual_ranks(2, run)


# Runs in a process of its own, in which neither other libraries nor this package's native one can be loaded.
ALONE = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("fbgemm_gpu", "torchrec", "triton"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import json
from tests.troubles.test_usability import trained_on_two_ranks
from tilerec.ops import backends

print(json.dumps([backends.NATIVE_CPU, trained_on_two_ranks()]))
"""


def test_551_training_needs_no_other_embedding_library_and_1483_no_binary_at_all() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TILEREC_NATIVE": "0"}
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, env=environment, timeout=150)
    assert done.returncode == 0, done.stderr
    native, plain = json.loads(done.stdout)
    assert not native
    for one, other in zip(plain, trained_on_two_ranks(), strict=True):
        for table, again in zip(one, other, strict=True):
            assert table == pytest.approx(again, rel=1e-5, abs=1e-6)


@pytest.mark.skipif(not (ROOT / "pyproject.toml").exists(), reason="part of the repository, not of the wheel")
def test_3439_no_dependency_is_pinned_to_one_version() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    own = text.split("dependencies = [", 1)[1].split("]", 1)[0]
    lines = [line.strip().strip('",') for line in own.splitlines() if line.strip()]
    wanted = [line.split(";")[0] for line in lines]  # without the condition on Python's version
    assert any(line.startswith("torch>=") for line in wanted)
    assert all("==" not in line and "<" not in line and "fbgemm" not in line for line in wanted)
