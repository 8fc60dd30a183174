"""A table's parameter: tied, assigned, swapped, saved bare; the rows and their optimizer follow it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig
from tilerec.storage.table_rows import rows_of

BATCH = KeyedJaggedTensor.from_lengths_sync(["t"], torch.tensor([1, 2, 2]), torch.tensor([2, 1]))


class Tied(nn.Module):
    """One table behind two collections, tied by the parameter."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(5, 3, "t")], device=device)
        self.ec = EmbeddingCollection([EmbeddingConfig(5, 3, "t")], device=device)
        self.ec.embeddings["t"].weight = self.ebc.embedding_bags["t"].weight
        apply_optimizer_in_backward(torch.optim.Adagrad, self.parameters(), {"lr": 0.1})

    def forward(self) -> Tensor:
        return self.ebc(BATCH).values().double().sum() + self.ec(BATCH)["t"].values().double().sum()


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def saved_and_loaded(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def is_one_attached_table(model: Tied) -> None:
    """Both collections read one leaf, and a step through both is one update of it; no dense gradient appears."""
    weight = model.ebc.embedding_bags["t"].weight
    assert model.ec.embeddings["t"].weight is weight
    rows = rows_of(weight)
    assert rows is model.ec.embeddings["t"].rows is model.ebc.embedding_bags["t"].rows
    before, updates = weight.detach().clone(), rows.updates
    model().backward()
    assert weight.grad is None
    assert rows.updates == updates + 1
    assert (weight != before).any(dim=1).tolist() == [False, True, True, False, False]
    assert rows.state["sum"].device == weight.device


@pytest.mark.parametrize(
    "change", ["none", "bf16", "double", "meta", "deepcopy", "pickle", "load", "assign", "assign-own"]
)
def test_a_tie_and_its_optimizer_stay_through(change: str) -> None:
    model = Tied("meta" if change == "meta" else None)
    if change != "meta":
        model().backward()
    if change == "bf16":
        model.to(torch.bfloat16)
    elif change == "double":
        model.double()
    elif change == "meta":
        model.to_empty(device="cpu")
        model.ebc.reset_parameters()
    elif change == "deepcopy":
        model = copy.deepcopy(model)
    elif change == "pickle":
        model = pickle.loads(pickle.dumps(model))
    elif change in ("load", "assign"):
        state = saved_and_loaded(model.state_dict())
        model.load_state_dict(state, assign=change == "assign")
    elif change == "assign-own":
        model.ebc.embedding_bags["t"].weight = nn.Parameter(torch.randn(5, 3))
    is_one_attached_table(model)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("change", ["bf16", "double", "meta", "load", "assign"])
def test_a_tie_and_its_optimizer_stay_through_with_swapped_parameters(change: str) -> None:
    model = Tied("meta" if change == "meta" else None)
    parameter = model.ebc.embedding_bags["t"].weight
    if change == "bf16":
        model.to(torch.bfloat16)
    elif change == "double":
        model.double()
    elif change == "meta":
        model.to_empty(device="cpu")
        model.ebc.reset_parameters()
    else:
        model.load_state_dict(saved_and_loaded(model.state_dict()), assign=change == "assign")
    if change != "assign":
        assert model.ebc.embedding_bags["t"].weight is parameter
    is_one_attached_table(model)


def test_bare_parameters_are_saved_as_plain_ones() -> None:
    model = Tied()
    weight = model.ebc.embedding_bags["t"].weight
    assert torch.equal(saved_and_loaded(weight), weight)
    loaded = saved_and_loaded([*model.parameters(), *model.state_dict(keep_vars=True).values()])
    assert all(type(p) is nn.Parameter and rows_of(p) is None for p in loaded)
    twin = Tied()
    twin.ebc.embedding_bags["t"].weight = loaded[0]
    is_one_attached_table(twin)
    assert not twin.ebc.embedding_bags["t"].rows.holders & model.ebc.embedding_bags["t"].rows.holders


def test_a_dropped_model_frees_its_tables_at_once_and_a_late_backward_is_harmless() -> None:
    model = Tied()
    leaf = model.ebc.embedding_bags["t"].weight
    rows, out = weakref.ref(model.ebc.embedding_bags["t"].rows), model()
    gc.disable()
    try:
        del model
        assert rows() is None
    finally:
        gc.enable()
    before = leaf.detach().clone()
    out.backward()
    assert torch.equal(leaf, before)


def test_a_weight_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    model = Tied()
    table, other = model.ec.embeddings["t"], EmbeddingBagCollection([EmbeddingBagConfig(6, 3, "other")])
    with pytest.raises(ConfigError, match=r"Table 't': got a weight of shape \(6, 3\); expected \(5, 3\)"):
        table.weight = other.embedding_bags["other"].weight
    with pytest.raises(ConfigError, match=r"Table 't': got a weight with strides \(1, 5\); expected \(3, 1\)"):
        table.weight = nn.Parameter(torch.zeros(3, 5).t())
    with pytest.raises(RuntimeError, match=r"strides \(1, 5\).*Pass weight.contiguous"):
        model.ebc.load_state_dict({"embedding_bags.t.weight": torch.zeros(3, 5).t()}, assign=True)
    is_one_attached_table(model)


def test_a_table_tied_to_a_third_leaves_the_first() -> None:
    model, third = Tied(), EmbeddingBagCollection([EmbeddingBagConfig(5, 3, "t")])
    model.ec.embeddings["t"].weight = third.embedding_bags["t"].weight
    assert model.ec.embeddings["t"].rows is third.embedding_bags["t"].rows
    assert model.ebc.embedding_bags["t"].weight is not third.embedding_bags["t"].weight
    model.ebc.embedding_bags["t"].weight = nn.Parameter(torch.zeros(5, 3))
    assert model.ec.embeddings["t"].weight is third.embedding_bags["t"].weight
