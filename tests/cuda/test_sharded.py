"""Sharded tables on a GPU: NCCL with one rank, gloo with several ranks that share the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cuda.sizes import real
from tests.cuda.sizes import size as size_of
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.shard import shard
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import RowWiseAdagrad
from tilerec.spec.plan import ParameterSharding
from tilerec.spec.table import EmbeddingBagConfig, PoolingType
from tilerec.testing.batches import concat_batches, random_batch
from tilerec.testing.ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KEYS, ROWS, STEPS = ["a", "b", "c"], 40, 3


def model() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    module = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(ROWS, 8, "rows", feature_names=["a"]),
            EmbeddingBagConfig(ROWS, 12, "columns", feature_names=["b", "a"], pooling=PoolingType.MEAN),
            EmbeddingBagConfig(ROWS, 5, "copies", feature_names=["c"]),
        ]
    )
    apply_optimizer_in_backward(RowWiseAdagrad(lr=0.1), module.parameters())
    return module


def batch(rank: int, step: int) -> KeyedJaggedTensor:
    return random_batch(KEYS, ROWS, 3 + 2 * rank, seed=10 * step + rank)


def whole_after_training(size: int) -> list[Tensor]:
    module = model()
    for step in range(STEPS):
        out = module(concat_batches([batch(rank, step) for rank in range(size)])).values()
        out.square().sum().backward()
    return [parameter.detach() for parameter in module.parameters()]


def train_on_the_gpu() -> list[Tensor]:
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    module = model().cuda()
    ranks = list(range(size))
    shard(
        module,
        plan={
            "rows": ParameterSharding("row_wise"),
            "columns": ParameterSharding("column_wise", ranks=ranks),
            "copies": ParameterSharding("data_parallel"),
        },
    )
    for step in range(STEPS):
        out = module(batch(rank, step).to("cuda")).values()
        assert out.is_cuda
        (out.square().sum() * size).backward()
    state = module.state_dict()
    whole = [state[f"embedding_bags.{name}.weight"] for name in ("rows", "columns", "copies")]
    return [getattr(w, "full_tensor", w.clone)().cpu() for w in whole]


@pytest.mark.parametrize(("backend", "size"), [pytest.param("nccl", 1, marks=real), ("gloo", 2), ("gloo", 4)])
def test_tables_on_a_gpu_equal_those_of_one_process_on_the_cpu(backend: str, size: int) -> None:
    want = whole_after_training(size)
    with Ranks(size, backend=backend, timeout_s=size_of(60, 600)) as ranks:
        for got in ranks.run(train_on_the_gpu):
            for own, table in zip(got, want, strict=True):
                torch.testing.assert_close(own, table, rtol=0, atol=1e-5)
