"""`graph_break`: keep a function out of compiled graphs without importing the compiler.

`torch.compiler.disable` imports the compiler at decoration, `torch._disable_dynamo` at the function's first call: 800
modules, two seconds. A program that never compiles avoids this import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from tilerec.torch_private import disable_dynamo, frame_compiler

_P = ParamSpec("_P")
_T = TypeVar("_T")


def graph_break(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function that is never traced: graphs break at its calls, and its callees are not compiled.

    Only code that compiles imports the compiler; this module does not.
    """
    disabled = disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        # The first condition is a constant for a tracer, so the tracer never evaluates the second: True where frames
        # of callees would be compiled.
        if torch.compiler.is_compiling() or frame_compiler() is not None:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call
