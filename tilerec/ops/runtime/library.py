"""The `tilerec` operator namespace.

Each family (`ops/lookup`, `ops/update`, …) defines its ops here, with a plain-PyTorch reference, a fake kernel
and an autograd formula. Backends register faster kernels for the same names.

Every kernel, including fake ones, is preceded by a check that all tensors of a call are on one device (`devices.py`).
Without the check, one tensor on meta would make the dispatcher choose the fake kernel, which never writes its output.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, final

import torch

from tilerec.ops.runtime.devices import on_one_device
from tilerec.torch_private import schema_of

Kernel = Callable[..., Any]
Function = TypeVar("Function", bound=Kernel)


class _Form(NamedTuple):
    """Form in which all kernels of an op take its arguments."""

    unpack: Kernel | None = None
    check: Kernel | None = None


@final
class OpLibrary(torch.library.Library):
    """The ops of one namespace; their kernels raise an error for tensors on several devices."""

    def __init__(self, namespace: str) -> None:
        super().__init__(namespace, "DEF")
        self._forms: dict[str, _Form] = {}
        self.references: dict[str, Kernel] = {}
        """Reference kernels by op name, as functions of the ops' arguments. Tests compare every backend with them."""
        self.cpu_kernels: dict[str, Kernel] = {}
        """Kernels of CPU tensors by op name, as functions of the ops' arguments, without device checks."""

    def op(
        self, schema: str, fake: Kernel | None = None, *, unpack: Kernel | None = None, check: Kernel | None = None,
        check_fake: bool = False,
    ) -> Callable[[Function], Function]:  # fmt: skip
        """Define an op whose reference kernel is the decorated function, and register its fake kernel.

        Args:
            fake: None: the op returns nothing.
            unpack: makes a record of the op's arguments; then all kernels of the op take the record.
            check: called before each kernel with the kernel's arguments; raises errors.
            check_fake: also check before the fake kernel.
        """
        name = schema.partition("(")[0]
        if not hasattr(getattr(torch.ops, self.ns), name):  # else libtilerec_ops.so has defined it (native/torch)
            self.define(schema)
        self._forms[name] = _Form(unpack, check)

        def register(reference: Function) -> Function:
            self.references |= self.taking_arguments({name: reference})
            self.impl(name, self.references[name], "CompositeExplicitAutograd")
            form = _Form(unpack, check if check_fake else None)
            self.fake(name)(_taking_arguments(form, fake or _return_nothing))
            return reference

        return register

    def fake(self, op: str) -> Callable[[Kernel], Kernel]:
        """Register the decorated function as an op's fake kernel."""

        def register(kernel: Kernel) -> Kernel:
            torch.library.register_fake(f"{self.ns}::{op}", self._on_one_device(op, kernel), lib=self)
            return kernel

        return register

    def taking_arguments(self, kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
        """Return kernels, by op name, as functions of the ops' arguments: unpacked and checked as `op` defines."""
        return {name: _taking_arguments(self._forms.get(name, _Form()), kernel) for name, kernel in kernels.items()}

    def serve(self, key: str, kernels: Mapping[str, Kernel], around: Callable[[Kernel], Kernel] | None = None) -> None:
        """Register a backend's kernels, by op name, for tensors of a dispatch key; `around` wraps each of them."""
        with warnings.catch_warnings():
            # torch warns where libtilerec_ops.so has a kernel of the same results, but for fewer dtypes.
            warnings.filterwarnings("ignore", message="Warning only once for all operators")
            for name, kernel in self.taking_arguments(kernels).items():
                self.impl(name, around(kernel) if around else kernel, key, allow_override=True)

    def impl(self, op_name: Any, fn: Any, dispatch_key: str = "", **options: Any) -> None:
        """Register a kernel behind the device check.

        Autograd and Meta kernels need no check: the former call a checked kernel, torch derives the latter from the
        fake kernel.
        """
        if dispatch_key in ("CPU", "CompositeExplicitAutograd"):  # a CPU kernel is registered over the reference
            self.cpu_kernels[op_name] = fn
        if dispatch_key not in ("Autograd", "Meta"):
            fn = self._on_one_device(op_name, fn)
        super().impl(op_name, fn, dispatch_key, **options)

    def _on_one_device(self, op: str, kernel: Kernel) -> Kernel:
        return on_one_device(op, kernel, schema_of(self.ns, op))


LIBRARY = OpLibrary("tilerec")

new_record = tuple.__new__
"""Makes a named tuple of all its fields, in a third of the time of its own constructor: hot ops do so at each call."""


def _taking_arguments(form: _Form, kernel: Kernel) -> Kernel:
    unpack, check = form
    if unpack is None and check is None:
        return kernel

    # One function per form: this is part of the cost of every call.
    def checked(*args: Any) -> Any:
        check(*args)  # type: ignore[misc]
        return kernel(*args)

    def unpacked(*args: Any) -> Any:
        return kernel(unpack(*args))  # type: ignore[misc]

    def both(*args: Any) -> Any:
        call = unpack(*args)  # type: ignore[misc]
        check(call)  # type: ignore[misc]
        return kernel(call)

    return functools.wraps(kernel)(checked if unpack is None else unpacked if check is None else both)


def _return_nothing(*_: Any) -> None:
    return None
