"""A sharded step of one rank in a CUDA graph: nothing is routed, so replays go on as eager steps do, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.cuda.sizes import real, size
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import column_wise, data_parallel, row_wise
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import Adam
from tilerec.spec.table import EmbeddingBagConfig, PoolingType
from tilerec.testing.ranks import Ranks

ROWS, BATCH, LENGTH, STEPS = size(1000, 9), size(256, 3), size(10, 2), 4
NAMES = ("rows", "columns", "copies")


def module() -> Any:
    torch.manual_seed(1)
    tables = [
        EmbeddingBagConfig(ROWS, 8, "rows", feature_names=["x"]),
        EmbeddingBagConfig(ROWS, 16, "columns", feature_names=["y"], pooling=PoolingType.MEAN),
        EmbeddingBagConfig(ROWS, 4, "copies", feature_names=["z"]),
    ]
    made = EmbeddingBagCollection(tables)
    apply_optimizer_in_backward(Adam(lr=0.1, capturable=True), made.parameters())
    made = made.cuda()
    shard(made, plan={"rows": row_wise(), "columns": column_wise(ranks=[0]), "copies": data_parallel()})
    return made


def batch(step: int) -> KeyedJaggedTensor:
    """Alike in everything but ids."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (3 * BATCH * LENGTH,), generator=generator)
    return KeyedJaggedTensor(["x", "y", "z"], ids, lengths=torch.full((3 * BATCH,), LENGTH)).to("cuda")


def step(sharded: Any, features: KeyedJaggedTensor) -> Tensor:
    out: Tensor = sharded(features).values()
    out.square().sum().backward()
    return out


def rows(sharded: Any) -> list[Tensor]:
    return [parameter.detach().cpu() for parameter in sharded.parameters()]


def eager_and_replayed() -> tuple[list[Tensor], list[Tensor]]:
    """Rows after some steps, and after one eager step with replays behind it."""
    eager, captured = module(), module()
    for at in range(STEPS):
        step(eager, batch(at))
    features = batch(0)
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        step(captured, features)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured, features)
    for at in range(1, STEPS):
        features.values().copy_(batch(at).values())
        graph.replay()
    return rows(eager), rows(captured)


@pytest.mark.parametrize("backend", [pytest.param("nccl", marks=real), "gloo"])
def test_replays_of_one_ranks_step_have_the_bits_of_eager_steps(backend: str) -> None:
    with Ranks(1, backend=backend, timeout_s=size(60, 600)) as ranks:
        ((eager, replayed),) = ranks.run(eager_and_replayed)
    assert all(torch.equal(one, other) for one, other in zip(eager, replayed, strict=True))
