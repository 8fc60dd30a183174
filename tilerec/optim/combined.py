"""Combination of several optimizers to one: usually the fused one of the tables, and one for the dense layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.optim.keyed import KeyedOptimizer


@final
class CombinedOptimizer(KeyedOptimizer):
    """Optimizer that steps, saves and loads a list of optimizers; their names are prefixes of parameter names.

    `CombinedOptimizer([("tables", fused), ("dense", dense)])` saves the state of parameter `over.weight` of `dense`
    under `dense.over.weight`. Parameters of an optimizer without a name (or with the name "") get no prefix.

    Args:
        optims: keyed optimizers, or (name, keyed optimizer) pairs.

    Raises:
        ConfigError: two parameters have the same prefixed name, or an optimizer is not a `KeyedOptimizer`.
    """

    def __init__(self, optims: Sequence[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._start()
        self._optims: list[tuple[str, KeyedOptimizer]] = []
        for entry in optims:
            name, optimizer = entry if isinstance(entry, tuple) else ("", entry)
            if not isinstance(optimizer, KeyedOptimizer):
                raise ConfigError(
                    f"CombinedOptimizer: got a {type(optimizer).__name__} as '{name}'; expected a KeyedOptimizer. Wrap "
                    "it: KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: ...)."
                )
            self._optims.append((name, optimizer))
        seen: set[str] = set()
        for name, optimizer in self._optims:
            for key in optimizer.params:
                full = self.prepend_opt_key(key, name)
                if full in seen:
                    raise ConfigError(
                        f"CombinedOptimizer: got two parameters with the name '{full}'; expected different names. Name "
                        "the optimizers: CombinedOptimizer([('tables', ...), ('dense', ...)])."
                    )
                seen.add(full)

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """Return the prefixed name of parameter `name` of optimizer `opt_key`: ("w", "dense") -> `dense.w`."""
        return f"{opt_key}.{name}" if opt_key else name

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """The (name, optimizer) pairs."""
        return list(self._optims)

    @property
    def params(self) -> dict[str, Tensor]:  # type: ignore[override]
        return {self.prepend_opt_key(key, name): p for name, opt in self._optims for key, p in opt.params.items()}

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """Parameter -> its state, of all optimizers: a new dict with the live states."""
        return {p: state for _, opt in self._optims for p, state in opt.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Param groups of all optimizers: a new list with the live groups, which schedulers read and write."""
        return [group for _, opt in self._optims for group in opt.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure once, if given, then step every optimizer; return the closure's loss.

        All optimizers step on the gradients of this evaluation. An optimizer that evaluates the closure several times
        (LBFGS) gets this loss at its first call; later calls evaluate the closure again.
        """
        if closure is None:
            for _, opt in self._optims:
                opt.step()
            return None
        loss = super().step(closure)
        for _, opt in self._optims:
            opt.step(_reuse_first_loss(closure, loss))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, opt in self._optims:
            opt.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Raise: the group does not determine its optimizer. Add it to one of `optimizers`."""
        raise ConfigError(
            "CombinedOptimizer: got a param group; expected a call of add_param_group on one of its optimizers. Use "
            f"one of .optimizers ({', '.join(repr(name) for name, _ in self._optims) or 'none'})."
        )

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        sparse = sparse_grad_parameter_names or set()
        unknown = sparse - set(self.params)
        if unknown:
            raise ConfigError(
                f"CombinedOptimizer: init_state got {sorted(unknown)}; expected names of parameters. Correct the names."
            )
        for name, opt in self._optims:
            opt.init_state({key for key in opt.params if self.prepend_opt_key(key, name) in sparse})

    def save_param_groups(self, save: bool) -> None:
        super().save_param_groups(save)
        for _, opt in self._optims:
            opt.save_param_groups(save)

    def set_optimizer_step(self, step: int) -> None:
        for _, opt in self._optims:
            opt.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Write settings to every optimizer that has them; raise `ConfigError` for a setting that none has."""
        settings = [{key for group in opt.param_groups for key in group} for _, opt in self._optims]
        for key in params_dict:
            if key == "params" or not any(key in have for have in settings):
                raise ConfigError(
                    f"CombinedOptimizer: got the setting '{key}', which no optimizer has; expected some of "
                    f"{sorted({name for have in settings for name in have} - {'params'})}. Leave it out."
                )
        for have, (_, opt) in zip(settings, self._optims, strict=True):
            own = {key: value for key, value in params_dict.items() if key in have}
            if own:
                opt.update_hyper_parameters(own)

    def post_load_state_dict(self) -> None:
        for _, opt in self._optims:
            if not _overrides_load(opt):
                opt.post_load_state_dict()

    def _state_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"state": {}}
        for name, opt in self._optims:
            own = opt.state_dict()
            for key, value in own["state"].items():
                full = self.prepend_opt_key(key, name)
                if full in out["state"]:
                    raise ConfigError(
                        f"CombinedOptimizer: got two states with the name '{full}'; expected different names. Give the "
                        "optimizers different names, and warm-ups different param_name."
                    )
                out["state"][full] = value
            for group in own.get("param_groups", []):
                names = [self.prepend_opt_key(key, name) for key in group["params"]]
                out.setdefault("param_groups", []).append({**group, "params": names})
        return out

    def _plan_load(self, given: Mapping[str, Any], plan: list[Callable[[], None]]) -> None:
        if "state" not in given:
            raise ConfigError(
                f"CombinedOptimizer: got a state dict with {sorted(given)}; expected 'state'. Pass a state_dict()."
            )
        state = dict(given["state"])
        groups = list(given.get("param_groups", []))
        # Longest names first: "" and "dense" must not take state of "dense.late".
        for name, opt in sorted(self._optims, key=lambda entry: -len(entry[0])):
            own: dict[str, Any] = {"state": {}}
            for key in opt._state_names():
                full = self.prepend_opt_key(key, name)
                if full in state:
                    own["state"][key] = state.pop(full)
            if "param_groups" in given:
                mine = {self.prepend_opt_key(key, name): key for key in opt.params}
                taken = [group for group in groups if group["params"] and set(group["params"]) <= set(mine)]
                groups = [group for group in groups if all(group is not own_group for own_group in taken)]
                own["param_groups"] = [{**g, "params": [mine[full] for full in g["params"]]} for g in taken]
            if _overrides_load(opt):
                plan.append(functools.partial(opt.load_state_dict, own))
            else:
                opt._plan_load(own, plan)
        if state:
            raise ConfigError(
                f"CombinedOptimizer: got state of {sorted(state)}; expected only state of the optimizers "
                f"{[name for name, _ in self._optims]}. Make the optimizer with the same names."
            )

    def _state_names(self) -> list[str]:
        return [self.prepend_opt_key(key, name) for name, opt in self._optims for key in opt._state_names()]

    def __repr__(self) -> str:
        return "CombinedOptimizer (\n" + "".join(f"{name}: {opt!r}\n" for name, opt in self._optims) + ")"


def _reuse_first_loss(closure: Callable[[], Any], loss: Any) -> Callable[[], Any]:
    """Return a closure whose first call returns `loss`; later calls evaluate `closure`."""
    losses = [loss]
    return lambda: losses.pop() if losses else closure()


def _overrides_load(optimizer: KeyedOptimizer) -> bool:
    return type(optimizer).load_state_dict is not KeyedOptimizer.load_state_dict
