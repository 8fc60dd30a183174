"""Adapter of keyed optimizers for `torch.distributed.checkpoint.state_dict`, which identifies parameters by position.

torch's `get_state_dict` and `set_state_dict` add the model's parameter names themselves. They need a state dict in
which each parameter is a number: its position in all groups together:

    keyed       {"state": {"dense.over.weight": {...}, "dense.__warmup": {...}}, "param_groups": [...] if saved}
    positional  {"state": {0: {...}}, "param_groups": [{"params": [0], "lr": ..., "beside": {"dense.__warmup": {...}}}]}
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.optim.loading_plan import copied, settings_of, write_setting
from tilerec.optim.sharded_state import is_secondary_leaf
from tilerec.optim.wrapper import OptimizerWrapper

BESIDE = "beside"
"""Setting of the first group for state that belongs to no parameter, such as the position of a warm-up."""


@final
class PositionalOptimizer(OptimizerWrapper):
    """Adapter of an optimizer for `get_state_dict` and `set_state_dict`; it saves and loads, and does not step.

        model_state, optimizer_state = get_state_dict(model, PositionalOptimizer(optimizer))
        set_state_dict(model, PositionalOptimizer(optimizer), model_state_dict=..., optim_state_dict=...)

    States and groups are those of the wrapped optimizer, not copies. The constructor creates the state of the first
    step (`init_state`), because torch would otherwise run a step to create it.

    Args:
        optimizer: a `FusedOptimizer`, `KeyedOptimizerWrapper`, `CombinedOptimizer` or any other keyed one.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        super().__init__(optimizer)
        optimizer.init_state()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, if any, and return its loss. torch calls `step` on an optimizer without state."""
        return KeyedOptimizer.step(self, closure)

    @property
    def param_groups(self) -> list[Any]:  # type: ignore[override]
        """Groups of the wrapped optimizer. The first also has the setting `BESIDE`, since torch reads its keys."""
        groups: list[Any] = [_with_table_leaves(group) for group in self._optimizer.param_groups]
        beside = self._beside(super()._state_dict()["state"])
        if beside and groups:
            groups[0] = ChainMap({BESIDE: beside}, groups[0])
        return groups

    def _beside(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state that belongs to no parameter."""
        return {name: value for name, value in named.items() if name not in self.params}

    def _positions(self) -> dict[Tensor, int]:
        return {p: n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}

    def _state_dict(self) -> dict[str, Any]:
        positions, named = self._positions(), super()._state_dict()["state"]
        own = {name: positions[p] for name, p in self.params.items() if p in positions}
        groups = [
            {**copied(settings_of(group)), "params": [positions[p] for p in group["params"]]}
            for group in self.param_groups
        ]
        return {
            "state": {own[name]: value for name, value in named.items() if name in own},
            "param_groups": groups,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load in place: groups and their parameters are matched by order, not by name.

        Raises:
            ConfigError: another number of groups or parameters, or an error of the wrapped optimizer.
        """
        class_name, names = type(self).__name__, {p: name for name, p in self.params.items()}
        for key in ("state", "param_groups"):
            if key not in state_dict:
                raise ConfigError(
                    f"{class_name}: got a state dict with {sorted(state_dict)}; expected '{key}'. Pass a state_dict()."
                )
        here, given = self._optimizer.param_groups, state_dict["param_groups"]
        members = [_with_table_leaves(group)["params"] for group in here]
        sizes, got = [len(params) for params in members], [len(group["params"]) for group in given]
        if sizes != got:
            raise ConfigError(
                f"{class_name}: got param groups with {got} parameters; expected {sizes}. Make the optimizer with the "
                "same groups before loading."
            )
        name_of: dict[Any, str] = {}
        state: dict[str, Any] = {}
        named_groups: list[dict[str, Any]] = []
        for params, loaded in zip(members, given, strict=True):
            name_of.update(zip(loaded["params"], (names[p] for p in params), strict=True))
            settings = settings_of(loaded)
            state.update(settings.pop(BESIDE, {}))
            named_groups.append({**settings, "params": sorted(names[p] for p in params)})
        unknown = [key for key in state_dict["state"] if key not in name_of]
        if unknown:
            raise ConfigError(
                f"{class_name}: got state of {unknown[:5]}; expected only parameters of its param groups. Pass a "
                "state_dict()."
            )
        state.update((name_of[key], value) for key, value in state_dict["state"].items())
        self._optimizer.load_state_dict({"state": state, "param_groups": named_groups})
        for group, loaded in zip(here, named_groups, strict=True):
            for setting, value in settings_of(loaded).items():
                if setting in group or not isinstance(value, Tensor):
                    write_setting(group, setting, value)


def _with_table_leaves(group: Any) -> Any:
    """Return a group in which each sharded table is one parameter, for any number of tiles on this rank."""
    params = [p for p in group["params"] if not is_secondary_leaf(p)]
    return group if len(params) == len(group["params"]) else ChainMap({"params": params}, group)
