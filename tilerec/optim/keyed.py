"""`KeyedOptimizer`: state is saved by parameter name, so it does not depend on the order of parameters.

Glossary
    params         name -> parameter
    state          parameter -> its state: a dict of tensors and numbers, possibly nested
    param group    a dict: "params" (the parameters) and their settings (lr, ...)
    state dict     {"state": {name: state}, "param_groups": [{"params": sorted names, ...settings}]}; the second key
                   only after `save_param_groups(True)`. It contains dicts, tensors and numbers, for `torch.save` and
                   `torch.distributed.checkpoint`. An object in the state with a `state_dict()` and a
                   `load_state_dict()` is replaced by its state dict.

Loading is in place: tensors keep their storage, so other holders of a tensor (a table's rows, a captured graph) get the
loaded values. Loading is atomic: all checks run before the first value is written.

A sharded table (`sharded_state.py`) is one entry on all ranks, with the table's name and shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tilerec.errors import ConfigError
from tilerec.optim.loading_plan import (
    adopted,
    copied,
    plan_parts,
    plan_value,
    same_keys,
    set_step,
    setter,
    settings_of,
    shown_object,
    write_setting,
)
from tilerec.optim.sharded_state import (
    TiledTable,
    combine_parts,
    gradient_layout,
    is_secondary_leaf,
    split_loaded_state,
    stepped_by_optimizer,
    tables_by_name,
)
from tilerec.optim.state_creation import create_lazy_state
from tilerec.torch_private import optimizer_hooks

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


class KeyedOptimizer(Optimizer):
    """Optimizer interface with named parameters, over the state and settings of another optimizer.

    The base class updates nothing: `step()` runs the closure and returns its loss. `KeyedOptimizerWrapper` steps a
    torch optimizer. `FusedOptimizer` stands for updates in the backward pass.

    Args:
        params: name -> parameter. One name per parameter.
        state: parameter -> its state; stored without a copy.
        param_groups: dicts with "params" (all named above) and settings; stored without a copy.

    Raises:
        ConfigError: a parameter with two names, or a parameter in `state` or `param_groups` without a name.
    """

    params: Mapping[str, Tensor]
    _stateless: set[int]  # tiles (by id) for which the optimizer keeps no state
    _of_this_run: frozenset[str] = frozenset()  # settings of groups that loading leaves as they are

    def __init__(
        self,
        params: Mapping[str, Tensor],
        state: Mapping[Any, Any],
        param_groups: Iterable[MutableMapping[str, Any]],
    ) -> None:
        self._start()
        self.params = params
        self.state = state  # type: ignore[assignment]
        self.param_groups = list(param_groups)  # type: ignore[arg-type]
        names = self._names()
        for where, tensors in (
            ("state", list(state)),
            ("param_groups", [p for g in self.param_groups for p in g["params"]]),
        ):
            for tensor in tensors:
                if tensor not in names:
                    raise ConfigError(
                        f"{type(self).__name__}: got {_shown(tensor)} in {where}; expected parameters in params "
                        f"({', '.join(params) or 'none'}). Name it there."
                    )

    def _start(self) -> None:
        """Initialise hooks and profiling like torch's constructor, without its parameter groups."""
        # torch restores a pickled optimizer with __setstate__. Unlike the constructor, it accepts "no parameters".
        Optimizer.__setstate__(self, {"defaults": {}, "_save_groups": False, "_stateless": set()})

    def _names(self) -> dict[Tensor, str]:
        names: dict[Tensor, str] = {}
        for name, tensor in self.params.items():
            if tensor in names:
                raise ConfigError(
                    f"{type(self).__name__}: got '{names[tensor]}' and '{name}' for one parameter; expected one name. "
                    "Name it once."
                )
            names[tensor] = name
        return names

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure, if any, and return its loss."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    # -------------------------------------------------------------------------------------------- state dict

    def save_param_groups(self, save: bool) -> None:
        """Set whether the state dict also has the groups' settings, which loading then requires."""
        self._save_groups = save

    def state_dict(self) -> dict[str, Any]:
        """Return the state by parameter name: the live tensors in new containers.

        State of sharded tables has the type that weights have in the model's `state_dict()`: plain, a DTensor, or a
        `TiledTensor`, with the whole table's shape on every rank. State that the first step would create is created
        now.

        Raises:
            ConfigError: the tiles' state cannot be combined to state of the table (see `docs/optimizers.md`).
        """
        for pre_hook in optimizer_hooks(self, "state_dict_pre").values():
            pre_hook(self)
        out = self._state_dict()
        for post_hook in optimizer_hooks(self, "state_dict_post").values():
            changed = post_hook(self, out)
            out = out if changed is None else changed
        return out

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict()` in place.

        A parameter without state gets a clone of the loaded state, on the parameter's device. Settings that a loaded
        group lacks do not change; additional settings are added. `param_groups` are read only after
        `save_param_groups(True)`.

        Raises:
            ConfigError: names, state names, shapes or groups differ. Then nothing has been written.
        """
        given = dict(state_dict)
        for pre_hook in optimizer_hooks(self, "load_state_dict_pre").values():
            changed = pre_hook(self, given)
            given = given if changed is None else changed
        plan: list[Callable[[], None]] = []
        self._plan_load(given, plan)
        with torch.no_grad():
            for write in plan:
                write()
        self.post_load_state_dict()
        for post_hook in optimizer_hooks(self, "load_state_dict_post").values():
            post_hook(self)

    def post_load_state_dict(self) -> None:
        """Update values derived from the state; called at the end of every `load_state_dict`, for subclasses."""

    def _state_dict(self) -> dict[str, Any]:
        self._refuse_unnamed_state()
        state, tables = self.state, self._tables()
        self._make_tiles_state(tables)
        named: dict[str, Any] = {}
        for name, p in self.params.items():
            if name in tables:
                parts = [state.get(leaf, {}) for leaf in tables[name].leaves()]
                if parts[0]:
                    named[name] = combine_parts(tables[name], parts, self._where(name))
            elif p in state and (not tables or not is_secondary_leaf(p)):
                named[name] = copied(state[p], shown_object)
        out: dict[str, Any] = {"state": named}
        if self._save_groups:
            out["param_groups"] = [
                {"params": self._names_in(group), **copied(settings_of(group))} for group in self.param_groups
            ]
        return out

    def _tables(self) -> dict[str, TiledTable]:
        """Return the sharded tables by the name of their first leaf; the state of each is one entry."""
        return tables_by_name(self.params)

    def _names_in(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names of a group's parameters; a sharded table has one name."""
        names = self._names()
        return sorted(names[p] for p in group["params"] if not is_secondary_leaf(p))

    def _where(self, name: str) -> str:
        return f"{type(self).__name__}: state of '{name}'"

    def _make_tiles_state(self, tables: Mapping[str, TiledTable]) -> set[str]:
        """Create the state of sharded tables that have none; return their names.

        All ranks must have the same entries. A rank without a tile of a table never gets a gradient, so its first step
        would create no state. Therefore no rank waits for its first step.
        """
        leaves = {
            f"{name}.{i}" if i else name: leaf
            for name, table in tables.items()
            for i, leaf in enumerate(table.leaves())
        }
        new = {name: leaf for name, leaf in leaves.items() if not self.state.get(leaf) and stepped_by_optimizer(leaf)}
        self._init({name: leaf for name, leaf in new.items() if id(leaf) not in self._stateless}, set())
        self._stateless |= {id(leaf) for leaf in new.values() if not self.state.get(leaf)}
        return {name for name in tables if name in new}

    def _state_names(self) -> list[str]:
        """Return all names that may occur in "state" of the state dict."""
        return list(self.params)

    def _plan_load(self, given: Mapping[str, Any], plan: list[Callable[[], None]]) -> None:
        """Check the state dict, and append the writes to `plan`."""
        class_name = type(self).__name__
        self._refuse_unnamed_state()
        if "state" not in given:
            raise ConfigError(
                f"{class_name}: got a state dict with {sorted(given)}; expected 'state'. Pass a state_dict()."
            )
        loaded, state, tables = given["state"], self.state, self._tables()
        fresh = self._make_tiles_state(tables)
        params = {name: p for name, p in self.params.items() if not tables or not is_secondary_leaf(p)}
        here = {name for name, p in params.items() if state.get(p) and name not in fresh}
        same_keys(f"{class_name}: state", here, loaded, optional=set(params) - here)
        # In the same order on every rank, since loading tiles is a collective.
        for name in sorted(set(tables) & set(loaded)):
            if name in here or not isinstance(loaded[name], Mapping) or loaded[name]:
                leaves = tables[name].leaves()
                parts = [state.get(leaf, {}) for leaf in leaves]
                if any(parts) or not isinstance(loaded[name], Mapping):
                    plan_parts(tables[name], parts, loaded[name], self._where(name), plan)
                else:  # a table that is frozen now: load its state for later, as for other parameters
                    parts = split_loaded_state(tables[name], loaded[name], self._where(name), plan)
                    plan.extend(setter(state, leaf, own) for leaf, own in zip(leaves, parts, strict=True))
        for name, value in loaded.items():
            tensor = params[name]
            if name in tables:
                continue
            if name in here:
                plan_value(state, tensor, value, self._where(name), plan)
            elif value:
                plan.append(setter(state, tensor, adopted(value, tensor)))
        if self._save_groups:
            if "param_groups" not in given:
                raise ConfigError(
                    f"{class_name}: got a state dict without 'param_groups'; expected them after "
                    "save_param_groups(True). Save them, or call save_param_groups(False) before loading."
                )
            self._plan_groups(given["param_groups"], plan)

    def _plan_groups(self, loaded: Iterable[Mapping[str, Any]], plan: list[Callable[[], None]]) -> None:
        class_name = type(self).__name__
        groups = {tuple(self._names_in(group)): group for group in self.param_groups}
        given = {tuple(sorted(group["params"])): group for group in loaded}
        if set(groups) != set(given):
            raise ConfigError(
                f"{class_name}: got param groups {_listed(given)}; expected {_listed(groups)}. Make the optimizer with "
                "the same groups, or call save_param_groups(False) before loading."
            )
        for key, group in given.items():
            for setting, value in settings_of(group).items():
                if setting in self._of_this_run:
                    continue
                if isinstance(groups[key].get(setting), Tensor):
                    plan_value(groups[key], setting, value, f"{class_name}: param group setting '{setting}'", plan)
                else:
                    plan.append(setter(groups[key], setting, copied(value)))

    def _refuse_unnamed_state(self) -> None:
        known = set(self.params.values())
        for tensor in self.state:
            if tensor not in known:
                raise ConfigError(
                    f"{type(self).__name__}: got state of {_shown(tensor)}, which has no name; expected only state of "
                    "named parameters. Add it with add_param_group, or pass it in params."
                )

    # ------------------------------------------------------------------------------------- parameters, settings

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add a group of named parameters: `{"params": {name: parameter} or [(name, parameter), ...], "lr": ...}`.

        Raises:
            ConfigError: parameters without names, or a name or a parameter that this optimizer already has.
        """
        named = self._new_params(param_group)
        self.param_groups.append({**settings_of(param_group), "params": list(named.values())})
        self.params = {**self.params, **named}

    def _new_params(self, param_group: Mapping[str, Any]) -> dict[str, Tensor]:
        """Check and return the named parameters of a new group."""
        class_name, given = type(self).__name__, param_group.get("params")
        pairs = list(given.items()) if isinstance(given, Mapping) else None
        if pairs is None and isinstance(given, Iterable) and not isinstance(given, Tensor):
            pairs = [pair for pair in given if isinstance(pair, tuple) and len(pair) == 2]
            pairs = pairs if len(pairs) == len(list(given)) else None
        if not pairs or not all(isinstance(n, str) and isinstance(p, Tensor) for n, p in pairs):
            raise ConfigError(
                f"{class_name}: add_param_group got parameters without names; expected names. Pass "
                "{'params': {name: parameter, ...}, ...} or [(name, parameter), ...]."
            )
        names = self._names()
        for name, tensor in pairs:
            if name in self.params or tensor in names:
                raise ConfigError(
                    f"{class_name}: add_param_group got '{name}', already present as '{names.get(tensor, name)}'; "
                    "expected a new parameter with a new name. Leave it out."
                )
        return dict(pairs)

    @torch.no_grad()
    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Create the state that `step()` would create lazily, for example before loading a checkpoint.

        Training is not affected: parameters, gradients, settings and step counts do not change, and no hook runs. The
        exception is SGD with dampening, which torch does not apply in a first step. Temporarily copies the parameters
        without state (`state_creation.py` explains the reason).

        Args:
            sparse_grad_parameter_names: parameters with sparse (COO) gradients, which some optimizers handle
                differently. Tables after `set_sparse_grad` need not be listed.

        Raises:
            ConfigError: unknown names, or an optimizer that steps by a closure only (LBFGS).
        """
        sparse = sparse_grad_parameter_names or set()
        unknown = sparse - set(self.params)
        if unknown:
            raise ConfigError(
                f"{type(self).__name__}: init_state got {sorted(unknown)}; expected names of parameters. Correct the "
                "names."
            )
        self._init({n: p for n, p in self.params.items() if p.requires_grad and not self.state.get(p)}, sparse)

    def _init(self, new: Mapping[str, Tensor], sparse: set[str]) -> None:
        """Create the state of parameters that have none."""
        layouts = {p: torch.sparse_coo if name in sparse else gradient_layout(p) for name, p in new.items()}
        create_lazy_state(self._stepping(), layouts, self.params.values())

    def _stepping(self) -> Optimizer:
        """Return the optimizer whose `step` creates the state."""
        return self

    def set_optimizer_step(self, step: int) -> None:
        """Set the step count in the state of every parameter that has one."""
        self.init_state()
        for tensor in self.params.values():
            set_step(self.state.get(tensor, {}), step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Write settings to every group that has them: `{"lr": 0.1}`.

        Raises:
            ConfigError: a setting that no group has.
        """
        for setting, value in params_dict.items():
            groups = [group for group in self.param_groups if setting in group and setting != "params"]
            if not groups:
                raise ConfigError(
                    f"{type(self).__name__}: got the setting '{setting}', which no param group has; expected some of "
                    f"{sorted({key for group in self.param_groups for key in settings_of(group)})}. Leave it out."
                )
            for group in groups:
                write_setting(group, setting, value)

    # --------------------------------------------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        # Do not copy hooks and a `step` that a scheduler wrapped: they belong to this object.
        own = {key: value for key, value in self.__dict__.items() if key not in (*_HOOKS, "step")}
        return {**own, "_stateless": set()}  # ids are valid in this process only


def _listed(groups: Iterable[tuple[str, ...]]) -> str:
    return "; ".join("[" + ", ".join(key) + "]" for key in groups) or "none"


def _shown(key: Any) -> str:
    return f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
