"""KeyedOptimizer: state under parameter names, loaded in place and all or nothing."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.optim.keyed import KeyedOptimizer


def _params() -> dict[str, nn.Parameter]:
    return {"b": nn.Parameter(torch.ones(2)), "a": nn.Parameter(torch.ones(3))}


def _keyed(params: dict[str, nn.Parameter] | None = None) -> KeyedOptimizer:
    params = params or _params()
    a, b = params["a"], params["b"]
    state = {
        a: {
            "sum": torch.arange(3.0),
            "count": 3,
            "parts": [torch.zeros(1), 2],
            "nested": {"x": torch.ones(())},
        },
        b: {"sum": torch.arange(2.0), "step": torch.tensor(5.0)},
    }
    return KeyedOptimizer(params, state, [{"params": [b, a], "lr": 0.1, "betas": (0.9, 0.999)}])


def test_state_dict_is_keyed_by_name_in_plain_containers() -> None:
    opt = _keyed()
    got = opt.state_dict()
    assert list(got) == ["state"]
    assert list(got["state"]) == ["b", "a"]
    assert got["state"]["a"]["count"] == 3
    assert got["state"]["a"]["sum"] is opt.state[opt.params["a"]]["sum"]  # live tensors
    got["state"]["a"]["nested"]["x"] = None  # in containers of its own
    assert opt.state[opt.params["a"]]["nested"]["x"] is not None


class _Quantised:
    """State that saves and loads itself."""

    def __init__(self, codes: list[float]) -> None:
        self.codes = torch.tensor(codes)

    def state_dict(self) -> dict[str, Any]:
        return {"codes": self.codes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.codes.copy_(state_dict["codes"])


def test_objects_in_the_state_are_saved_and_loaded_by_their_own_state_dict() -> None:
    opt = _keyed()
    held = _Quantised([1.0, 2.0])
    opt.state[opt.params["a"]]["nested"]["object"] = held
    shown = opt.state_dict()
    assert shown["state"]["a"]["nested"]["object"] == {"codes": held.codes}
    shown["state"]["a"]["nested"]["object"] = {"codes": torch.tensor([3.0, 4.0])}
    opt.load_state_dict(shown)
    assert opt.state[opt.params["a"]]["nested"]["object"] is held
    assert held.codes.tolist() == [3.0, 4.0]
    shown["state"]["a"]["nested"]["object"] = 5
    with pytest.raises(ConfigError, match="'object': got int; expected the state dict of a _Quantised"):
        opt.load_state_dict(shown)


def test_param_groups_are_saved_on_request_with_sorted_names() -> None:
    opt = _keyed()
    opt.save_param_groups(True)
    assert opt.state_dict()["param_groups"] == [{"params": ["a", "b"], "lr": 0.1, "betas": (0.9, 0.999)}]
    opt.save_param_groups(False)
    assert "param_groups" not in opt.state_dict()


def test_loading_writes_into_the_tensors_that_are_there() -> None:
    opt, other = _keyed(), _keyed()
    for p, state in other.state.items():
        state["sum"].add_(10)
        other.state[p] = state
    other.state[other.params["a"]].update(count=7, parts=[torch.full((1,), 4.0), 9])
    other.save_param_groups(True)
    opt.save_param_groups(True)
    other.param_groups[0]["lr"] = 0.5
    buffer = io.BytesIO()
    torch.save(other.state_dict(), buffer)
    buffer.seek(0)
    before = {name: opt.state[p]["sum"] for name, p in opt.params.items()}
    opt.load_state_dict(torch.load(buffer, weights_only=True))
    state = opt.state[opt.params["a"]]
    assert state["sum"] is before["a"]
    torch.testing.assert_close(before["a"], torch.tensor([10.0, 11.0, 12.0]))
    torch.testing.assert_close(before["b"], torch.tensor([10.0, 11.0]))
    assert state["count"] == 7
    assert state["parts"][1] == 9
    assert float(state["parts"][0]) == 4.0
    assert opt.param_groups[0]["lr"] == 0.5
    assert opt.param_groups[0]["params"] == [opt.params["b"], opt.params["a"]]


def test_groups_are_read_only_if_they_are_saved() -> None:
    opt = _keyed()
    loaded = {**opt.state_dict(), "param_groups": [{"params": ["a", "b"], "lr": 9.0}]}
    opt.load_state_dict(loaded)
    assert opt.param_groups[0]["lr"] == 0.1
    opt.save_param_groups(True)
    opt.load_state_dict(loaded)
    assert opt.param_groups[0]["lr"] == 9.0
    assert opt.param_groups[0]["betas"] == (0.9, 0.999)  # a setting the loaded group lacks stays


def test_a_setting_that_is_a_tensor_is_loaded_in_place() -> None:
    p = nn.Parameter(torch.ones(1))
    lr = torch.tensor(0.5)
    opt = KeyedOptimizer({"p": p}, {}, [{"params": [p], "lr": lr}])
    opt.save_param_groups(True)
    opt.load_state_dict({"state": {}, "param_groups": [{"params": ["p"], "lr": torch.tensor(2.0), "new": 1}]})
    assert opt.param_groups[0]["lr"] is lr
    assert float(lr) == 2.0
    assert opt.param_groups[0]["new"] == 1


def _without(state: dict[str, Any], *path: str) -> dict[str, Any]:
    out = copy.deepcopy(state)
    holder = out
    for key in path[:-1]:
        holder = holder[key]
    del holder[path[-1]]
    return out


def _with(state: dict[str, Any], value: Any, *path: str) -> dict[str, Any]:
    out = copy.deepcopy(state)
    holder = out
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: _without(s, "state"), r"got a state dict with \['param_groups'\]; expected 'state'"),
        (lambda s: _without(s, "state", "a"), r"lacks \['a'\]; expected \['a', 'b'\]"),
        (lambda s: _with(s, {"x": 1}, "state", "c"), r"also has \['c'\]"),
        (lambda s: _without(s, "state", "a", "sum"), r"state of 'a': the loaded one lacks \['sum'\]"),
        (lambda s: _with(s, 1, "state", "a", "zz"), r"state of 'a': the loaded one also has \['zz'\]"),
        (
            lambda s: _with(s, torch.ones(1), "state", "a", "sum"),
            r"'a' / 'sum': got shape \(1,\); expected .*\(3,\)",
        ),
        (lambda s: _with(s, "x", "state", "a", "sum"), r"'a' / 'sum': got 'x'; expected a tensor"),
        (lambda s: _with(s, 3, "state", "a", "nested"), r"'a' / 'nested': got int; expected a dict"),
        (lambda s: _with(s, [1], "state", "a", "parts"), r"'a' / 'parts': got \[1\]; expected a list of 2"),
        (lambda s: _without(s, "param_groups"), r"got a state dict without 'param_groups'; .* Save them"),
        (lambda s: _with(s, [], "param_groups"), r"got param groups none; expected \[a, b\]"),
        (
            lambda s: _with(s, [{"params": ["a"]}], "param_groups"),
            r"got param groups \[a\]; expected \[a, b\]",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(change: Any, message: str) -> None:
    opt = _keyed()
    opt.save_param_groups(True)
    loaded = copy.deepcopy(opt.state_dict())
    loaded["state"]["b"]["sum"].fill_(100.0)
    loaded["param_groups"][0]["lr"] = 100.0
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ConfigError, match=message):
        opt.load_state_dict(change(loaded))
    torch.testing.assert_close(opt.state_dict()["state"], before["state"], rtol=0, atol=0)
    assert opt.param_groups[0]["lr"] == before["param_groups"][0]["lr"]


def test_a_number_loads_into_a_scalar_tensor() -> None:
    opt = _keyed()
    opt.load_state_dict(_with(opt.state_dict(), 17, "state", "b", "step"))
    assert float(opt.state[opt.params["b"]]["step"]) == 17.0


def test_state_per_row_may_come_as_a_column() -> None:
    opt = _keyed()
    opt.load_state_dict(_with(opt.state_dict(), torch.tensor([[7.0], [8.0], [9.0]]), "state", "a", "sum"))
    assert opt.state[opt.params["a"]]["sum"].tolist() == [7.0, 8.0, 9.0]


def test_every_parameter_needs_a_name_and_only_one() -> None:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))
    with pytest.raises(
        ConfigError, match=r"got a tensor of shape \(2,\) in state; expected parameters in params \(a\)"
    ):
        KeyedOptimizer({"a": a}, {b: {}}, [{"params": [a]}])
    with pytest.raises(ConfigError, match=r"got a tensor of shape \(2,\) in param_groups"):
        KeyedOptimizer({"a": a}, {}, [{"params": [a, b]}])
    with pytest.raises(ConfigError, match="got 'a' and 'again' for one parameter"):
        KeyedOptimizer({"a": a, "again": a}, {}, [{"params": [a]}])
    opt = KeyedOptimizer({"a": a}, {}, [{"params": [a]}])
    opt.state[b] = {"x": 1}
    with pytest.raises(ConfigError, match=r"got state of a tensor of shape .* has no name"):
        opt.state_dict()


def test_no_parameters_are_fine() -> None:
    opt = KeyedOptimizer({}, {}, [])
    assert opt.state_dict() == {"state": {}}
    opt.load_state_dict({"state": {}})
    opt.step()
    opt.zero_grad()
    opt.init_state()


def test_add_param_group_takes_named_parameters() -> None:
    opt = _keyed()
    c, d = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(4))
    opt.add_param_group({"params": {"c": c}, "lr": 0.7})
    opt.add_param_group({"params": [("d", d)], "lr": 0.8})
    opt.save_param_groups(True)
    assert [(g["params"], g["lr"]) for g in opt.state_dict()["param_groups"]] == [
        (["a", "b"], 0.1),
        (["c"], 0.7),
        (["d"], 0.8),
    ]
    assert list(opt.params) == ["b", "a", "c", "d"]


@pytest.mark.parametrize("params", [[nn.Parameter(torch.ones(1))], nn.Parameter(torch.ones(1)), {}, None, [("x", 3)]])
def test_add_param_group_refuses_parameters_without_names(params: Any) -> None:
    with pytest.raises(ConfigError, match="add_param_group got parameters without names"):
        _keyed().add_param_group({"params": params, "lr": 0.7})


def test_add_param_group_refuses_what_is_already_here() -> None:
    opt = _keyed()
    with pytest.raises(ConfigError, match="got 'a', already present"):
        opt.add_param_group({"params": {"a": nn.Parameter(torch.ones(1))}})
    with pytest.raises(ConfigError, match="got 'c', already present as 'b'"):
        opt.add_param_group({"params": {"c": opt.params["b"]}})
    assert list(opt.params) == ["b", "a"]


def test_update_hyper_parameters_writes_every_group_and_refuses_unknown_names() -> None:
    opt = _keyed()
    opt.update_hyper_parameters({"lr": 0.25})
    assert opt.param_groups[0]["lr"] == 0.25
    for name in ("momentum", "params"):
        with pytest.raises(
            ConfigError, match=f"got the setting '{name}', which no param group has; expected some of .*'lr'"
        ):
            opt.update_hyper_parameters({name: 0.25})


def test_set_optimizer_step_writes_the_counts_that_exist() -> None:
    opt = _keyed()
    step = opt.state[opt.params["b"]]["step"]
    opt.set_optimizer_step(11)
    assert float(step) == 11.0
    assert "step" not in opt.state[opt.params["a"]]


def test_step_runs_the_closure_with_gradients_on() -> None:
    opt = _keyed()
    p = opt.params["a"]
    with torch.no_grad():
        loss = opt.step(lambda: (p * 2).sum())
    assert loss.requires_grad
    assert opt.step() is None


def test_hooks_of_torch_run() -> None:
    opt, seen = _keyed(), []
    opt.register_step_pre_hook(lambda *_: seen.append("before"))
    opt.register_step_post_hook(lambda *_: seen.append("after"))
    opt.register_state_dict_pre_hook(lambda *_: seen.append("saving"))
    opt.register_state_dict_post_hook(lambda _, state: {**state, "extra": 1})
    opt.register_load_state_dict_pre_hook(lambda _, state: {"state": state["kept"]})
    opt.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    opt.step()
    saved = opt.state_dict()
    assert saved["extra"] == 1
    opt.load_state_dict({"kept": saved["state"]})
    assert seen == ["before", "after", "saving", "loaded"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))])
def test_a_copy_is_an_optimizer_of_its_own(copied: Any) -> None:
    opt = _keyed()
    torch.optim.lr_scheduler.StepLR(opt, 1)  # wraps opt.step
    opt.register_step_post_hook(_fail)
    twin = copied(opt)
    twin.step()
    torch.testing.assert_close(twin.state_dict()["state"], opt.state_dict()["state"], rtol=0, atol=0)
    twin.state[twin.params["a"]]["sum"].fill_(-1)
    assert opt.state[opt.params["a"]]["sum"].tolist() == [0.0, 1.0, 2.0]
    assert twin.param_groups[0]["params"][0] is twin.params["b"]


def _fail(*_: Any) -> None:
    raise AssertionError("a hook of the original ran")


def test_post_load_state_dict_is_called_after_loading() -> None:
    class Derived(KeyedOptimizer):
        total = 0.0

        def post_load_state_dict(self) -> None:
            self.total = float(sum(state["sum"].sum() for state in self.state.values()))

    source = _keyed()
    opt = Derived(source.params, source.state, source.param_groups)
    opt.load_state_dict(source.state_dict())
    assert opt.total == 4.0
