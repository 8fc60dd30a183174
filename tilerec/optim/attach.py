"""Attaching an optimizer: the backward pass updates the parameter, `.grad` stays None."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.optim.idle import watch_optimizers
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.spec.torch_optimizer import from_torch
from tilerec.storage.hyper_group import HyperGroup
from tilerec.storage.table_rows import TableRows, rows_of
from tilerec.torch_private import apply_in_backward


def apply_optimizer_in_backward(
    optimizer_class: type[Any] | Iterable[type[Any]] | OptimizerSpec,
    params: Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any] | None = None,
    register_hook: bool = True,
    *,
    replace: bool = False,
) -> None:
    """Attach an optimizer to parameters: from now on every backward pass updates them.

    Works on meta and real parameters, before or after sharding, and stays through `.to()`, `to_empty`, `deepcopy` and
    pickling. Tables attached by one
    call share their numbers (`module.fused_optimizer.param_groups`).

    Args:
        optimizer_class: `torch.optim.SGD/Adagrad/Adam/AdamW`, one of `tilerec.optim`'s, or a ready spec
            (`tilerec.spec.optimizer`). Touched rows only: moments, momentum and decay of other rows stand still.
        params: parameters of tables; others (dense layers) are given to torch's own in-backward optimizer. A frozen
            table (`requires_grad` False) gets no optimizer and no state: attach when it is thawed.
        optimizer_kwargs: the class's arguments (`lr=…`); refused with a spec. With `capturable=True` updates may be
            captured in CUDA graphs: update counts, and the learning rate, lie on the tables' device; `lr` may be a 0-d
            tensor there.
        register_hook: of torch's function of this name: with False, parameters of no table keep their optimizer
            (`_in_backward_optimizers`) and are not stepped by the backward. Tables are updated all the same, with a
            warning.
        replace: a table that has an optimizer already gets the new one, with fresh state; by default that is refused.

    Raises:
        ConfigError: a table that has an optimizer already (none is attached then); an argument that has no meaning
            for a fused update (amsgrad, maximize, …); `params` that are no parameters.
    """
    params = _parameters("apply_optimizer_in_backward", params)
    kwargs = dict(optimizer_kwargs or {})
    tables: dict[int, TableRows] = {}
    dense: list[nn.Parameter] = []
    for parameter in params:
        rows = rows_of(parameter)
        if rows is None:
            dense.append(parameter)
        elif parameter.requires_grad:
            tables[id(rows)] = rows
    several = isinstance(optimizer_class, Sequence) and not isinstance(optimizer_class, str)
    classes: Sequence[Any] = cast(Any, optimizer_class) if several else [optimizer_class]
    for cls in classes if dense else ():
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise ConfigError(
                f"apply_optimizer_in_backward: {cls!r:.200} is for tables, and {len(dense)} of the parameters belong "
                f"to none (the first has shape {tuple(dense[0].shape)}); attach a torch.optim class to those, or pass "
                "the parameters of the tables alone."
            )
    if tables:
        if not register_hook:
            warnings.warn(
                f"apply_optimizer_in_backward: register_hook=False has no effect on {len(tables)} tables: a table with "
                "an attached optimizer is updated in the backward pass. To step it yourself, attach none.",
                stacklevel=2,
            )
        spec = _spec(optimizer_class, kwargs)
        if not replace:
            _refuse_attached(tables.values(), spec)
        group = HyperGroup.of(spec, kwargs.get("lr", kwargs.get("learning_rate")))
        for rows in tables.values():
            rows.attach(spec, group)
        watch_optimizers()
    if dense:
        apply_in_backward(optimizer_class, dense, kwargs, register_hook)


def _refuse_attached(tables: Iterable[TableRows], spec: OptimizerSpec) -> None:
    """Raise a `ConfigError` for a table that has an optimizer: two cannot both apply, and its state would be lost."""
    for rows in tables:
        if rows.spec is not None:
            raise ConfigError(
                f"Table '{rows.name}': got {type(spec).__name__}, but {type(rows.spec).__name__} is attached already; "
                "expected a table without an optimizer. Leave the table out of params, or pass replace=True, which "
                "drops the state it has."
            )


@contextmanager
def unattached_on_error(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """If the block raises, what it attached to tables is taken off again, and what was attached before is back."""
    found = {id(rows): rows for rows in map(rows_of, params) if rows is not None}
    before = [
        (rows, rows.spec, rows.group, rows.state, rows.takes_gradients, rows._counter)
        for rows in found.values()
    ]
    try:
        yield
    except BaseException:
        for rows, spec, group, state, takes, counter in before:
            rows.spec, rows.group, rows.state = spec, group, state
            rows.takes_gradients, rows._counter = takes, counter
        raise


def _parameters(who: str, params: Any) -> list[nn.Parameter]:
    """The parameters, checked: the wrong things look right and would be attached to nothing."""
    fix = "pass module.parameters() or a list of parameters"
    if isinstance(params, nn.Module):
        raise ConfigError(
            f"{who}: got a {type(params).__name__}, wanted its parameters; pass module.parameters()."
        )
    if isinstance(params, Tensor):
        raise ConfigError(
            f"{who}: got one parameter of shape {tuple(params.shape)}, wanted several; pass [parameter]."
        )
    if isinstance(params, Mapping):
        raise ConfigError(f"{who}: got a {type(params).__name__} of parameters; pass its .values().")
    if not isinstance(params, Iterable):
        raise ConfigError(f"{who}: got a {type(params).__name__}; {fix}.")
    given = list(params)
    if not given:
        raise ConfigError(f"{who}: got no parameters (a generator is empty once it was read); {fix}.")
    for parameter in given:
        if isinstance(parameter, tuple):
            raise ConfigError(f"{who}: got pairs, as of module.named_parameters(); pass module.parameters().")
        if not isinstance(parameter, nn.Parameter):
            raise ConfigError(f"{who}: got a {type(parameter).__name__} among the parameters; {fix}.")
    return given


def _spec(optimizer_class: Any, kwargs: dict[str, Any]) -> OptimizerSpec:
    if isinstance(optimizer_class, OptimizerSpec):
        if kwargs:
            raise TypeError(
                f"optimizer_kwargs {sorted(kwargs)} come with a ready {type(optimizer_class).__name__}; set them there."
            )
        return optimizer_class
    return from_torch(optimizer_class, kwargs)


def set_sparse_grad(params: Iterable[nn.Parameter], enabled: bool = True) -> None:
    """Without an attached optimizer, make the backward fill `.grad` with a coalesced sparse COO tensor of
    touched rows.

    The gradient appears when the backward pass ends (hooks on the parameter do not see it);
    `torch.optim.SparseAdam`, `SGD` and `Adagrad` step it.
    """
    for parameter in params:
        rows = rows_of(parameter)
        if rows is None:
            raise TypeError(
                f"sparse gradients are for parameters of tables; got one of shape {tuple(parameter.shape)} "
                "that is none."
            )
        rows.takes_gradients = enabled or rows.spec is not None


__all__ = ["apply_optimizer_in_backward", "set_sparse_grad"]
