"""torch's get_state_dict and set_state_dict over our optimizers, in memory and through a directory; one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from tilerec.errors import ConfigError
from tilerec.modules.embedding import EmbeddingCollection
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.optim.attach import apply_optimizer_in_backward
from tilerec.optim.combined import CombinedOptimizer
from tilerec.optim.fused import FusedOptimizer
from tilerec.optim.in_backward import in_backward_optimizer_filter
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.optim.positional import PositionalOptimizer
from tilerec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from tilerec.optim.wrapper import KeyedOptimizerWrapper
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.spec.table import EmbeddingBagConfig, EmbeddingConfig

BATCH = KeyedJaggedTensor.from_lengths_sync(
    ["a", "b", "t"], torch.tensor([1, 2, 3, 0]), torch.tensor([1, 0, 1, 1, 0, 1])
)


class Model(nn.Module):
    """Two tables under one optimizer call with that of another collection, one apart, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(6, 4, name) for name in ("a", "b")])
        self.ec = EmbeddingCollection([EmbeddingConfig(5, 3, "t")])
        self.over = nn.Linear(8, 1)
        tables = [self.ebc.embedding_bags["a"].weight, self.ec.embeddings["t"].weight]
        apply_optimizer_in_backward(torch.optim.Adam, tables, {"lr": 0.1})
        apply_optimizer_in_backward(torch.optim.SGD, [self.ebc.embedding_bags["b"].weight], {"lr": 0.2})

    def forward(self) -> Tensor:
        return (self.over(self.ebc(BATCH).values()) ** 2).sum() + (self.ec(BATCH)["t"].values() ** 2).sum()


def fused(model: Model) -> KeyedOptimizer:
    return FusedOptimizer(model)


def keyed(model: Model) -> KeyedOptimizer:
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(dense, lambda params: torch.optim.AdamW(params, lr=0.01))


def combined(model: Model) -> KeyedOptimizer:
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=10, value=0.1)]
    return CombinedOptimizer(
        [
            ("bags", model.ebc.fused_optimizer),
            ("rows", model.ec.fused_optimizer),
            ("dense", WarmupOptimizer(keyed(model), stages, lr=0.01)),
        ]
    )


def train(model: Model, optimizer: KeyedOptimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()


def tensors(value: Any, where: str = "") -> dict[str, Any]:
    """Leaves of nested dicts and lists by path."""
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    else:
        return {where: value}
    return {k: v for key, item in pairs for k, v in tensors(item, f"{where}/{key}").items()}


def same(got: Any, want: Any) -> None:
    got, want = tensors(got), tensors(want)
    assert got.keys() == want.keys()
    for name, value in want.items():
        if isinstance(value, Tensor):
            assert torch.equal(got[name], value), name
        else:
            assert got[name] == value, name


@pytest.mark.parametrize("make", [fused, keyed, combined])
@pytest.mark.parametrize("flat", [False, True])
def test_a_state_dict_of_torchs_kind_makes_a_twin(make, flat: bool) -> None:
    """Weights, slots, counts and numbers; the twin then takes the same steps."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, twin = Model(), Model()
    optimizer, other = make(model), make(twin)
    train(model, optimizer, 3)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    weights, state = get_state_dict(model, PositionalOptimizer(optimizer), options=options)
    if not flat:
        assert all(name in dict(model.named_parameters()) for name in state["state"])
    assert not any(isinstance(key, int) for key in state)
    missing = set_state_dict(
        twin, PositionalOptimizer(other), model_state_dict=weights, optim_state_dict=state, options=options
    )
    assert not missing.missing_keys
    optimizer.save_param_groups(True)
    other.save_param_groups(True)
    same(other.state_dict(), optimizer.state_dict())
    if make is keyed:  # the tables' own optimizers are not in it
        return
    train(model, optimizer, 2)
    train(twin, other, 2)
    same(other.state_dict(), optimizer.state_dict())
    same(dict(twin.state_dict()), dict(model.state_dict()))


def test_a_checkpoint_directory_restores_model_and_optimizer(tmp_path: Path) -> None:
    model, twin = Model(), Model()
    optimizer, other = combined(model), combined(twin)
    train(model, optimizer, 3)
    weights, state = get_state_dict(model, PositionalOptimizer(optimizer))
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=tmp_path)
    weights, state = get_state_dict(twin, PositionalOptimizer(other))
    held = {"model": weights, "optimizer": state}
    dcp.load(held, checkpoint_id=tmp_path)
    set_state_dict(
        twin,
        PositionalOptimizer(other),
        model_state_dict=held["model"],
        optim_state_dict=held["optimizer"],
    )
    train(model, optimizer, 2)
    train(twin, other, 2)
    same(other.state_dict(), optimizer.state_dict())
    same(dict(twin.state_dict()), dict(model.state_dict()))


def test_a_checkpoint_directory_takes_named_state_dicts_as_they_are(tmp_path: Path) -> None:
    model, twin = Model(), Model()
    optimizer, other = combined(model), combined(twin)
    for each in (optimizer, other):
        each.save_param_groups(True)
        each.init_state()
    train(model, optimizer, 3)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    held = {"model": twin.state_dict(), "optimizer": other.state_dict()}
    dcp.load(held, checkpoint_id=tmp_path)
    twin.load_state_dict(held["model"])
    other.load_state_dict(held["optimizer"])
    train(model, optimizer, 2)
    train(twin, other, 2)
    same(other.state_dict(), optimizer.state_dict())


def test_the_face_disturbs_nothing() -> None:
    model = Model()
    optimizer = combined(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rates = [group["lr"] for group in optimizer.param_groups]
    get_optimizer_state_dict(model, PositionalOptimizer(optimizer))
    same(dict(model.state_dict()), before)
    assert [group["lr"] for group in optimizer.param_groups] == rates
    assert all(p.grad is None for p in model.parameters())
    assert optimizer.state_dict()["state"]["dense.__warmup"]["warmup"].tolist() == [0, 0]
    assert int(optimizer.state_dict()["state"]["dense.over.weight"]["step"]) == 0
    assert PositionalOptimizer(optimizer).step(lambda: 7) == 7


def test_a_state_dict_of_torchs_own_optimizer_loads_by_position() -> None:
    model = Model()
    plain = torch.optim.AdamW(model.over.parameters(), lr=0.3)
    model().backward()
    plain.step()
    optimizer = keyed(model)
    PositionalOptimizer(optimizer).load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.3
    got = optimizer.state_dict()["state"]["over.bias"]["exp_avg"]
    assert torch.equal(got, plain.state[model.over.bias]["exp_avg"])


def test_another_optimizers_state_is_refused_and_changes_nothing() -> None:
    model = Model()
    optimizer = combined(model)
    face = PositionalOptimizer(optimizer)
    good = face.state_dict()
    before = {name: value.clone() for name, value in tensors(good["state"]).items()}
    with pytest.raises(ConfigError, match=r"with \[1\] parameters; expected \[1, 1, 1, 2\]"):
        face.load_state_dict({"state": {}, "param_groups": [{"params": [0], "lr": 1.0}]})
    with pytest.raises(ConfigError, match=r"got a state dict with \['state'\]; expected 'param_groups'"):
        face.load_state_dict({"state": {}})
    with pytest.raises(ConfigError, match=r"got state of \[9\]"):
        face.load_state_dict({**good, "state": {**good["state"], 9: {}}})
    assert face.param_groups[0]["lr"] == 0.1
    same(tensors(face.state_dict()["state"]), before)
    with pytest.raises(ConfigError, match="expected a KeyedOptimizer"):
        PositionalOptimizer(torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]


def test_only_the_optimizer_can_be_saved_and_set() -> None:
    model, twin = Model(), Model()
    train(model, fused(model), 2)
    state = get_optimizer_state_dict(model, PositionalOptimizer(fused(model)))
    set_optimizer_state_dict(twin, PositionalOptimizer(fused(twin)), optim_state_dict=state)
    same(fused(twin).state_dict(), fused(model).state_dict())


def test_groups_have_no_setting_of_ours_where_no_state_is_beside_the_parameters() -> None:
    """What an optimizer without a warm-up saves, torch's own optimizer over the same parameters loads."""
    model = Model()
    inside = keyed(model)
    (group,) = PositionalOptimizer(inside).state_dict()["param_groups"]
    plain = torch.optim.AdamW([nn.Parameter(torch.ones(1))]).state_dict()["param_groups"][0]
    assert set(group) == set(plain)


def test_numbers_that_another_program_added_are_loaded_and_tensors_are_not() -> None:
    """A scheduler's numbers are no memory; a tensor that this optimizer has no place for would be of another device."""
    model = Model()
    optimizer = keyed(model)
    face = PositionalOptimizer(optimizer)
    saved = face.state_dict()
    saved["param_groups"][0] |= {"initial_lr": 0.7, "lr": 0.2, "mark": torch.ones(1)}
    face.load_state_dict(saved)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["initial_lr"]) == (0.2, 0.7)
    assert "mark" not in group
