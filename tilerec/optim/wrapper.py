"""Wrappers of optimizers: a torch optimizer with named state, and the base of warm-up and clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tilerec.errors import ConfigError
from tilerec.optim.keyed import KeyedOptimizer
from tilerec.optim.loading_plan import settings_of
from tilerec.optim.non_elementwise import needs_elements, warn_of_tiled_params
from tilerec.optim.sharded_state import (
    TiledTable,
    accepts_any_state_shape,
    empty_tile_leaves,
    gradient_layout,
    stepped_by_optimizer,
    together,
)
from tilerec.optim.tile_steppers import record_steppers


class KeyedOptimizerWrapper(KeyedOptimizer):
    """Wrapper of a torch optimizer that saves its state by parameter name.

        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=1e-3))

    Args:
        params: name -> parameter.
        optim_factory: makes the optimizer from the list of parameters.
        pass_params_dict: pass the name -> parameter dict to the factory instead of the list.

    It steps this rank's tiles of sharded tables without an attached optimizer. Element-wise rules update tiles like the
    whole table. Other rules (Adafactor, Muon, LBFGS) do not, and issue a warning.

    If `params` contains tiles of sharded tables, the constructor is collective: call it on all ranks, with all
    parameters of the tables. An error of the factory on one rank is raised on all.

    Raises:
        ConfigError: the factory made an optimizer with a parameter that is not in `params`, or it failed on another
            rank (the message has the rank and the reason).
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        optim_factory: Callable[[Any], Optimizer],
        pass_params_dict: bool = False,
    ) -> None:
        self._start()
        self.params = dict(params)
        with together(self.params.values(), "KeyedOptimizerWrapper", "making the optimizer"):
            self._make(optim_factory, pass_params_dict)
        self.defaults = self._optimizer.defaults
        self._bystanders = empty_tile_leaves(self.params.values())
        record_steppers(self, self._optimizer)  # now: state may be created or loaded before the first step
        warn_of_tiled_params(self._optimizer, self.params)

    def _make(self, optim_factory: Callable[[Any], Optimizer], pass_params_dict: bool) -> None:
        names = self._names()
        self._optimizer = optim_factory(self.params if pass_params_dict else list(self.params.values()))
        for group in self._optimizer.param_groups:
            for tensor in group["params"]:
                if tensor not in names:
                    raise ConfigError(
                        f"KeyedOptimizerWrapper: got a parameter of shape {tuple(tensor.shape)} in "
                        f"{type(self._optimizer).__name__}; expected parameters in params. Name it there."
                    )

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # type: ignore[override]
        return self._optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._optimizer.param_groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not self._bystanders:
            return self._optimizer.step(closure) if closure is not None else self._optimizer.step()
        # Also step the leaves of tables without a tile here, so their step counts equal those of the other ranks.
        before: dict[Tensor, Tensor | None] = {}

        def lend() -> None:
            for leaf in self._bystanders:
                if needs_elements(self._optimizer):
                    before[leaf], leaf.grad = leaf.grad, None
                elif leaf.grad is None and stepped_by_optimizer(leaf):
                    before[leaf], leaf.grad = None, torch.zeros_like(leaf, layout=gradient_layout(leaf))

        def after_closure() -> Any:
            assert closure is not None
            loss = closure()
            lend()
            return loss

        try:
            if closure is not None:
                return self._optimizer.step(after_closure)
            lend()
            return self._optimizer.step()
        finally:
            for leaf, grad in before.items():
                leaf.grad = grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def _stepping(self) -> Optimizer:
        return self._optimizer

    def _init(self, new: Mapping[str, Tensor], sparse: set[str]) -> None:
        if isinstance(self._optimizer, KeyedOptimizer):
            self._optimizer._init(new, sparse)
            return
        absent = set(self._bystanders) if needs_elements(self._optimizer) else set()
        super()._init({name: p for name, p in new.items() if p not in absent}, sparse)

    def _make_tiles_state(self, tables: Mapping[str, TiledTable]) -> set[str]:
        if needs_elements(self._optimizer):  # the same result on every rank, also on those without rows
            for name, table in tables.items():
                if stepped_by_optimizer(table.leaves()[0]) and not accepts_any_state_shape(table):
                    raise ConfigError(
                        f"{self._where(name)}: got {type(self._optimizer).__name__}, which has state per column of "
                        "each tile; expected state that can be combined to the whole table's. Place the table on every "
                        "rank (data_parallel), or use an element-wise optimizer."
                    )
        return super()._make_tiles_state(tables)

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        named = self._new_params(param_group)
        by_name = any("param_names" in group for group in self._optimizer.param_groups)
        tensors = list(named.items()) if by_name else list(named.values())
        self._optimizer.add_param_group({**settings_of(param_group), "params": tensors})
        self.params = {**self.params, **named}
        self._bystanders = empty_tile_leaves(self.params.values())
        record_steppers(self, self._optimizer)
        warn_of_tiled_params(self._optimizer, named)

    def set_optimizer_step(self, step: int) -> None:
        own = getattr(self._optimizer, "set_optimizer_step", None)
        if own is not None:
            own(step)
        else:
            super().set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        own = getattr(self._optimizer, "update_hyper_parameters", None)
        if own is not None:
            own(params_dict)
        else:
            super().update_hyper_parameters(params_dict)

    def post_load_state_dict(self) -> None:
        own = getattr(self._optimizer, "post_load_state_dict", None)
        if own is not None:
            own()


class OptimizerWrapper(KeyedOptimizer):
    """Delegation to a keyed optimizer: the base class of `WarmupOptimizer` and `GradientClippingOptimizer`.

    Raises:
        ConfigError: `optimizer` is not a `KeyedOptimizer`.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self._start()
        if not isinstance(optimizer, KeyedOptimizer):
            raise ConfigError(
                f"{type(self).__name__}: got a {type(optimizer).__name__}; expected a KeyedOptimizer. Wrap it: "
                "KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: ...)."
            )
        self._optimizer = optimizer
        self.defaults = optimizer.defaults

    @property
    def params(self) -> Mapping[str, Tensor]:  # type: ignore[override]
        return self._optimizer.params

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # type: ignore[override]
        return self._optimizer.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self._optimizer.param_groups

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self._optimizer.step(closure) if closure is not None else self._optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        self._optimizer.add_param_group(param_group)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        self._optimizer.init_state(sparse_grad_parameter_names)

    def _init(self, new: Mapping[str, Tensor], sparse: set[str]) -> None:
        self._optimizer._init(new, sparse)

    def save_param_groups(self, save: bool) -> None:
        super().save_param_groups(save)
        self._optimizer.save_param_groups(save)

    def set_optimizer_step(self, step: int) -> None:
        self._optimizer.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        self._optimizer.update_hyper_parameters(params_dict)

    def post_load_state_dict(self) -> None:
        if type(self._optimizer).load_state_dict is KeyedOptimizer.load_state_dict:
            self._optimizer.post_load_state_dict()

    def _state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def _state_names(self) -> list[str]:
        return self._optimizer._state_names()

    def _plan_load(self, given: Mapping[str, Any], plan: list[Callable[[], None]]) -> None:
        if type(self._optimizer).load_state_dict is KeyedOptimizer.load_state_dict:
            self._optimizer._plan_load(given, plan)
        else:
            plan.append(lambda: self._optimizer.load_state_dict(given))

    def __repr__(self) -> str:
        return f"{type(self).__name__} ({self._optimizer!r})"
