"""torch's own wrappers around models with sharded tables, and plans by the name of a sharding type."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tilerec import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    apply_optimizer_in_backward,
    shard,
)
from tilerec.comms.process import ProcessGroupComms
from tilerec.errors import ConfigError
from tilerec.parallel import full_state_dict
from tilerec.spec.plan import ShardingType
from tilerec.testing import run_ranks, run_virtual_ranks


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(101, 8, "item", feature_names=["item"])])
        self.head = nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out: Tensor = self.head(self.ebc(features).values())
        return out


def _trained(wrapper: str, plan: str, attached: bool) -> list[Tensor]:
    """Train three steps; return the table and the dense weight."""
    rank = ProcessGroupComms().rank
    features = KeyedJaggedTensor(["item"], torch.arange(10) * 3 + rank, lengths=torch.ones(10, dtype=torch.int64))
    model = _Model()
    if attached:
        apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.1})
    called: nn.Module = model
    if wrapper == "DistributedModelParallel":
        called = DistributedModelParallel(model, plan=plan, device=torch.device("cpu"))
    elif wrapper == "DistributedDataParallel":
        shard(model, plan=plan)
        called = DistributedDataParallel(model)
    else:  # the tables are sharded below the model that is wrapped
        shard(model.ebc, plan=plan)
        if wrapper == "fully_shard, nested":
            fully_shard(model.head)
        fully_shard(model)
    dense = [p for name, p in model.named_parameters() if not attached or not name.startswith("ebc")]
    optimizer = torch.optim.SGD(dense, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        called(features).square().mean().backward()
        optimizer.step()
    head = model.head.weight.detach()
    head = head.full_tensor() if hasattr(head, "full_tensor") else head
    return [*full_state_dict(model.ebc).values(), head]


def _all_wrappers() -> None:
    for plan in ("row_wise", "table_wise"):
        for attached in (True, False):
            expected = _trained("DistributedModelParallel", plan, attached)
            for wrapper in ("DistributedDataParallel", "fully_shard", "fully_shard, nested"):
                found = _trained(wrapper, plan, attached)
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one.detach(), other.detach(), msg=f"{wrapper}, {plan}, {attached}")
    tables = shard(_Model(), plan="row_wise").ebc
    with pytest.raises(ConfigError, match="got a ShardedEmbeddingBagCollection with sharded tables and no other"):
        DistributedDataParallel(tables)


def test_torchs_wrappers_train_as_distributed_model_parallel_does() -> None:
    run_ranks(2, _all_wrappers)


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "data_parallel"])
def test_a_sharding_type_is_a_plan_for_all_tables(kind: str) -> None:
    def kinds(group: object) -> set[ShardingType]:
        configs = [EmbeddingBagConfig(64, 8, name, feature_names=[name]) for name in ("a", "b", "c")]
        module = shard(EmbeddingBagCollection(configs), plan=kind, mesh=group)  # type: ignore[arg-type]
        return {sharding.kind for _, _, sharding in module.plan.tables()}

    assert run_virtual_ranks(2, kinds) == [{ShardingType(kind)}] * 2


def test_explicit_is_no_plan() -> None:
    def attempt(group: object) -> None:
        shard(_Model(), plan="explicit", mesh=group)  # type: ignore[arg-type]

    with pytest.raises(Exception, match="explicit cannot be read"):
        run_virtual_ranks(1, attempt)
