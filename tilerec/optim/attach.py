"""Attaching an optimizer: the backward pass updates the parameter, `.grad` stays None."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from tilerec.spec.optimizer import OptimizerSpec, from_torch
from tilerec.storage.table_rows import HyperGroup, TableRows


def apply_optimizer_in_backward(
    optimizer_class: type[Any] | Iterable[type[Any]] | OptimizerSpec,
    params: Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Attach an optimizer to parameters: from now on every backward pass updates them.

    Works on meta and real parameters, before or after sharding, and stays through `.to()`, `to_empty`, `deepcopy` and
    pickling. A table that has an optimizer already gets the new one with fresh state. Tables attached by one
    call share their numbers (`module.fused_optimizer.param_groups`).

    Args:
        optimizer_class: `torch.optim.SGD/Adagrad/Adam/AdamW`, one of `tilerec.optim`'s, or a ready spec
            (`tilerec.spec.optimizer`). Touched rows only: moments, momentum and decay of other rows stand still.
        params: parameters of tables; others (dense layers) are given to torch's own in-backward optimizer.
        optimizer_kwargs: the class's arguments (`lr=…`); refused with a spec.

    Raises:
        ConfigError: an argument that has no meaning for a fused update (amsgrad, maximize, …).
    """
    kwargs = dict(optimizer_kwargs or {})
    tables: dict[int, TableRows] = {}
    dense: list[nn.Parameter] = []
    for parameter in params:
        rows = getattr(parameter, "_tilerec_rows", None)
        if rows is None:
            dense.append(parameter)
        else:
            tables[id(rows)] = rows
    if tables:
        spec = _spec(optimizer_class, kwargs)
        group = HyperGroup.of(spec)
        group["params"] = [rows.leaf for rows in tables.values()]
        for rows in tables.values():
            rows.attach(spec, group)
    if dense:
        from torch.distributed.optim import _apply_optimizer_in_backward

        _apply_optimizer_in_backward(optimizer_class, dense, kwargs)


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
        rows = getattr(parameter, "_tilerec_rows", None)
        if rows is None:
            raise TypeError(
                f"sparse gradients are for parameters of tables; got one of shape {tuple(parameter.shape)} "
                "that is none."
            )
        rows.takes_gradients = enabled or rows.spec is not None


__all__ = ["apply_optimizer_in_backward", "set_sparse_grad"]
