"""Creation of the state that an optimizer makes at its first step, without a training step.

Most optimizers create their state lazily in `step()` and update it in the same call. So this file runs a step with zero
gradients, over containers that record the first value of every entry, and then restores these values:

    during the step   state["mu_product"] = 1.0     first value: recorded
                      state["mu_product"] *= 0.45   updated
    afterwards        state["mu_product"]   1.0     restored

Parameters, gradients and the groups' settings are restored, too. No hook runs, and no scheduler counts the step. If the
first value of an entry is a result of the step (SGD's `momentum_buffer`), it stays: for zero gradients it is zero.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tilerec.errors import ConfigError

_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@torch.no_grad()
def create_lazy_state(optimizer: Optimizer, layouts: Mapping[Tensor, torch.layout], others: Iterable[Tensor]) -> None:
    """Create the state of parameters that have none. Nothing else changes, also if the step fails.

    Args:
        optimizer: any optimizer whose `step()` needs no closure.
        layouts: parameters without state -> layout of their gradients.
        others: the optimizer's other parameters.

    Raises:
        ConfigError: the optimizer's `step` requires a closure.
    """
    if not layouts:
        return
    step = _bare_step(optimizer)
    grads = {p: p.grad for p in (*others, *layouts)}
    values = {p: p.detach().clone() for p in layouts}
    try:
        for p in grads:
            p.grad = None
        for p, layout in layouts.items():
            p.grad = torch.zeros_like(p, layout=layout)
        with (
            _restore_groups(optimizer),
            _disable_hooks(optimizer),
            _keep_first_values(optimizer, list(layouts)),
        ):
            for group in optimizer.param_groups:
                if group.get("weight_decay") is not None:
                    group["weight_decay"] = 0 * group["weight_decay"]
            step()
    finally:
        for p, grad in grads.items():
            p.grad = grad
        for p, value in values.items():
            p.detach().copy_(value)


def _bare_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return the `step` of the class, without the wrappers of torch (hooks, profiling) and schedulers."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        class_name = type(optimizer).__name__
        raise ConfigError(
            f"{class_name}: got a step() that requires a closure; expected one without, to create the state before "
            "training. Call optimizer.step(closure) instead of init_state(), and use another optimizer for sharded "
            "tables."
        )
    return lambda: step(optimizer)


@contextmanager
def _disable_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Disable the optimizer's hooks: a step that calls `super().step()` runs torch's wrapper, which calls them."""
    hooks = {name: getattr(optimizer, name) for name in _STEP_HOOKS}
    try:
        for name in hooks:
            setattr(optimizer, name, OrderedDict())
        yield
    finally:
        for name, own in hooks.items():
            setattr(optimizer, name, own)


@contextmanager
def _restore_groups(optimizer: Optimizer) -> Iterator[None]:
    kept = [
        {key: _InitialValue(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    try:
        yield
    finally:
        for group, settings in zip(optimizer.param_groups, kept, strict=True):
            for key in set(group) - set(settings) - {"params", "param_names"}:
                del group[key]
            for key, start in settings.items():
                was = start.again()
                if group.get(key) is not was:
                    group[key] = was


@contextmanager
def _keep_first_values(optimizer: Optimizer, new: Collection[Tensor]) -> Iterator[None]:
    """Reset new entries in the state of `new` parameters to their first values at the end of the block."""
    held: Any = optimizer.state
    settable = "state" in vars(optimizer)
    recorded = _RecordingStates(held, new)
    if settable:
        optimizer.state = recorded
    try:
        yield
        if settable:
            for p in new:
                if p in recorded:
                    entries = recorded[p]
                    held[p] = entries.at_start() if isinstance(entries, _RecordingState) else entries
    finally:
        if settable:
            optimizer.state = held


class _InitialValue:
    """Copy of a value at one time; of a tensor with equal elements it stores one number."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._was: Any = None
        if isinstance(value, Tensor):
            self._was = _uniform_value(value)
            if self._was is None:
                self._was = value.detach().clone()
        elif isinstance(value, (list, dict, set)):
            self._was = copy.deepcopy(value)

    def again(self) -> Any:
        """Restore and return the value; a tensor is restored in place."""
        if not isinstance(self._value, Tensor):
            return self._value if self._was is None else self._was
        if isinstance(self._was, Tensor):
            self._value.detach().copy_(self._was)
        else:
            self._value.detach().fill_(self._was)
        return self._value


def _uniform_value(value: Tensor) -> float | None:
    """Return the value of all elements if they are equal, else None."""
    if value.layout is not torch.strided or not value.is_floating_point() or not value.numel():
        return None
    low, high = value.detach().aminmax()
    return low.item() if torch.equal(low, high) else None


class _RecordingState(dict[Any, Any]):
    """State of one parameter; records the first value of every entry."""

    def __init__(self, entries: Mapping[Any, Any]) -> None:
        super().__init__()
        self._starts: dict[Any, _InitialValue] = {}
        self.update(entries)

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self._starts:
            self._starts[key] = _InitialValue(value)
        super().__setitem__(key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **named: Any) -> None:
        for key, value in dict(*args, **named).items():
            self[key] = value

    def at_start(self) -> dict[Any, Any]:
        return {key: self._starts[key].again() for key in self}


class _RecordingStates(defaultdict[Any, Any]):
    """State of an optimizer; wraps the states of new parameters in `_RecordingState`."""

    def __init__(self, held: MutableMapping[Any, Any], new: Iterable[Tensor]) -> None:
        super().__init__(getattr(held, "default_factory", None))
        self.new = set(new)
        for key, value in held.items():
            if key not in self.new or value:
                super().__setitem__(key, value)

    def __missing__(self, key: Any) -> Any:
        if key not in self.new or self.default_factory is None:
            return super().__missing__(key)
        self[key] = {}
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        wraps = key in self.new and isinstance(value, Mapping) and not isinstance(value, _RecordingState)
        super().__setitem__(key, _RecordingState(value) if wraps else value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]
