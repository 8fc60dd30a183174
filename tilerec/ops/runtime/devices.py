"""The device of a call: every tensor that an op reads or writes is on one.

Devices are known on the host, so the check waits for nothing. It costs some 50 ns per tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from tilerec.errors import InputError
from tilerec.torch_private import device_of

ANYWHERE = frozenset({"sinks", "ticket", "starts", "bounds", "host"})
"""Tensor arguments that may be on another device: numbers that the host reads, and rows that a cache reads from host
memory."""

HOST_LAST = frozenset({"ordered"})
"""Lists of tensors of which the host reads the last one."""


def check_devices(weights: Sequence[Tensor], ids: Tensor, tables: Sequence[int], names: str) -> None:
    """Raise an `InputError` for a table that is not where the ids are; `names` as in `raise_bad_id`."""
    device = ids.device
    for feature, t in enumerate(tables):
        here = weights[t].device
        if here != device:
            label = names.split(",")[feature] if names else ""
            name, _, table = label.rpartition("@")
            fix = "move one of them with .to()"
            if here.type == "meta":
                fix = "give it memory and its initial values with to_empty(device=...)"
            raise InputError(
                f"Table '{table or t}': its rows are on {here}, the ids of feature '{name or feature}' "
                f"on {device}; {fix}."
            )


def on_one_device(op: str, kernel: Callable[..., Any], schema: Any) -> Callable[..., Any]:
    """Return the kernel behind the check that its tensors are on one device.

    Args:
        op: its name, for messages.
        schema: of the op (`torch.FunctionSchema`).
    """
    names = [argument.name for argument in schema.arguments]
    single: list[int] = []
    lists: list[int] = []
    for at, argument in enumerate(schema.arguments):
        if "Tensor" in str(argument.type) and argument.name not in ANYWHERE:
            (lists if "List" in str(argument.type) else single).append(at)

    host_last = frozenset(at for at in lists if names[at] in HOST_LAST)

    @functools.wraps(kernel)
    def run(*args: Any, **named: Any) -> Any:
        # The dispatcher leaves out trailing arguments that have their defaults.
        count = len(args)
        found = [args[at] for at in single if at < count and args[at] is not None]
        for at in lists:
            if at < count and args[at]:
                found += args[at][:-1] if at in host_last else args[at]
        if len(set(map(device_of, found))) > 1:
            given = {names[at]: args[at] for at in sorted((*single, *lists)) if at < count}
            given |= {names[at]: args[at][:-1] for at in host_last if given.get(names[at])}
            raise_other_device(op, given, dict(zip(names, args, strict=False)))
        return kernel(*args, **named)

    return run


def raise_other_device(op: str, given: Mapping[str, Any], call: Mapping[str, Any]) -> NoReturn:
    """Raise the `InputError` for a call whose tensors are on several devices.

    Args:
        op: its name.
        given: the tensor arguments that the check covers, by name.
        call: all arguments, by name: "tables" and "names" of a lookup name its tables.
    """
    tensors = list(_named(given))
    anchor = next((entry for entry in tensors if entry[0] in ("ids", "ids_N")), tensors[0])
    if anchor[1].is_meta:  # one tensor of a call left on meta is likelier than all but one
        anchor = next((entry for entry in tensors if not entry[1].is_meta), anchor)
    elif "weights" in given and "names" in call:  # a lookup, which has names for its tables
        check_devices(given["weights"], anchor[1], call["tables"], call["names"])
    name, tensor = next(entry for entry in tensors if entry[1].device != anchor[1].device)
    raise InputError(
        f"{op}: got {name} on {tensor.device}; expected {anchor[1].device}, where {anchor[0]} is. Move one of them "
        "with .to()."
    )


def _named(given: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in given.items():
        if isinstance(value, Tensor):
            yield name, value
        elif value:
            yield from ((f"{name}[{i}]", tensor) for i, tensor in enumerate(value))
