"""`to_empty` of tables: memory with initial values, so that nothing trains on garbage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tilerec.comms.group import Group
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.planner.helpers import row_wise
from tilerec.spec.optimizer import Adagrad
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.testing.virtual import run_virtual_ranks


def made(device: str) -> EmbeddingBagCollection:
    torch.manual_seed(5)
    return EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t")], device=device)


def weight(module: nn.Module) -> Tensor:
    return module.state_dict()["embedding_bags.t.weight"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_to_empty_gives_the_initial_values(device: str) -> None:
    module = made(device)
    if device == "cpu":
        module.embedding_bags["t"].weight.data.fill_(7.0)
    apply_optimizer_in_backward(Adagrad(lr=0.1), module.parameters())
    assert torch.equal(weight(nn.Sequential(module).to_empty(device="cpu")[0]), weight(made("cpu")))


def test_tied_tables_have_the_initial_values_too() -> None:
    torch.manual_seed(5)
    bags = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t")], device="meta")
    rows = EmbeddingCollection([EmbeddingConfig(9, 4, "t")], device="meta")
    rows.embeddings["t"].weight = bags.embedding_bags["t"].weight
    nn.ModuleList([bags, rows]).to_empty(device="cpu")
    assert rows.embeddings["t"].weight is bags.embedding_bags["t"].weight
    assert torch.equal(weight(bags), weight(made("cpu")))


def test_other_moves_keep_the_values() -> None:
    module = made("cpu")
    module.embedding_bags["t"].weight.data.fill_(7.0)
    assert torch.equal(weight(module.to(torch.float64)), torch.full((9, 4), 7.0, dtype=torch.float64))


def test_tiles_get_the_initial_values_of_their_place() -> None:
    want = weight(made("cpu"))
    modules = [made("cpu") for _ in range(2)]

    def run(group: Group) -> Tensor:
        module = shard(modules[group.rank], row_wise(), group)
        for leaf in module.parameters():
            leaf.data.fill_(7.0)
        return full_state_dict(module.to_empty(device="cpu"))["embedding_bags.t.weight"]

    for whole in run_virtual_ranks(2, run):
        assert torch.equal(whole, want)
