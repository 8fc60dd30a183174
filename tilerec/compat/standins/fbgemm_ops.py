"""Registration of operators under `torch.ops.fbgemm`, for processes without FBGEMM."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilerec.compat.standins.jagged_ops import OPERATORS
from tilerec.compat.standins.report import Report

_LIBRARY: list[torch.library.Library] = []  # keeps the registrations
_REPORTS: list[Report] = []  # the newest one counts calls


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            _REPORTS[-1].operators[name] += 1
        return function(*args, **kwargs)

    return call


def register_operators(report: Report) -> None:
    """Register the operators that the process lacks, once; `report` counts the calls from now on."""
    _REPORTS[:] = [report]
    if _LIBRARY:
        return
    library = torch.library.Library("fbgemm", "FRAGMENT")
    _LIBRARY.append(library)
    for schema, function in OPERATORS.items():
        name = schema.partition("(")[0]
        if not hasattr(torch.ops.fbgemm, name):
            library.define(schema)
            library.impl(name, _counted(name, function), "CompositeImplicitAutograd")
