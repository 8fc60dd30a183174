"""Attachment of optimizers: the backward pass updates the parameter, and `.grad` stays None."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.optim.step_checks import check_optimizers_at_next_step
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.spec.torch_optimizer import from_torch
from tilerec.storage.shared_param_group import SharedParamGroup
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

    Works on meta and real parameters, before or after sharding. The optimizer stays attached through `.to()`,
    `to_empty`, `deepcopy` and pickling. Tables of one call share their settings
    (`module.fused_optimizer.param_groups`).

    Args:
        optimizer_class: `torch.optim.SGD/Adagrad/Adam/AdamW`, a class of `tilerec.optim`, or a spec object
            (`tilerec.spec.optimizer`). Only looked-up rows are updated; moments, momentum and decay of other rows do
            not change.
        params: parameters of tables. Other parameters (dense layers) get torch's own in-backward optimizer. A frozen
            table (`requires_grad` False) gets no optimizer and no state: attach one when it is trained again.
        optimizer_kwargs: the class's arguments (`lr=…`); not allowed with a spec. With `capturable=True` updates may be
            captured in CUDA graphs: update counts and the learning rate are on the tables' device; `lr` may be a 0-d
            tensor there.
        register_hook: as in torch's function of this name: with False, parameters outside tables keep their optimizer
            (`_in_backward_optimizers`), and the backward pass does not step it. Tables are still updated, with a
            warning.
        replace: True: a table that already has an optimizer gets the new one, with new state. False: raise.

    Raises:
        ConfigError: a table already has an optimizer (then none is attached); an argument that a fused update does not
            support (amsgrad, maximize, …); `params` that are not parameters.
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
                f"apply_optimizer_in_backward: got {cls!r:.200} with {len(dense)} parameters outside tables (the first "
                f"has shape {tuple(dense[0].shape)}); expected parameters of tables. Attach a torch.optim class to the "
                "others, or pass the parameters of the tables alone."
            )
    if tables:
        if not register_hook:
            warnings.warn(
                f"apply_optimizer_in_backward: register_hook=False has no effect on {len(tables)} tables: the backward "
                "pass updates a table with an attached optimizer. To step it yourself, attach none.",
                stacklevel=2,
            )
        spec = _spec(optimizer_class, kwargs)
        if not replace:
            _refuse_attached(tables.values(), spec)
        group = SharedParamGroup.of(spec, kwargs.get("lr", kwargs.get("learning_rate")))
        for rows in tables.values():
            rows.attach(spec, group)
        check_optimizers_at_next_step()
    if dense:
        apply_in_backward(optimizer_class, dense, kwargs, register_hook)


def _refuse_attached(tables: Iterable[TableRows], spec: OptimizerSpec) -> None:
    """Raise a `ConfigError` for a table that has an optimizer: replacing it would drop its state."""
    for rows in tables:
        if rows.spec is not None:
            raise ConfigError(
                f"Table '{rows.name}': got {type(spec).__name__}, but {type(rows.spec).__name__} is already attached; "
                "expected a table without an optimizer. Leave the table out of params, or pass replace=True, which "
                "drops its state."
            )


@contextmanager
def restore_optimizers_on_error(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """Restore the tables' earlier optimizers and state if the block raises."""
    found = {id(rows): rows for rows in map(rows_of, params) if rows is not None}
    before = [(rows, rows.spec, rows.group, rows.state, rows.takes_gradients, rows._counter) for rows in found.values()]
    try:
        yield
    except BaseException:
        for rows, spec, group, state, takes, counter in before:
            rows.spec, rows.group, rows.state = spec, group, state
            rows.takes_gradients, rows._counter = takes, counter
        raise


def _parameters(caller: str, params: Any) -> list[nn.Parameter]:
    """Check and return the parameters. Without checks, some wrong arguments would silently attach to nothing."""
    fix = "expected parameters. Pass module.parameters() or a list of parameters"
    if isinstance(params, nn.Module):
        raise ConfigError(
            f"{caller}: got a {type(params).__name__}; expected its parameters. Pass module.parameters()."
        )
    if isinstance(params, Tensor):
        raise ConfigError(
            f"{caller}: got one parameter of shape {tuple(params.shape)}; expected a list of them. Pass [parameter]."
        )
    if isinstance(params, Mapping):
        raise ConfigError(
            f"{caller}: got a {type(params).__name__} of parameters; expected a list. Pass its .values()."
        )
    if not isinstance(params, Iterable):
        raise ConfigError(f"{caller}: got a {type(params).__name__}; {fix}.")
    given = list(params)
    if not given:
        raise ConfigError(f"{caller}: got no parameters (a generator is empty after its first use); {fix}.")
    for parameter in given:
        if isinstance(parameter, tuple):
            raise ConfigError(
                f"{caller}: got pairs, as of module.named_parameters(); expected parameters. Pass module.parameters()."
            )
        if not isinstance(parameter, nn.Parameter):
            raise ConfigError(f"{caller}: got a {type(parameter).__name__} among the parameters; {fix}.")
    return given


def _spec(optimizer_class: Any, kwargs: dict[str, Any]) -> OptimizerSpec:
    if isinstance(optimizer_class, OptimizerSpec):
        if kwargs:
            raise TypeError(
                f"optimizer_kwargs: got {sorted(kwargs)} with a {type(optimizer_class).__name__} object; expected "
                "none. Set them in the object."
            )
        return optimizer_class
    return from_torch(optimizer_class, kwargs)


def set_sparse_grad(params: Iterable[nn.Parameter], enabled: bool = True) -> None:
    """Make the backward pass of tables without an attached optimizer write sparse gradients to `.grad`.

    They are coalesced sparse COO tensors of the looked-up rows. `.grad` is set at the end of the backward pass, so
    hooks of the parameter do not get it. `torch.optim.SparseAdam`, `SGD` and `Adagrad` can step it.
    """
    for parameter in params:
        rows = rows_of(parameter)
        if rows is None:
            raise TypeError(
                f"set_sparse_grad: got a parameter of shape {tuple(parameter.shape)} outside tables; expected "
                "parameters of tables. Leave it out."
            )
        rows.takes_gradients = enabled or rows.spec is not None
        rows.training_changed()


__all__ = ["apply_optimizer_in_backward", "set_sparse_grad"]
