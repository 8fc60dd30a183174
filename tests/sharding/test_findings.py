"""Steps that once went wrong between ranks: each claim here was a bug that only several tables or ranks could show."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.errors import InputError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward, set_sparse_grad
from tilerec.sharding.shard_collection import shard_collection
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD
from tilerec.spec.table import EmbeddingBagConfig
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.batches import random_batch
from tilerec.testing.virtual import run_virtual_ranks

ROWS, DIM = 12, 4


def whole(weighted: bool = False) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(ROWS, DIM, name, feature_names=[f"f_{name}"]) for name in ("a", "b")],
        is_weighted=weighted,
    )


def sharded(group: Group, module: EmbeddingBagCollection, owners: dict[str, Any]) -> EmbeddingBagCollection:
    tilings = {name: Tiling.of(name, ROWS, DIM, [(0, ROWS, 0, DIM, who)]) for name, who in owners.items()}
    module = copy.deepcopy(module)
    shard_collection(module, tilings, group, group.split("route"), Topology(group.size, "cpu"))
    return module


def batch(rank: int, weighted: bool = False) -> KeyedJaggedTensor:
    return random_batch(["f_a", "f_b"], ROWS, 5, seed=rank, weighted=weighted)


@pytest.mark.parametrize("owners", [{"a": 0, "b": 0}, {"a": 1, "b": 0}, {"a": (0, 1), "b": (0, 1)}])
def test_sparse_gradients_of_several_tables_stay_apart(owners: dict[str, Any]) -> None:
    base = whole()

    def dense(group: Group) -> list[Tensor | None]:
        module = sharded(group, base, owners)
        module(batch(group.rank)).values().square().sum().backward()
        return [p.grad for p in module.parameters()]

    def sparse(group: Group) -> list[Tensor | None]:
        module = sharded(group, base, owners)
        set_sparse_grad(module.parameters())
        module(batch(group.rank)).values().square().sum().backward()
        return [None if p.grad is None else p.grad.to_dense() for p in module.parameters()]

    for want, got in zip(run_virtual_ranks(2, dense), run_virtual_ranks(2, sparse), strict=True):
        for one, other in zip(want, got, strict=True):
            if one is not None and one.numel():
                assert other is not None
                torch.testing.assert_close(other, one)


def test_a_pass_that_asks_for_other_gradients_updates_no_table() -> None:
    base = whole(weighted=True)
    apply_optimizer_in_backward(SGD(lr=1.0), base.parameters())

    def fn(group: Group) -> bool:
        module = sharded(group, base, {"a": 0, "b": 1})
        before = [p.detach().clone() for p in module.parameters()]
        features = batch(group.rank, weighted=True)
        weights = features.weights().requires_grad_()
        (grad,) = torch.autograd.grad(module(features).values().sum(), [weights])
        assert grad.shape == weights.shape
        return all(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))

    assert run_virtual_ranks(2, fn) == [True, True]


def test_a_variable_batch_without_inverse_indices_stops_every_rank_before_anything_travels() -> None:
    base = whole()

    def fn(group: Group) -> Tensor:
        module = sharded(group, base, {"a": 0, "b": 1})
        bad = KeyedJaggedTensor(
            ["f_a", "f_b"],
            torch.tensor([1, 2, 3]),
            lengths=torch.ones(3, dtype=torch.int64),
            stride_per_key_per_rank=[[1], [2]],
        )
        with pytest.raises(InputError, match=r"without inverse_indices|Rank 0 refused"):
            module(bad if group.rank == 0 else batch(1))
        return module(batch(group.rank)).values().detach()

    for rank, out in enumerate(run_virtual_ranks(2, fn)):
        torch.testing.assert_close(out, base(batch(rank)).values().detach())


def test_any_failure_of_routing_stops_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    base = whole()

    def fn(group: Group) -> str:
        module = sharded(group, base, {"a": 0, "b": 1})
        features = batch(group.rank)
        if group.rank == 0:
            features = features.to(torch.device("meta"))
        with pytest.raises((RuntimeError, InputError)) as caught:
            module(features)
        module(batch(group.rank))
        return type(caught.value).__name__

    assert run_virtual_ranks(2, fn)[1] == "InputError"


def test_a_learning_rate_written_on_one_rank_crosses_no_tables() -> None:
    """Between a forward and its backward: the next lookup would refuse it."""
    base = whole()
    for parameter in base.parameters():
        apply_optimizer_in_backward(SGD(lr=0.5), [parameter])
    everyone = {"a": (0, 1), "b": (0, 1)}

    def fn(group: Group, differ: bool) -> Tensor:
        module = sharded(group, base, everyone)
        loss = module(batch(group.rank)).values().square().sum()
        if differ and group.rank == 0:
            module.fused_optimizer.param_groups[0]["lr"] = 0.9
        loss.backward()
        return module.embedding_bags["b"].weight.detach().clone()

    same, other = run_virtual_ranks(2, fn, False), run_virtual_ranks(2, fn, True)
    for one, two in zip(same, other, strict=True):
        assert torch.equal(one, two)
