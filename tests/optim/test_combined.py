"""CombinedOptimizer: several keyed optimizers as one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from tilerec.errors import ConfigError
from tilerec.optim.clipping import GradientClipping, GradientClippingOptimizer
from tilerec.optim.combined import CombinedOptimizer
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from tilerec.optim.wrapper import KeyedOptimizerWrapper


def _keyed(cls: Any = torch.optim.Adam, **kwargs: Any) -> KeyedOptimizerWrapper:
    params = {"b": nn.Parameter(torch.ones(2)), "a": nn.Parameter(torch.ones(3))}
    return KeyedOptimizerWrapper(params, lambda p: cls(p, **{"lr": 0.1, **kwargs}))


def _pair() -> CombinedOptimizer:
    return CombinedOptimizer([("x", _keyed()), ("y", _keyed(torch.optim.SGD, momentum=0.9, lr=0.2))])


def _step(opt: KeyedOptimizer, value: float = 1.0) -> None:
    for p in opt.params.values():
        p.grad = torch.full_like(p, value)
    opt.step()


def test_names_get_the_optimizers_name_in_front() -> None:
    opt = _pair()
    assert list(opt.params) == ["x.b", "x.a", "y.b", "y.a"]
    assert opt.state_dict() == {"state": {}}
    opt.init_state()
    opt.save_param_groups(True)
    got = opt.state_dict()
    assert list(got["state"]) == ["x.b", "x.a", "y.b", "y.a"]
    assert set(got["state"]["y.b"]) == {"momentum_buffer"}
    assert [(g["params"], g["lr"]) for g in got["param_groups"]] == [
        (["x.a", "x.b"], 0.1),
        (["y.a", "y.b"], 0.2),
    ]
    assert CombinedOptimizer.prepend_opt_key("a", "k") == "k.a"
    assert CombinedOptimizer.prepend_opt_key("a", "") == "a"
    assert [(name, type(o)) for name, o in opt.optimizers] == [
        ("x", KeyedOptimizerWrapper),
        ("y", KeyedOptimizerWrapper),
    ]


def test_unnamed_optimizers_keep_their_names_and_doubles_are_refused() -> None:
    assert list(CombinedOptimizer([_keyed()]).params) == ["b", "a"]
    assert list(CombinedOptimizer([("", _keyed()), ("z", _keyed())]).params) == ["b", "a", "z.b", "z.a"]
    for entries in ([_keyed(), _keyed()], [("x", _keyed()), ("x", _keyed())]):
        with pytest.raises(ConfigError, match=r"got two parameters with the name '(x\.)?b'"):
            CombinedOptimizer(entries)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="got a SGD as 'x'; expected a KeyedOptimizer"):
        CombinedOptimizer([("x", torch.optim.SGD([nn.Parameter(torch.ones(1))]))])  # type: ignore[list-item]


def test_none_at_all_is_fine() -> None:
    opt = CombinedOptimizer([])
    opt.step()
    opt.zero_grad()
    opt.load_state_dict({"state": {}})
    assert opt.state_dict() == {"state": {}}
    assert opt.param_groups == []


def test_a_checkpoint_of_nested_optimizers_continues_the_training() -> None:
    def make() -> CombinedOptimizer:
        late = WarmupOptimizer(_keyed(), [WarmupStage(WarmupPolicy.LINEAR, 6, 0.1)], lr=0.5)
        clipped = GradientClippingOptimizer(_keyed(torch.optim.Adagrad), GradientClipping.NORM, 0.5)
        return CombinedOptimizer([("", _pair()), ("late", late), ("late.er", clipped)])

    opt = make()
    opt.save_param_groups(True)
    for _ in range(3):
        _step(opt)
    saved = copy.deepcopy(opt.state_dict())
    assert "late.__warmup" in saved["state"]
    values = [p.detach().clone() for p in opt.params.values()]
    for _ in range(3):
        _step(opt, 0.5)

    twin = make()
    twin.save_param_groups(True)
    twin.init_state()
    with torch.no_grad():
        for p, value in zip(twin.params.values(), values, strict=True):
            p.copy_(value)
    twin.load_state_dict(saved)
    for _ in range(3):
        _step(twin, 0.5)
    for name, p in opt.params.items():
        torch.testing.assert_close(twin.params[name], p, rtol=0, atol=0)
    torch.testing.assert_close(twin.state_dict()["state"], opt.state_dict()["state"], rtol=0, atol=0)
    assert twin.state_dict()["param_groups"] == opt.state_dict()["param_groups"]


def test_a_distributed_checkpoint_takes_the_state_dict_as_it_is(tmp_path: Path) -> None:
    opt, twin = _pair(), _pair()
    for o in (opt, twin):
        o.save_param_groups(True)
        o.init_state()
    _step(opt)
    opt.param_groups[1]["lr"] = 0.75
    dcp.save({"optimizer": opt.state_dict()}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    loaded = {"optimizer": twin.state_dict()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    twin.load_state_dict(loaded["optimizer"])
    torch.testing.assert_close(twin.state_dict()["state"], opt.state_dict()["state"], rtol=0, atol=0)
    assert twin.state_dict()["param_groups"] == opt.state_dict()["param_groups"]
    assert twin.param_groups[1]["lr"] == 0.75


def test_loading_is_all_or_nothing_over_all_optimizers() -> None:
    opt = _pair()
    opt.init_state()
    before = copy.deepcopy(opt.state_dict())
    bad = copy.deepcopy(before)
    bad["state"]["x.a"]["exp_avg"].fill_(9.0)
    bad["state"]["y.a"]["momentum_buffer"] = torch.zeros(7)
    with pytest.raises(ConfigError, match="momentum_buffer"):
        opt.load_state_dict(bad)
    stray = {"state": {**before["state"], "z.a": {}}}
    with pytest.raises(
        ConfigError, match=r"got state of \['z\.a'\]; expected only state of the optimizers \['x', 'y'\]"
    ):
        opt.load_state_dict(stray)
    with pytest.raises(ConfigError, match="expected 'state'"):
        opt.load_state_dict({})
    torch.testing.assert_close(opt.state_dict()["state"], before["state"], rtol=0, atol=0)


def test_the_closure_runs_once() -> None:
    opt, calls = _pair(), []

    def closure() -> torch.Tensor:
        calls.append(1)
        opt.zero_grad()
        loss = torch.stack([p.sum() for p in opt.params.values()]).sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 10.0
    assert calls == [1]
    assert all(p.max().item() < 1 for p in opt.params.values())


def test_an_optimizer_may_evaluate_the_closure_again() -> None:
    opt = CombinedOptimizer([("x", _keyed(torch.optim.LBFGS, max_iter=3)), ("y", _keyed(torch.optim.SGD))])
    losses: list[float] = []

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = torch.stack([(p * p).sum() for p in opt.params.values()]).sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    assert opt.step(closure).item() == losses[0] == 10.0
    assert len(losses) > 1
    assert losses[-1] < losses[0]
    assert all(p.max().item() < 1 for p in opt.params.values())


def test_gradients_are_none_after_zero_grad_unless_zeros_are_asked_for() -> None:
    opt = _pair()
    _step(opt)
    opt.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in opt.params.values())
    opt.zero_grad()
    assert all(p.grad is None for p in opt.params.values())


def test_settings_reach_the_optimizers_that_have_them() -> None:
    opt = _pair()
    opt.update_hyper_parameters({"lr": 0.5, "momentum": 0.25})
    assert [g["lr"] for g in opt.param_groups] == [0.5, 0.5]
    assert opt.param_groups[1]["momentum"] == 0.25
    assert "momentum" not in opt.param_groups[0]
    with pytest.raises(ConfigError, match="got the setting 'eta', which no optimizer has"):
        opt.update_hyper_parameters({"lr": 0.75, "eta": 1.0})
    assert opt.param_groups[0]["lr"] == 0.5
    opt.set_optimizer_step(4)
    assert float(opt.state_dict()["state"]["x.a"]["step"]) == 4.0


def test_a_scheduler_of_torch_drives_all_groups() -> None:
    opt = _pair()
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    _step(opt)
    scheduler.step()
    assert [g["lr"] for g in opt.param_groups] == [0.05, 0.1]


def test_add_param_group_names_the_place_to_add_it() -> None:
    with pytest.raises(ConfigError, match=r"add_param_group on one of .*\.optimizers \('x', 'y'\)"):
        _pair().add_param_group({"params": {"c": nn.Parameter(torch.ones(1))}})
    with pytest.raises(ConfigError, match=r"init_state got \['q'\]"):
        _pair().init_state({"q"})


def test_an_optimizer_with_its_own_loading_is_asked_to_load() -> None:
    seen: list[Any] = []

    class Own(KeyedOptimizer):
        def load_state_dict(self, state_dict: Any) -> None:
            seen.append(state_dict)

        def post_load_state_dict(self) -> None:
            seen.append("again")

    p = nn.Parameter(torch.ones(1))
    opt = CombinedOptimizer([("own", Own({"p": p}, {p: {"m": torch.ones(1)}}, [{"params": [p]}]))])
    opt.load_state_dict({"state": {"own.p": {"m": 3}}})
    assert seen == [{"state": {"p": {"m": 3}}}]


def test_state_is_the_live_state_of_all() -> None:
    opt = _pair()
    opt.init_state()
    assert len(opt.state) == 4
    inner = opt.optimizers[0][1]
    assert opt.state[opt.params["x.a"]] is inner.state[inner.params["a"]]
    assert "x: KeyedOptimizerWrapper" in repr(opt)
