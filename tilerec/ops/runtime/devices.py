"""Check that all tensors of an op call are on one device.

A tensor's device is available on the host, so the check does not synchronize. It takes about 50 ns per tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from tilerec.errors import InputError
from tilerec.torch_private import device_of

OTHER_DEVICE_ARGUMENTS = frozenset({"sinks", "ticket", "starts", "bounds", "host", "collection", "anchor", "features"})
"""Tensor arguments that may be on another device: numbers that the host reads, table rows in host memory that a cache
reads, and the parts of a batch."""

LISTS_WITH_HOST_TENSOR = frozenset({"ordered"})
"""Tensor-list arguments whose last tensor is read by the host."""


def check_devices(weights: Sequence[Tensor], ids: Tensor, tables: Sequence[int], names: str) -> None:
    """Raise an `InputError` for a table on another device than the ids; `names` as in `raise_bad_id`."""
    device = ids.device
    for feature, t in enumerate(tables):
        here = weights[t].device
        if here != device:
            label = names.split(",")[feature] if names else ""
            name, _, table = label.rpartition("@")
            fix = "Move one of them with .to()"
            if here.type == "meta":
                fix = "Give it memory and its initial values with to_empty(device=...)"
            raise InputError(
                f"Table '{table or t}': its rows are on {here}, the ids of feature '{name or feature}' "
                f"are on {device}. {fix}."
            )


def on_one_device(op: str, kernel: Callable[..., Any], schema: Any) -> Callable[..., Any]:
    """Return the kernel, preceded by a check that its tensors are on one device.

    Args:
        op: the op's name, for messages.
        schema: the op's `torch.FunctionSchema`.
    """
    names = [argument.name for argument in schema.arguments]
    single: list[int] = []
    lists: list[int] = []
    for at, argument in enumerate(schema.arguments):
        if "Tensor" in str(argument.type) and argument.name not in OTHER_DEVICE_ARGUMENTS:
            (lists if "List" in str(argument.type) else single).append(at)

    optional = frozenset(at for at in lists if "Optional[Tensor]" in str(schema.arguments[at].type))
    host_last = frozenset(at for at in lists if names[at] in LISTS_WITH_HOST_TENSOR)

    @functools.wraps(kernel)
    def run(*args: Any, **named: Any) -> Any:
        # The dispatcher omits trailing arguments that equal their defaults.
        count = len(args)
        found = [args[at] for at in single if at < count and args[at] is not None]
        for at in lists:
            if at < count and args[at]:
                several = args[at][:-1] if at in host_last else args[at]
                found += [tensor for tensor in several if tensor is not None] if at in optional else several
        if len(set(map(device_of, found))) > 1:
            given = {names[at]: args[at] for at in sorted((*single, *lists)) if at < count}
            given |= {names[at]: args[at][:-1] for at in host_last if given.get(names[at])}
            raise_other_device(op, given, dict(zip(names, args, strict=False)))
        return kernel(*args, **named)

    return run


def raise_other_device(op: str, given: Mapping[str, Any], call: Mapping[str, Any]) -> NoReturn:
    """Raise the `InputError` for a call whose tensors are on several devices.

    Args:
        op: the op's name.
        given: the checked tensor arguments, by name.
        call: all arguments by name; a lookup's "tables" and "names" identify its tables in the message.
    """
    tensors = list(_tensors_by_name(given))
    anchor = next((entry for entry in tensors if entry[0] in ("ids", "ids_N")), tensors[0])
    if anchor[1].is_meta:  # a single tensor left on meta is the most likely cause
        anchor = next((entry for entry in tensors if not entry[1].is_meta), anchor)
    elif "weights" in given and "names" in call:  # a lookup, whose tables have names
        check_devices(given["weights"], anchor[1], call["tables"], call["names"])
    name, tensor = next(entry for entry in tensors if entry[1].device != anchor[1].device)
    raise InputError(
        f"{op}: got {name} on {tensor.device}; expected {anchor[1].device}, where {anchor[0]} is. Move one of them "
        "with .to()."
    )


def _tensors_by_name(given: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in given.items():
        if isinstance(value, Tensor):
            yield name, value
        elif value:
            yield from ((f"{name}[{i}]", tensor) for i, tensor in enumerate(value) if tensor is not None)
