"""What rows count, and what they say about gradients that go past them."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch

from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import Adam
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.storage.hyper_group import HyperGroup
from tilerec.storage.table_rows import NonFiniteGradientError, rows_of

BATCH = KeyedJaggedTensor.from_lengths_sync(["t"], torch.tensor([1, 2]), torch.tensor([1, 1]))


def attached(**kwargs) -> EmbeddingBagCollection:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(4, 3, "t")])
    apply_optimizer_in_backward(Adam(lr=0.1, **kwargs), ebc.parameters())
    return ebc


def test_an_update_that_failed_is_not_counted() -> None:
    ebc = attached()
    table = ebc.embedding_bags["t"]
    whole = table.rows.state["exp_avg"]
    table.rows.state["exp_avg"] = torch.zeros(2, 3)  # the op refuses it
    with pytest.raises(Exception, match=r"slot|shape"):
        ebc(BATCH).values().sum().backward()
    assert table.rows.updates == 0
    table.rows.state["exp_avg"] = whole
    ebc(BATCH).values().sum().backward()
    assert table.rows.updates == 1
    torch.testing.assert_close(table.rows.state["exp_avg"][1], torch.full((3,), 0.1))


def test_an_update_that_left_out_rows_is_counted() -> None:
    ebc = attached()
    scale = torch.tensor([[float("inf")], [1.0]])
    with pytest.raises(NonFiniteGradientError, match="row 1 is not finite"):
        (ebc(BATCH).values() * scale).sum().backward()
    assert ebc.embedding_bags["t"].rows.updates == 1
    assert ebc.embedding_bags["t"].rows.state["exp_avg"][2].all()


def test_a_dense_gradient_that_nobody_steps_is_told_once() -> None:
    ebc = attached()
    weight = ebc.embedding_bags["t"].weight
    with pytest.warns(
        UserWarning, match=r"Table 't': its weight has a \.grad, which the attached Adam does not read"
    ):
        (ebc(BATCH).values().sum() + (weight**2).sum()).backward()
    assert weight.grad is not None
    assert ebc.embedding_bags["t"].rows.updates == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (ebc(BATCH).values().sum() + (weight**2).sum()).backward()


def test_rows_are_found_by_their_own_parameter_alone() -> None:
    ebc = attached()
    weight = ebc.embedding_bags["t"].weight
    assert rows_of(weight) is ebc.embedding_bags["t"].rows
    for stranger in (
        weight.detach(),
        copy.deepcopy(weight),
        pickle.loads(pickle.dumps(weight)),
        torch.zeros(1),
    ):
        assert rows_of(stranger) is None


def test_a_copied_group_keeps_additions_and_its_check() -> None:
    group = HyperGroup.of(Adam(lr=0.1))
    group["initial_lr"] = 0.5
    for twin in (copy.deepcopy(group), pickle.loads(pickle.dumps(group))):
        assert dict(twin) == dict(group)
        twin["lr"] = 0.2
        assert twin.spec() == Adam(lr=0.2)
    assert group.spec() == Adam(lr=0.1)
