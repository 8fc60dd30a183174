"""The `tilerec` operator namespace.

Each family (`ops/lookup`, `ops/update`, …) defines its ops here, with a plain-PyTorch reference, a fake kernel
and an autograd formula. Backends register faster kernels for the same names.

Every kernel, including fake ones, is preceded by a check that all tensors of a call are on one device (`devices.py`).
Without the check, one tensor on meta would make the dispatcher choose the fake kernel, which never writes its output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, final

import torch

from tilerec.ops.runtime.devices import on_one_device
from tilerec.torch_private import schema_of

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


@final
class OpLibrary(torch.library.Library):
    """The ops of one namespace; their kernels raise an error for tensors on several devices."""

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        """Register a kernel behind the device check.

        Autograd and Meta kernels need no check: the former call a checked kernel, torch derives the latter from the
        fake kernel.
        """
        if dispatch_key not in ("Autograd", "Meta"):
            fn = self._checked(op_name, fn)
        super().impl(op_name, fn, dispatch_key, **options)

    def fake(self, op: str) -> Callable[[Kernel], Kernel]:
        """Register the decorated function as an op's fake kernel."""

        def register(kernel: Kernel) -> Kernel:
            torch.library.register_fake(f"{self.ns}::{op}", self._checked(op, kernel), lib=self)
            return kernel

        return register

    def _checked(self, op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        return on_one_device(op, kernel, schema_of(self.ns, op))


LIBRARY = OpLibrary("tilerec", "DEF")

new_record = tuple.__new__
"""Makes a named tuple of all its fields, in a third of the time of its own constructor: hot ops do so at each call."""


def takes_arguments(unpack: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that takes a record as a function of the op's arguments; `unpack` makes the record of them."""

    @functools.wraps(kernel)
    def run(*args: Any) -> Any:
        return kernel(unpack(*args))

    return run
