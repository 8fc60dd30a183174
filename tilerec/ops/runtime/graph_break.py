"""Functions that a compiled program calls as they are.

`torch.compiler.disable` imports the compiler where it decorates, `torch._disable_dynamo` where the function is first
called: 800 modules, two seconds. A program that never compiles needs neither.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from tilerec.torch_private import disable_dynamo

_P = ParamSpec("_P")
_T = TypeVar("_T")


def graph_break(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function that is never traced: graphs break around it, and nothing it calls is compiled.

    Code that compiles imports the compiler; this module does not.
    """
    disabled = disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        # The first condition is a constant to a tracer, which so never sees the second.
        if torch.compiler.is_compiling() or "torch._dynamo" in sys.modules:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call
