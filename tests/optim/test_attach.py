"""Attaching optimizers: to tables, to dense layers, again, and the face over them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward, restore_optimizers_on_error, set_sparse_grad
from tilerec.optim.fused import FusedOptimizer, attached_rows
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.optimizer import SGD, Adam, RowWiseAdagrad
from tilerec.spec.table import EmbeddingBagConfig


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(6, 4, name) for name in ("a", "b")])
        self.dense = nn.Linear(8, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        return self.dense(self.ebc(kjt).values()).sum()


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.tensor([1, 2, 3]), torch.tensor([1, 0, 1, 1]))


def test_every_parameter_may_be_attached_tables_and_dense_alike() -> None:
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    before = copy.deepcopy(model.state_dict())
    model(batch()).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [name for name, _ in attached_rows(model)] == [
        "ebc.embedding_bags.a.weight",
        "ebc.embedding_bags.b.weight",
    ]


def test_tables_attached_together_share_a_group_others_have_their_own() -> None:
    model = Model()
    a, b = model.ebc.parameters()
    apply_optimizer_in_backward(torch.optim.SGD, [a], {"lr": 0.1})
    apply_optimizer_in_backward(torch.optim.Adagrad, [b], {"lr": 0.2})
    groups = model.ebc.fused_optimizer.param_groups
    assert [g["lr"] for g in groups] == [0.1, 0.2]
    assert groups[0]["params"][0] is a
    apply_optimizer_in_backward(torch.optim.SGD, [a, b], {"lr": 0.3}, replace=True)
    groups = model.ebc.fused_optimizer.param_groups
    assert len(groups) == 1
    assert len(groups[0]["params"]) == 2


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_keeps_the_sharing_of_groups(copier) -> None:
    model = Model()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), {"lr": 0.1})
    twin = copier(model)
    groups = twin.ebc.fused_optimizer.param_groups
    assert len(groups) == 1
    assert all(p is q for p, q in zip(groups[0]["params"], twin.ebc.parameters(), strict=True))


def test_a_second_optimizer_for_a_table_is_refused_and_the_first_goes_on() -> None:
    model = Model()
    a, b = model.ebc.parameters()
    apply_optimizer_in_backward(Adam(lr=0.1), [a])
    with pytest.raises(ConfigError, match=r"Table 'a': got SGD, but Adam is already attached.* pass replace=True"):
        apply_optimizer_in_backward(SGD(lr=0.1), [b, a])
    assert list(model.ebc.fused_optimizer.params) == ["embedding_bags.a.weight"]


def test_replacing_an_optimizer_starts_with_fresh_state() -> None:
    model = Model()
    apply_optimizer_in_backward(Adam(lr=0.1), model.ebc.parameters())
    model(batch()).backward()
    other = RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.5)
    apply_optimizer_in_backward(other, model.ebc.parameters(), replace=True)
    state = model.ebc.fused_optimizer.state_dict()["state"]["embedding_bags.a.weight"]
    assert set(state) == {"sum", "step"}
    assert torch.equal(state["sum"], torch.full((6,), 0.5))
    assert int(state["step"]) == 0


def test_a_row_step_slot_and_the_update_count_do_not_collide() -> None:
    model = Model()
    apply_optimizer_in_backward(Adam(lr=0.1, row_step=True), model.ebc.parameters())
    model(batch()).backward()
    state = model.ebc.fused_optimizer.state_dict()["state"]["embedding_bags.b.weight"]
    assert state["step"].tolist() == [0, 0, 1, 1, 0, 0]
    assert int(state["updates"]) == 1


def test_the_face_of_nothing_is_empty_and_steps() -> None:
    face = FusedOptimizer(nn.Linear(2, 2))
    assert face.param_groups == []
    assert face.state_dict()["state"] == {}
    face.step()


def test_every_number_written_to_a_group_holds_and_is_checked() -> None:
    model = Model()
    apply_optimizer_in_backward(torch.optim.AdamW, model.ebc.parameters(), {"lr": 0.0, "weight_decay": 0.0})
    group = model.ebc.fused_optimizer.param_groups[0]
    before = copy.deepcopy(model.ebc.state_dict())
    model(batch()).backward()
    assert all(torch.equal(value, before[name]) for name, value in model.ebc.state_dict().items())
    group["lr"], group["weight_decay"] = 1.0, 1.0  # w *= 1 - lr * weight_decay: touched rows begin at zero
    model(batch()).backward()
    assert model.ebc.embedding_bags["a"].weight[1].abs().max() < 1.5
    assert not torch.equal(model.ebc.embedding_bags["a"].weight[1], before["embedding_bags.a.weight"][1])
    group["weight_decay"] = -1.0
    with pytest.raises(ConfigError, match="got weight_decay=-1"):
        model(batch()).backward()
    group["weight_decay"], group["row_step"] = 0.0, True
    with pytest.raises(ConfigError, match="Attach it again"):
        model(batch()).backward()
    with pytest.raises(ConfigError, match="got a param group; expected only parameters that the backward pass updates"):
        model.ebc.fused_optimizer.add_param_group({"params": []})


def test_a_group_shared_by_two_collections_shows_each_its_own_tables() -> None:
    model = Model()
    other = EmbeddingBagCollection([EmbeddingBagConfig(5, 2, "c")])
    apply_optimizer_in_backward(torch.optim.SGD, [*model.ebc.parameters(), *other.parameters()], {"lr": 0.1})
    first, second = model.ebc.fused_optimizer, other.fused_optimizer
    assert [list(group["params"]) for group in second.param_groups] == [list(other.parameters())]
    assert all(a is b for a, b in zip(first.param_groups[0]["params"], model.ebc.parameters(), strict=True))
    first.save_param_groups(True)
    names = first.state_dict()["param_groups"][0]["params"]
    assert names == ["embedding_bags.a.weight", "embedding_bags.b.weight"]
    first.param_groups[0]["lr"] = 0.7
    assert second.param_groups[0]["lr"] == 0.7
    assert "lr: 0.7" in repr(second)
    group = second.param_groups[0]
    group["initial_lr"] = 1.0
    assert set(group) == {"params", "initial_lr", *first.param_groups[0]}
    del group["initial_lr"]
    assert len(group) == len(dict(group)) == len(first.param_groups[0])


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (
            lambda model: model.ebc,
            "got a EmbeddingBagCollection; expected its parameters. Pass module.parameters",
        ),
        (
            lambda model: model.dense.weight,
            r"got one parameter of shape \(1, 8\); expected a list of them. Pass \[parameter\]",
        ),
        (
            lambda model: dict(model.named_parameters()),
            r"got a dict of parameters; expected a list. Pass its \.values\(\)",
        ),
        (lambda model: model.named_parameters(), "got pairs, as of module.named_parameters"),
        (lambda model: iter([]), "got no parameters .a generator is empty after its first use"),
        (lambda model: 3, "got a int; expected parameters. Pass module.parameters"),
        (lambda model: [model.dense.weight, "a"], "got a str among the parameters"),
        (lambda model: [model.dense.weight.detach()], "got a Tensor among the parameters"),
    ],
)
def test_what_is_no_list_of_parameters_is_refused(give, message: str) -> None:
    model = Model()
    with pytest.raises(ConfigError, match=message):
        apply_optimizer_in_backward(torch.optim.SGD, give(model), {"lr": 0.1})
    assert list(attached_rows(model)) == []


def test_a_rule_for_tables_is_refused_for_dense_parameters() -> None:
    model = Model()
    with pytest.raises(ConfigError, match=r"Adam\(.*with 2 parameters outside tables"):
        apply_optimizer_in_backward(Adam(lr=0.1), model.parameters())
    assert list(attached_rows(model)) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"amsgrad": True}, "got amsgrad=True; expected"),
        ({"maximize": True}, "got maximize=True; expected"),
        ({"differentiable": True}, "got differentiable=True; expected"),
        ({"betas2": 0.9}, "has no setting 'betas2'"),
        ({"lr": "fast"}, "lr"),
        ({"foreach": True, "fused": None, "capturable": True, "amsgrad": False}, None),
    ],
)
def test_settings_of_adam_map_or_are_named(setting, message: str | None) -> None:
    model = Model()
    if message is None:
        apply_optimizer_in_backward(torch.optim.Adam, model.ebc.parameters(), setting)
        assert len(list(attached_rows(model))) == 2
        return
    with pytest.raises(ConfigError, match=message):
        apply_optimizer_in_backward(torch.optim.Adam, model.ebc.parameters(), setting)


def test_wrong_requests_are_refused() -> None:
    model = Model()
    with pytest.raises(ConfigError, match="amsgrad"):
        apply_optimizer_in_backward(torch.optim.Adam, model.ebc.parameters(), {"amsgrad": True})
    with pytest.raises(TypeError, match=r"got \['lr'\] with a Adam object; expected none"):
        apply_optimizer_in_backward(Adam(lr=0.1), model.ebc.parameters(), {"lr": 0.2})
    with pytest.raises(TypeError, match="parameters of tables"):
        set_sparse_grad(model.dense.parameters())
    assert list(attached_rows(model)) == []


def test_register_hook_is_torchs_for_dense_parameters_and_tables_are_updated_all_the_same() -> None:
    model = Model()
    before = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="register_hook=False has no effect on 2 tables") as seen:
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}, register_hook=False)
    assert len(seen) == 1
    assert seen[0].filename == __file__
    model(batch()).backward()
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {"ebc.embedding_bags.a.weight", "ebc.embedding_bags.b.weight"}
    assert model.dense.weight.grad is not None
    for optimizer in model.dense.weight._in_backward_optimizers:  # type: ignore[attr-defined]
        optimizer.step()
    assert not torch.equal(model.dense.weight, before["dense.weight"])


def test_register_hook_true_is_the_default() -> None:
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}, register_hook=True)
    model(batch()).backward()
    assert all(p.grad is None for p in model.parameters())


def attach_one_by_one(params: list[nn.Parameter]) -> None:
    for parameter in params:
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.2), [parameter])


def test_what_a_block_attaches_is_taken_off_again_if_it_raises_and_stays_if_it_does_not() -> None:
    model = Model()
    a, b = model.ebc.parameters()
    apply_optimizer_in_backward(Adam(lr=0.1), [a])
    set_sparse_grad([b])
    model(batch()).backward()
    before = copy.deepcopy(model.ebc.fused_optimizer.state_dict())
    b.grad = None
    wrong = [a, b, model.dense.weight]
    with pytest.raises(ConfigError), restore_optimizers_on_error(model.parameters()):
        attach_one_by_one(wrong)
    assert str(model.ebc.fused_optimizer.state_dict()) == str(before)
    model(batch()).backward()
    assert a.grad is None
    assert b.grad is not None
    assert b.grad.is_sparse
    with restore_optimizers_on_error(model.parameters()):
        apply_optimizer_in_backward(RowWiseAdagrad(lr=0.2), [a, b], replace=True)
    assert len(model.ebc.fused_optimizer.param_groups) == 1
