"""Tables with attached optimizers under torch's `DistributedDataParallel`, which would let their copies drift apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward, set_sparse_grad
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.table import EmbeddingBagConfig

BATCH = KeyedJaggedTensor.from_lengths_sync(["t"], torch.tensor([1, 2]), torch.tensor([1, 1]))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection([EmbeddingBagConfig(4, 3, "t")])
        self.over = nn.Linear(3, 1)

    def forward(self) -> torch.Tensor:
        return self.over(self.tables(BATCH).values()).sum()


@pytest.fixture(params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[int]:
    """A world of so many ranks, of which this process is one and the others answer nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["attached", "sparse"])
def test_tables_without_a_dense_gradient_are_refused_in_a_world_of_several(ranks: int, how: str) -> None:
    model = Model()
    if how == "attached":
        apply_optimizer_in_backward(SGD(lr=0.1), model.tables.parameters())
    else:
        set_sparse_grad(model.tables.parameters())
    wrapped = DistributedDataParallel(model)
    if ranks == 1:
        wrapped()  # alone, nothing drifts
        return
    with pytest.raises(
        ConfigError, match=r"Table 't': got .* under DistributedDataParallel.* DistributedModelParallel"
    ):
        wrapped()
    with torch.no_grad():
        wrapped()  # evaluation moves nothing
    model().backward()  # nor does a lookup outside of the wrapper meet others


def test_unattached_tables_and_tables_that_ddp_ignores_train(ranks: int) -> None:
    DistributedDataParallel(Model())().backward()
    model = Model()
    apply_optimizer_in_backward(SGD(lr=0.1), model.tables.parameters())
    ignored = [name for name, _ in model.named_parameters() if name.startswith("tables.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    DistributedDataParallel(model)().backward()
