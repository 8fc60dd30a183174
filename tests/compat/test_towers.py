"""Embedding towers with TorchRec's names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tilerec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    shard,
)
from tilerec.comms.threads import ThreadGroup
from tilerec.compat.towers import EmbeddingTower, EmbeddingTowerCollection, tower_input_params
from tilerec.errors import ConfigError, InputError
from tilerec.planner import row_wise
from tilerec.testing.virtual import run_virtual_ranks


class _Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, pooled: KeyedTensor) -> Tensor:
        return self.layer(pooled.values())  # type: ignore[no-any-return]


class _Unpooled(nn.Module):
    def forward(self, embeddings: dict[str, Tensor]) -> Tensor:
        return embeddings["b"].values().view(2, -1)


def _bags(weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", feature_names=["a"])], is_weighted=weighted)


def _towers() -> tuple[EmbeddingTower, EmbeddingTower]:
    torch.manual_seed(0)
    pooled = EmbeddingTower(_bags(), _Pooled(), torch.device("cpu"))
    unpooled = EmbeddingTower(EmbeddingCollection([EmbeddingConfig(10, 4, "u", feature_names=["b"])]), _Unpooled())
    return pooled, unpooled


def _batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.tensor([1, 2, 3, 4]), torch.ones(4).int())


def test_towers_are_joined_and_train() -> None:
    pooled, unpooled = _towers()
    found = EmbeddingTowerCollection([pooled, unpooled])(_batch())
    assert torch.equal(found, torch.cat([pooled(_batch()), unpooled(_batch())], 1))
    assert found.shape == (2, 7)
    found.sum().backward()
    assert all(parameter.grad is not None for tower in (pooled, unpooled) for parameter in tower.parameters())


def test_each_tower_takes_the_features_that_its_tables_read() -> None:
    assert tower_input_params(_bags()) == (True, False)
    assert tower_input_params(_bags(weighted=True)) == (False, True)
    assert tower_input_params(nn.Linear(1, 1)) == (True, True)
    weights = torch.tensor([0.5, 2.0])
    batch = KeyedJaggedTensor.from_lengths_sync(["a"], torch.tensor([1, 2]), torch.ones(2).int(), weights)
    pooled, _ = _towers()
    weighted = EmbeddingTower(_bags(weighted=True), nn.Identity())
    weighted.interaction.forward = lambda found: found.values()  # type: ignore[method-assign]
    found = EmbeddingTowerCollection([pooled, weighted])(_batch(), batch)
    assert torch.equal(found[:, 3:], weighted.embedding(batch).values())
    with pytest.raises(InputError, match=r"got weighted_features=None; expected the features of tower 1\. Pass them\."):
        EmbeddingTowerCollection([pooled, weighted])(_batch())
    with pytest.raises(ConfigError, match="got no towers"):
        EmbeddingTowerCollection([])


def test_sharded_towers_return_the_numbers_of_unsharded_ones() -> None:
    expected = EmbeddingTowerCollection(_towers())(_batch())
    copies = [EmbeddingTowerCollection(_towers()) for _ in range(2)]  # ranks that are threads share torch's generator

    def rank(group: ThreadGroup) -> Tensor:
        sharded = shard(copies[group.rank], row_wise(), group)
        return sharded(_batch()).detach()  # type: ignore[no-any-return]

    for found in run_virtual_ranks(2, rank):
        torch.testing.assert_close(found, expected.detach())
