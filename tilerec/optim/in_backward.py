"""Separation of parameters that the backward pass updates from parameters that an optimizer steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from tilerec.storage.table_rows import rows_of

# Attributes that torch's own in-backward optimizers set on parameters.
_OPTIMIZER_ATTRIBUTES = ("_overlapped_optimizer", "_in_backward_optimizers")


def updates_in_backward(parameter: nn.Parameter) -> bool:
    """Return True if an optimizer is attached: the backward pass updates the parameter, and `.grad` stays None."""
    rows = rows_of(parameter)
    return (rows is not None and rows.spec is not None) or any(
        bool(getattr(parameter, mark, None)) for mark in _OPTIMIZER_ATTRIBUTES
    )


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Iterate over named parameters that the backward pass does not update; with `include=True` over the others.

    `dict(in_backward_optimizer_filter(model.named_parameters()))` are the parameters for the dense optimizer.
    """
    for name, parameter in named_parameters:
        if updates_in_backward(parameter) == include:
            yield name, parameter
