"""`DistributedModelParallel`, with torch's `DistributedDataParallel` inside, compiled as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tilerec.errors import ConfigError
from tilerec.models import DLRM
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel import DefaultDataParallelWrapper, DistributedModelParallel, DMPCollection
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.testing.batches import random_batch
from tilerec.testing.ranks import Ranks
from tilerec.torch_private import fix_ddp_buckets

# Dynamo makes objects of functions of autograd while it traces them.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="half a minute: nightly")
KEYS = [f"f{i}" for i in range(4)]
SIZES = (6, 8, 1, 0, 3)


def made(wrap: Callable[[nn.Module], Any]) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    tables = EmbeddingBagCollection([EmbeddingBagConfig(20, 8, key, feature_names=[key]) for key in KEYS])
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
    model = wrap(DLRM(tables, 13, [16, 8], [16, 1]))
    dense = [p for name, p in model.named_parameters() if "embedding" not in name]
    return model, torch.optim.Adam(dense, lr=1e-2)


def two_d(model: nn.Module) -> DMPCollection:
    return DMPCollection(model, "cpu", None, dist.get_world_size(), 2, dist.group.WORLD)


def averaged(model: nn.Module) -> DMPCollection:
    """Each rank has a replica; they are averaged after every second update."""
    return DMPCollection(
        model, "cpu", None, dist.get_world_size(), 1, dist.group.WORLD, sync="average", sync_interval=2
    )  # fmt: skip


def trained(wrap: Callable[[nn.Module], Any] = DistributedModelParallel) -> int:
    """Train an eager and a compiled twin; raise unless they have the same bits. Returns the number of graphs."""
    import torch._dynamo.testing

    torch._dynamo.reset()
    eager, compiled = made(wrap), made(wrap)
    for model, _ in (eager, compiled):
        for part in model.modules():
            if isinstance(part, DistributedDataParallel):
                fix_ddp_buckets(part)  # otherwise the first backward decides their order, and so the roundings
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    forwards = eager[0], torch.compile(compiled[0], fullgraph=True, dynamic=True, backend=counter)
    rank = dist.get_rank()
    for step in range(len(SIZES)):
        size = SIZES[(step + rank) % len(SIZES)]
        generator = torch.Generator().manual_seed(10 * step + rank)
        dense_BI = torch.randn(size, 13, generator=generator)
        features = random_batch(KEYS, 20, size, seed=10 * step + rank)
        losses = []
        for forward, (model, optimizer) in zip(forwards, (eager, compiled), strict=True):
            optimizer.zero_grad()
            loss = ((forward(dense_BI, features) - 0.3) ** 2).sum()
            loss.backward()
            optimizer.step()
            if wrap is two_d:
                model.sync()
            elif wrap is averaged:
                assert model.unsynced_steps == 1 + step % 2
            losses.append(loss.detach())
        assert torch.equal(*losses), (step, losses)
    for (name, one), (_, other) in zip(eager[0].named_parameters(), compiled[0].named_parameters(), strict=True):
        assert torch.equal(one, other), name
    return int(counter.frame_count)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_wrapped_model_is_one_graph_with_the_bits_of_eager_mode(one_rank: None) -> None:
    """torch takes sizes of 1 and 0 for constants: three graphs for five sizes, without `compile_model`."""
    assert trained() == 3


def test_unused_parameters_cannot_be_found_in_a_compiled_program(one_rank: None) -> None:
    torch._dynamo.reset()
    wrapper = DefaultDataParallelWrapper(static_graph=False, find_unused_parameters=True)
    model, _ = made(lambda inner: DistributedModelParallel(inner, data_parallel_wrapper=wrapper))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with pytest.raises(ConfigError, match="find_unused_parameters"):
        compiled(torch.randn(3, 13), random_batch(KEYS, 20, 3))


def test_replicas_are_averaged_in_a_compiled_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with Ranks(2, timeout_s=300.0) as ranks:
        monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
        assert max(ranks.run(trained, averaged)) <= 4


@NIGHTLY
@pytest.mark.parametrize(("world", "wrap"), [(2, DistributedModelParallel), (4, DistributedModelParallel), (4, two_d)])
def test_ranks_have_the_bits_of_eager_mode(world: int, wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ranks(world, timeout_s=300.0) as ranks:
        monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
        assert max(ranks.run(trained, wrap)) <= 4
