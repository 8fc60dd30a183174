"""Several optimizers as one: typically the fused one of the embedding tables and one for the dense layers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.optim.keyed import KeyedOptimizer


@final
class CombinedOptimizer(KeyedOptimizer):
    """Steps, saves and loads a list of optimizers together; parameter names get the optimizer's name as a prefix.

    `CombinedOptimizer([("tables", fused), ("dense", dense)])` saves the state of parameter `over.weight` of `dense`
    under `dense.over.weight`. An optimizer given without a name (or with the name "") keeps its names.

    Args:
        optims: keyed optimizers, or (name, keyed optimizer) pairs.

    Raises:
        ConfigError: two parameters would have the same name, or an optimizer is not a `KeyedOptimizer`.
    """

    def __init__(self, optims: Sequence[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._start()
        self._optims: list[tuple[str, KeyedOptimizer]] = []
        for entry in optims:
            name, optimizer = entry if isinstance(entry, tuple) else ("", entry)
            if not isinstance(optimizer, KeyedOptimizer):
                raise ConfigError(
                    f"CombinedOptimizer: '{name}' is a {type(optimizer).__name__}, wanted a KeyedOptimizer; wrap it: "
                    "KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: ...)."
                )
            self._optims.append((name, optimizer))
        seen: set[str] = set()
        for name, optimizer in self._optims:
            for key in optimizer.params:
                full = self.prepend_opt_key(key, name)
                if full in seen:
                    raise ConfigError(
                        f"CombinedOptimizer: two parameters are called '{full}'; give them different names: "
                        "CombinedOptimizer([('tables', ...), ('dense', ...)])."
                    )
                seen.add(full)

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """The name of parameter `name` of the optimizer called `opt_key`: ("w", "dense") gives `dense.w`."""
        return f"{opt_key}.{name}" if opt_key else name

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """The (name, optimizer) pairs."""
        return list(self._optims)

    @property
    def params(self) -> dict[str, Tensor]:  # type: ignore[override]
        return {
            self.prepend_opt_key(key, name): p for name, opt in self._optims for key, p in opt.params.items()
        }

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """Parameter -> its state, of all of them; a fresh dict that holds the live states."""
        return {p: state for _, opt in self._optims for p, state in opt.state.items()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The live groups of all of them, in a fresh list: a scheduler reads and writes their settings."""
        return [group for _, opt in self._optims for group in opt.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure once, if given, then step every optimizer; returns the closure's loss.

        All optimizers step on the gradients of this one evaluation. One that evaluates the closure several times
        (LBFGS) gets the loss of it at its first call, and evaluates again at the others.
        """
        if closure is None:
            for _, opt in self._optims:
                opt.step()
            return None
        loss = super().step(closure)
        for _, opt in self._optims:
            opt.step(_evaluated(closure, loss))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for _, opt in self._optims:
            opt.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Refused, since it is open which optimizer should take the group: add it to one of `optimizers`."""
        raise ConfigError(
            "CombinedOptimizer: it is open which optimizer the group is for; call add_param_group of one of "
            f".optimizers ({', '.join(repr(name) for name, _ in self._optims) or 'none'})."
        )

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        sparse = sparse_grad_parameter_names or set()
        unknown = sparse - set(self.params)
        if unknown:
            raise ConfigError(
                f"CombinedOptimizer: init_state got {sorted(unknown)}, which are not parameters."
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
        """Write settings into every optimizer that has them; a setting that none has is a `ConfigError`."""
        settings = [{key for group in opt.param_groups for key in group} for _, opt in self._optims]
        for key in params_dict:
            if key == "params" or not any(key in have for have in settings):
                raise ConfigError(
                    f"CombinedOptimizer: no optimizer has a setting '{key}'; they have "
                    f"{sorted({name for have in settings for name in have} - {'params'})}."
                )
        for have, (_, opt) in zip(settings, self._optims, strict=True):
            own = {key: value for key, value in params_dict.items() if key in have}
            if own:
                opt.update_hyper_parameters(own)

    def post_load_state_dict(self) -> None:
        for _, opt in self._optims:
            if not _loads_its_own_way(opt):
                opt.post_load_state_dict()

    def _state_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {"state": {}}
        for name, opt in self._optims:
            own = opt.state_dict()
            for key, value in own["state"].items():
                full = self.prepend_opt_key(key, name)
                if full in out["state"]:
                    raise ConfigError(
                        f"CombinedOptimizer: two states are called '{full}'; give the optimizers different names, and "
                        "warm-ups different param_name."
                    )
                out["state"][full] = value
            for group in own.get("param_groups", []):
                names = [self.prepend_opt_key(key, name) for key in group["params"]]
                out.setdefault("param_groups", []).append({**group, "params": names})
        return out

    def _plan_load(self, given: Mapping[str, Any], plan: list[Callable[[], None]]) -> None:
        if "state" not in given:
            raise ConfigError(
                f"CombinedOptimizer: the state dict has no 'state' (it has {sorted(given)}); pass a state_dict()."
            )
        state = dict(given["state"])
        groups = list(given.get("param_groups", []))
        # Longest names first: "" and "dense" must not take what belongs to "dense.late".
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
            if _loads_its_own_way(opt):
                plan.append(functools.partial(opt.load_state_dict, own))
            else:
                opt._plan_load(own, plan)
        if state:
            raise ConfigError(
                f"CombinedOptimizer: the loaded state also has {sorted(state)}, which belongs to none of the "
                f"optimizers {[name for name, _ in self._optims]}."
            )

    def _state_names(self) -> list[str]:
        return [self.prepend_opt_key(key, name) for name, opt in self._optims for key in opt._state_names()]

    def __repr__(self) -> str:
        return "CombinedOptimizer (\n" + "".join(f"{name}: {opt!r}\n" for name, opt in self._optims) + ")"


def _evaluated(closure: Callable[[], Any], loss: Any) -> Callable[[], Any]:
    """The closure of which the next evaluation has been made, with this loss."""
    losses = [loss]
    return lambda: losses.pop() if losses else closure()


def _loads_its_own_way(optimizer: KeyedOptimizer) -> bool:
    return type(optimizer).load_state_dict is not KeyedOptimizer.load_state_dict
