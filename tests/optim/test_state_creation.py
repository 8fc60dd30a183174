"""The state of a first step, made without one: training afterwards is bit for bit what it would have been."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tilerec.errors import ConfigError
from tilerec.optim import state_creation as initial
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from tilerec.optim.wrapper import KeyedOptimizerWrapper


class Peculiar(Optimizer):
    """Counts in its group, keeps a copy of the parameter, a list and a dict, and replaces what it keeps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "weight_decay": 0.1, "k": 0, "scale": torch.tensor(1.0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["scale"].mul_(2)
            group.setdefault("late", 5)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p not in self.state:
                    self.state[p] = {"z": p.detach().clone(), "inner": {"n": 0}}
                state = self.state[p]
                state.setdefault("seen", []).append(group["k"])
                state.update(z=0.9 * state["z"] + p.grad + 1)
                state["inner"] = {"n": state["inner"]["n"] + 1}
                p -= group["lr"] * state["z"] * group["k"] * group["scale"] * state["inner"]["n"]


class Super(torch.optim.NAdam):
    """Its `step` calls another one that torch has wrapped in hooks."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


FACTORIES: dict[str, Callable[[Any], Optimizer]] = {
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, weight_decay=0.1, t0=2, lambd=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, weight_decay=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1, eps=0.5),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1, weight_decay=0.1, foreach=True),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Peculiar": Peculiar,
    "Super": lambda p: Super(p, lr=0.1),
}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in (("w", (4, 3)), ("one", (1, 1)), ("wide", (2, 257)))
    }


def train(optimizer: Optimizer, params: dict[str, nn.Parameter], steps: int) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", FACTORIES)
def test_training_after_init_state_is_that_without_it_to_the_bit(name: str) -> None:
    ours, theirs = parameters(), parameters()
    one, other = (KeyedOptimizerWrapper(p, FACTORIES[name]) for p in (ours, theirs))
    one.init_state()
    same({k: p.detach() for k, p in ours.items()}, {k: p.detach() for k, p in theirs.items()})
    for _ in range(2):
        train(one, ours, 3)
        train(other, theirs, 3)
        for key in ours:
            same(ours[key], theirs[key])
        same(one.state_dict()["state"], other.state_dict()["state"])
        one.init_state()  # there is nothing left to make


def test_state_is_what_the_optimizer_sets_before_its_first_step() -> None:
    def state(name: str) -> Any:
        params = parameters()
        own = KeyedOptimizerWrapper({"w": params["w"]}, FACTORIES[name])
        own.init_state()
        return {
            key: sorted(set(value.flatten().tolist())) if isinstance(value, Tensor) else value
            for key, value in own.state_dict()["state"]["w"].items()
        }

    zero, tenth = [0.0], [float(torch.tensor(0.1))]
    assert state("NAdam") == {"step": zero, "mu_product": [1.0], "exp_avg": zero, "exp_avg_sq": zero}
    assert state("ASGD") == {"step": zero, "eta": tenth, "mu": [1.0], "ax": zero}
    assert state("Adamax") == {"step": zero, "exp_avg": zero, "exp_inf": zero}
    assert state("Rprop") == {"step": zero, "prev": zero, "step_size": tenth}
    assert state("Peculiar")["seen"] == []
    assert state("Peculiar")["inner"] == {"n": 0}


def test_groups_are_as_they_were() -> None:
    params = parameters()
    own = KeyedOptimizerWrapper(params, Peculiar)
    scale = own.param_groups[0]["scale"]
    own.init_state()
    (group,) = own.param_groups
    assert set(group) == {"params", "lr", "weight_decay", "k", "scale"}
    assert (group["k"], group["weight_decay"], float(scale)) == (0, 0.1, 1.0)
    assert group["scale"] is scale


def test_the_containers_are_those_that_were_there() -> None:
    params = parameters()
    inner = torch.optim.Adam(params.values())
    own, state = KeyedOptimizerWrapper(params, lambda _: inner), inner.state
    own.init_state()
    assert inner.state is state
    assert {type(entry) for entry in state.values()} == {dict}
    assert len(copy.deepcopy(own).state) == 3


@pytest.mark.parametrize("name", ["Adam", "Super", "Peculiar"])
def test_no_hook_of_a_step_and_no_scheduler_sees_it(name: str) -> None:
    params, seen = parameters(), list[str]()
    own = KeyedOptimizerWrapper(params, FACTORIES[name])
    inner = own._optimizer
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before any")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after any")),
    ]
    try:
        for optimizer in (own, inner):
            optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
            optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        torch.optim.lr_scheduler.StepLR(inner, 1)
        calls: list[int] = []
        counted, inner.step = inner.step, lambda *a: calls.append(1)  # type: ignore[method-assign]
        own.init_state()
        inner.step = counted  # type: ignore[method-assign]
        # A step inside a step is torch's own to wrap: hooks of all optimizers hear of that one.
        assert [word for word in seen if name != "Super" or "any" not in word] == []
        assert calls == []
        train(own, params, 1)
        assert {"before", "after", "before any", "after any"} <= set(seen)
    finally:
        for handle in handles:
            handle.remove()


def test_a_keyed_optimizer_inside_is_asked_for_its_own() -> None:
    params = parameters()
    warm = WarmupOptimizer(
        KeyedOptimizerWrapper(params, FACTORIES["NAdam"]), [WarmupStage(WarmupPolicy.LINEAR, 10, 0.1)], lr=1.0
    )
    own = KeyedOptimizerWrapper(params, lambda _: warm)
    own.init_state()
    assert int(warm.state_dict()["state"]["__warmup"]["warmup"][0]) == 0
    assert [float(state["mu_product"]) for state in own.state.values()] == [1.0] * 3


def test_a_step_that_fails_leaves_everything_as_it_was() -> None:
    class Failing(Peculiar):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            raise RuntimeError("no")

    params = parameters()
    params["w"].grad = torch.ones(4, 3)
    own = KeyedOptimizerWrapper(params, Failing)
    with pytest.raises(RuntimeError, match="no"):
        own.init_state()
    assert not own.state
    assert own.param_groups[0]["k"] == 0
    for key, want in parameters().items():
        same(params[key], want)
    assert params["w"].grad is not None
    assert params["one"].grad is None


def test_empty_state_that_was_only_looked_at_is_made_as_if_it_were_not_there() -> None:
    params = parameters()
    own = KeyedOptimizerWrapper(params, FACTORIES["Adam"])
    assert [own._optimizer.state[p] for p in params.values()] == [{}] * 3
    own.init_state()
    assert [float(own.state[p]["step"]) for p in params.values()] == [0.0] * 3


def test_a_start_of_equal_elements_takes_no_memory_of_its_own() -> None:
    """State of a table may be as large as the table: a copy of its zeros would be, too."""
    zeros, counts = torch.zeros(5, 2), torch.arange(3)
    starts = [initial._InitialValue(value) for value in (zeros, counts)]
    assert starts[0]._was == 0.0
    zeros += 3.0
    counts += 1
    assert starts[0].again() is zeros
    assert not zeros.any()
    assert starts[1].again().tolist() == [0, 1, 2]


def test_state_that_is_no_dict_is_kept_as_it_was_set() -> None:
    class Bare(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p] = ("seen", p.numel())

    params = parameters()
    own = KeyedOptimizerWrapper(params, lambda p: Bare(p, lr=0.1))
    own.init_state()
    assert {own.state[p] for p in params.values()} == {("seen", p.numel()) for p in params.values()}


def test_an_optimizer_of_ones_own_steps_by_its_own_step() -> None:
    class Own(KeyedOptimizer):
        def step(self, closure: Any = None) -> Any:
            for p in self.params.values():
                state = self.state.setdefault(p, {})
                state["n"] = state.get("n", 3) + 1

    params = parameters()
    own = Own(params, {}, [{"params": list(params.values())}])
    own.init_state()
    assert {state["n"] for state in own.state_dict()["state"].values()} == {4}  # what it first sets


def test_an_optimizer_that_steps_by_a_closure_is_named() -> None:
    own = KeyedOptimizerWrapper(parameters(), lambda p: torch.optim.LBFGS(p, lr=0.1))
    with pytest.raises(ConfigError, match=r"LBFGS: got a step\(\) that requires a closure.*Call optimizer.step"):
        own.init_state()
    assert own.state_dict()["state"] == {}  # of whole parameters nothing needs to be made
