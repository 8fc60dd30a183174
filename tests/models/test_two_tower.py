"""TwoTower: pooled vectors, towers, norms, and tables that features share."""

from __future__ import annotations

import pytest
import torch

from tilerec.data.batch import Batch
from tilerec.errors import ConfigError
from tilerec.models.two_tower import TwoTower, TwoTowerTrainTask
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig


def _tables() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(5, 4, "users", feature_names=["user"]),
            EmbeddingBagConfig(9, 4, "items", feature_names=["item", "history"], pooling="MEAN"),
        ]
    )


FEATURES = KeyedJaggedTensor(
    ["user", "item", "history"],
    torch.tensor([1, 4, 2, 3, 7, 8, 0]),
    lengths=torch.tensor([1, 1, 1, 1, 3, 0]),
    stride=2,
)


def test_without_layers_the_vectors_are_the_pooled_rows() -> None:
    model = TwoTower(_tables(), (), query_features=["history"], candidate_features=["item"])
    query, item = model(torch.zeros(2, 0), FEATURES)
    table = model.embedding_bag_collection.embedding_bags["items"].weight
    torch.testing.assert_close(query, torch.stack([table[[7, 8, 0]].mean(0), torch.zeros(4)]))
    torch.testing.assert_close(item, table[[2, 3]])


def test_towers_read_their_features_only() -> None:
    model = TwoTower(_tables(), (6, 3), query_features=["user", "history"], candidate_features=["item"])
    query, item = model(torch.zeros(2, 0), FEATURES)
    assert query.shape == item.shape == (2, 3)
    query[:, 0].sum().backward()
    assert all(parameter.grad is None for parameter in model.candidate_proj.parameters())
    empty = KeyedJaggedTensor(
        ["user", "item", "history"], torch.tensor([2, 3]), lengths=torch.tensor([0, 0, 1, 1, 0, 0]), stride=2
    )
    torch.testing.assert_close(model(torch.zeros(2, 0), empty)[1], item)


def test_normalised_vectors_have_length_one() -> None:
    model = TwoTower(_tables(), (3,), query_features=["user"], candidate_features=["item"], normalize=True)
    for vectors in model(torch.zeros(2, 0), FEATURES):
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))


def test_an_empty_batch_has_no_vectors() -> None:
    model = TwoTower(_tables(), (3,))
    none = KeyedJaggedTensor(
        ["user", "item", "history"], torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64),
        stride=0,
    )  # fmt: skip
    assert [one.shape for one in model(torch.zeros(0, 0), none)] == [(0, 3), (0, 3)]


def test_by_default_the_towers_read_the_first_two_features() -> None:
    """As in TorchRec's example, whose model has two tables of one feature each."""
    model = TwoTower(_tables(), (3,))
    assert (model.query_features, model.candidate_features) == (["user"], ["item"])


def test_the_train_task_has_binary_cross_entropy_of_the_inner_products() -> None:
    model = TwoTower(_tables(), (3,), query_features=["user"], candidate_features=["item"])
    labels = torch.tensor([1, 0])
    loss, (same, logits, given) = TwoTowerTrainTask(model)(Batch(torch.zeros(2, 0), FEATURES, labels))
    query, item = model(torch.zeros(2, 0), FEATURES)
    torch.testing.assert_close(logits, (query * item).sum(1).detach())
    p = logits.sigmoid()
    torch.testing.assert_close(loss.detach(), -(p[0].log() + (1 - p[1]).log()) / 2)
    assert loss.requires_grad
    assert (same.item(), given.tolist()) == (loss.item(), [1, 0])


def test_features_and_widths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"query_features=\['users'\]; expected at least one of \['user', 'item'"):
        TwoTower(_tables(), (3,), query_features=["users"])
    with pytest.raises(ConfigError, match=r"towers of 8 and 4 columns without layers"):
        TwoTower(_tables(), (), query_features=["user", "history"], candidate_features=["item"])
