"""KeyedOptimizerWrapper and OptimizerWrapper: torch optimizers under parameter names."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.optim.rowwise_adagrad import RowWiseAdagrad
from tilerec.optim.warmup import WarmupOptimizer
from tilerec.optim.wrapper import KeyedOptimizerWrapper, OptimizerWrapper

FACTORIES: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, eps=0.0),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=0.0, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    "rowwise": lambda p: RowWiseAdagrad(p, lr=0.1, weight_decay=0.1),
}


def _params() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in (("w", (4, 3)), ("bias", (5,)))
    }


def _train(opt: Any, params: dict[str, nn.Parameter], steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()


@pytest.mark.parametrize("name", FACTORIES)
def test_it_steps_as_the_optimizer_inside(name: str) -> None:
    ours, theirs = _params(), _params()
    _train(KeyedOptimizerWrapper(ours, FACTORIES[name]), ours, 5)
    _train(FACTORIES[name](list(theirs.values())), theirs, 5)
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0)


@pytest.mark.parametrize("initialised", [False, True])
@pytest.mark.parametrize("name", FACTORIES)
def test_training_goes_on_after_a_checkpoint_as_without_one(name: str, initialised: bool) -> None:
    params = _params()
    opt = KeyedOptimizerWrapper(params, FACTORIES[name])
    opt.save_param_groups(True)
    _train(opt, params, 3)
    opt.param_groups[0]["lr"] = 0.05
    buffer = io.BytesIO()
    torch.save((params, opt.state_dict()), buffer)
    _train(opt, params, 3, seed=1)

    buffer.seek(0)
    values, saved = torch.load(buffer, weights_only=True)
    # Another order of parameters: names decide, not positions.
    loaded = {key: nn.Parameter(values[key].detach().clone()) for key in reversed(values)}
    twin = KeyedOptimizerWrapper(loaded, FACTORIES[name])
    twin.save_param_groups(True)
    if initialised:
        twin.init_state()
    twin.load_state_dict(saved)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for key in params:
            loaded[key].grad = torch.randn(loaded[key].shape, generator=generator)
        twin.step()
    for key in params:
        torch.testing.assert_close(loaded[key], params[key], rtol=0, atol=0)


@pytest.mark.parametrize("name", FACTORIES)
def test_init_state_makes_the_state_and_changes_nothing_else(name: str) -> None:
    ours, theirs = _params(), _params()
    ours["w"].grad = torch.ones(4, 3)
    opt = KeyedOptimizerWrapper(ours, FACTORIES[name])
    opt.init_state()
    assert set(opt.state_dict()["state"]) == {"w", "bias"}
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0)
    assert ours["w"].grad is not None
    assert float(ours["w"].grad.sum()) == 12.0
    assert ours["bias"].grad is None
    opt.init_state()  # and again: nothing left to make
    other = FACTORIES[name](list(theirs.values()))
    _train(opt, ours, 4)
    _train(other, theirs, 4)
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0)


def test_init_state_keeps_the_state_that_is_there() -> None:
    params = _params()
    opt = KeyedOptimizerWrapper(params, FACTORIES["adam"])
    params["w"].grad = torch.ones(4, 3)
    opt.step()
    before = copy.deepcopy(opt.state_dict()["state"]["w"])
    opt.init_state()
    after = opt.state_dict()["state"]
    torch.testing.assert_close(after["w"], before, rtol=0, atol=0)
    assert float(after["bias"]["step"]) == 0.0


def test_init_state_with_sparse_gradients() -> None:
    params = _params()
    opt = KeyedOptimizerWrapper({"w": params["w"]}, lambda p: torch.optim.SparseAdam(p, lr=0.1))
    opt.init_state({"w"})
    assert set(opt.state_dict()["state"]["w"]) == {"step", "exp_avg", "exp_avg_sq"}
    with pytest.raises(ConfigError, match=r"init_state got \['x'\]"):
        opt.init_state({"x"})


def test_frozen_parameters_get_no_state() -> None:
    params = _params()
    params["bias"].requires_grad_(False)
    opt = KeyedOptimizerWrapper(params, FACTORIES["adam"])
    opt.init_state()
    assert set(opt.state_dict()["state"]) == {"w"}


def test_the_factory_gets_a_list_or_the_dict() -> None:
    seen: list[Any] = []

    def factory(params: Any) -> torch.optim.Optimizer:
        seen.append(params)
        return torch.optim.SGD(params.items() if isinstance(params, dict) else params, lr=0.1)

    params = _params()
    KeyedOptimizerWrapper(params, factory)
    named = KeyedOptimizerWrapper(params, factory, pass_params_dict=True)
    assert [type(entry) for entry in seen] == [list, dict]
    named.save_param_groups(True)
    assert "param_names" not in named.state_dict()["param_groups"][0]
    extra = nn.Parameter(torch.ones(1))
    named.add_param_group({"params": {"extra": extra}})
    assert named.param_groups[1]["params"] == [extra]


def test_a_parameter_without_a_name_is_refused() -> None:
    params = _params()
    with pytest.raises(ConfigError, match=r"got a parameter of shape \(7,\) in SGD; expected parameters in params"):
        KeyedOptimizerWrapper(params, lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(7))], lr=0.1))


def test_add_param_group_reaches_the_optimizer_inside() -> None:
    params = _params()
    opt = OptimizerWrapper(KeyedOptimizerWrapper(params, FACTORIES["sgd"]))
    extra = nn.Parameter(torch.ones(2))
    opt.add_param_group({"params": [("extra", extra)], "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0})
    extra.grad = torch.ones(2)
    opt.step()
    assert extra.tolist() == [0.0, 0.0]
    assert list(opt.params) == ["w", "bias", "extra"]
    opt.zero_grad()
    assert extra.grad is None


def test_set_optimizer_step_sets_adams_count_and_hands_over_where_the_optimizer_has_its_own() -> None:
    params = _params()
    opt = OptimizerWrapper(KeyedOptimizerWrapper(params, FACTORIES["adam"]))
    opt.set_optimizer_step(7)
    assert [float(s["step"]) for s in opt.state_dict()["state"].values()] == [7.0, 7.0]

    seen: list[Any] = []

    class Own(torch.optim.SGD):
        def set_optimizer_step(self, step: int) -> None:
            seen.append(step)

        def update_hyper_parameters(self, settings: dict[str, Any]) -> None:
            seen.append(settings)

        def post_load_state_dict(self) -> None:
            seen.append("loaded")

    own = OptimizerWrapper(KeyedOptimizerWrapper(params, lambda p: Own(p, lr=0.1)))
    own.set_optimizer_step(3)
    own.update_hyper_parameters({"lr": 0.5})
    own.load_state_dict(own.state_dict())
    assert seen == [3, {"lr": 0.5}, "loaded"]


def test_update_hyper_parameters_writes_the_groups_inside_tensors_in_place() -> None:
    params = _params()
    lr = torch.tensor(0.1)
    inner = torch.optim.Adam(list(params.values()), lr=lr)
    opt = OptimizerWrapper(KeyedOptimizerWrapper(params, lambda _: inner))
    opt.update_hyper_parameters({"lr": 0.5})
    assert inner.param_groups[0]["lr"] is lr
    assert float(lr) == 0.5


def test_a_wrapper_passes_everything_on() -> None:
    params = _params()
    inner = KeyedOptimizerWrapper(params, FACTORIES["adam"])
    opt = OptimizerWrapper(inner)
    opt.init_state()
    opt.save_param_groups(True)
    assert opt.params is inner.params
    assert opt.state is inner.state
    assert opt.param_groups is inner.param_groups
    assert opt.state_dict().keys() == {"state", "param_groups"}
    saved = copy.deepcopy(opt.state_dict())
    saved["state"]["w"]["exp_avg"].fill_(3.0)
    opt.load_state_dict(saved)
    assert float(inner.state[params["w"]]["exp_avg"][0, 0]) == 3.0
    assert "KeyedOptimizerWrapper" in repr(opt)
    with pytest.raises(ConfigError, match=r"OptimizerWrapper: got a SGD; expected a KeyedOptimizer\. Wrap it"):
        OptimizerWrapper(torch.optim.SGD(params.values(), lr=0.1))  # type: ignore[arg-type]


def test_a_wrapped_optimizer_with_its_own_loading_is_asked_to_load() -> None:
    seen: list[Any] = []

    class Own(KeyedOptimizer):
        def load_state_dict(self, state_dict: Any) -> None:
            seen.append(state_dict)

    opt = OptimizerWrapper(Own({}, {}, []))
    opt.load_state_dict({"state": {}})
    assert seen == [{"state": {}}]


@pytest.mark.parametrize(
    "make",
    [
        lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5),
        lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda epoch: 0.5**epoch),
        lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5),
    ],
)
def test_schedulers_of_torch_drive_the_optimizer_inside(make: Any) -> None:
    params = _params()
    inner = torch.optim.SGD(list(params.values()), lr=1.0)
    opt = OptimizerWrapper(KeyedOptimizerWrapper(params, lambda _: inner))
    scheduler = make(opt)
    rates = []
    for _ in range(3):
        _train(opt, params, 1)
        scheduler.step()
        rates.append(inner.param_groups[0]["lr"])
    assert rates == [0.5, 0.25, 0.125]


def test_a_grad_scaler_unscales_what_the_optimizer_steps() -> None:
    params = _params()
    opt = KeyedOptimizerWrapper(params, lambda p: torch.optim.SGD(p, lr=1.0))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    start = params["bias"].detach().clone()
    scaler.scale(params["bias"].sum()).backward()
    scaler.step(opt)
    scaler.update()
    torch.testing.assert_close(params["bias"].detach(), start - 1.0)


def test_a_deepcopied_wrapper_steps_its_own_parameters() -> None:
    params = _params()
    opt = KeyedOptimizerWrapper(params, FACTORIES["adam"])
    _train(opt, params, 2)
    twin = copy.deepcopy(opt)
    before = params["w"].detach().clone()
    twin.params["w"].grad = torch.ones(4, 3)
    twin.step()
    torch.testing.assert_close(params["w"].detach(), before, rtol=0, atol=0)
    assert not torch.equal(twin.params["w"], before)
    assert twin.state_dict()["state"].keys() == {"w", "bias"}


@pytest.mark.parametrize("wrap", [OptimizerWrapper, lambda inner: WarmupOptimizer(inner, [])])
def test_the_closure_reaches_the_optimizer_inside(wrap: Any) -> None:
    p = nn.Parameter(torch.ones(1))
    losses: list[float] = []

    def closure() -> torch.Tensor:
        p.grad = None
        loss = (p * p).sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    keyed = KeyedOptimizerWrapper({"p": p}, lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3))
    assert wrap(keyed).step(closure=closure).item() == losses[0] == 1.0
    assert len(losses) > 1
