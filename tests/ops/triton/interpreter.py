"""Triton's interpreter at twice its speed.

Each call of a jitted function from another one (`tl.min` is such a function) replaces some 400 names of
`triton.language` by interpreted ones, which they already are. `quick()` leaves that out. And where `tl.sort` adds
numbers by exclusive or, one number after the other, NumPy does it for all at once (a sort of 2,048 keys takes 5 s
otherwise). Sums of integers are not computed a second time to see whether they overflow: nothing is made of the answer
(`sanitizer.py` looks for itself). Nothing else changes, and a Triton whose interpreter is built otherwise runs as it
is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import triton
import triton.language as tl


@contextlib.contextmanager
def quick() -> Iterator[None]:
    from triton.runtime import interpreter

    real: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    executor = getattr(interpreter, "GridExecutor", None)
    if not triton.knobs.runtime.interpret or real is None or executor is None:
        yield
        return
    run = executor.__call__
    patched: set[frozenset[int]] = set()
    keys: dict[Any, frozenset[int]] = {}

    def patch_once(function: Any) -> Any:
        if function not in keys:
            modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
            keys[function] = frozenset(id(module) for module in modules if module in (tl, tl.core))
        key = keys[function]
        if key in patched:
            return None
        scope = real(function)
        patched.add(key)
        return scope

    def run_afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        try:
            return run(self, *args, **kwargs)
        finally:
            patched.clear()

    reduces = interpreter.ReduceOps
    generic = reduces.generic_reduce

    def reduce_quickly(self: Any, input: Any) -> Any:
        if self.combine_fn is not tl.standard._xor_combine or self.axis is None:
            return generic(self, input)
        return [
            self.to_tensor(np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims), x.dtype)
            for x in input
        ]

    builder = interpreter.interpreter_builder
    options = builder.options
    interpreter._patch_lang, executor.__call__ = patch_once, run_afresh
    reduces.generic_reduce = reduce_quickly
    builder.options = dataclasses.replace(options, sanitize_overflow=False)
    try:
        yield
    finally:
        builder.options = options
        interpreter._patch_lang, executor.__call__ = real, run
        reduces.generic_reduce = generic
