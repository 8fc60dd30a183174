"""Which parameters the backward pass updates, and which are left for an optimizer to step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from tilerec.storage.table_rows import rows_of

# Where torch's own in-backward optimizers leave their mark.
_MARKS = ("_overlapped_optimizer", "_in_backward_optimizers")


def updates_in_backward(parameter: nn.Parameter) -> bool:
    """Whether an optimizer is attached: the backward pass updates the parameter and `.grad` stays None."""
    rows = rows_of(parameter)
    return (rows is not None and rows.spec is not None) or any(
        bool(getattr(parameter, mark, None)) for mark in _MARKS
    )


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """The named parameters that the backward pass does not update; with `include=True` those that it does.

    `dict(in_backward_optimizer_filter(model.named_parameters()))` is what the dense optimizer is for.
    """
    for name, parameter in named_parameters:
        if updates_in_backward(parameter) == include:
            yield name, parameter
