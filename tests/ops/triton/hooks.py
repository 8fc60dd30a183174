"""The sanitizer's grip on Triton's interpreter (3.6 and later): what it calls when a kernel does something.

Everything is undone by `Hooks.remove`. A pointer's root and a number's bound (`sanitizer.py`) travel as attributes of
the interpreter's handles.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton

from tests.ops.triton.accesses import ATOMIC, READ, WRITE, Numbers
from tests.ops.triton.reasons import WRAPS

if TYPE_CHECKING:
    from tests.ops.triton.sanitizer import Sanitizer

INT32 = 2**31 - 1
_POISON = {1: 0x5B, 2: 0x5A5B, 4: 0x5A5A5A5B, 8: 0x5A5A5A5A5A5A5A5B}


class SanitizerError(AssertionError):
    """A kernel did what it must not do."""


_SKIPPED = (
    str(Path(triton.__file__).parent), str(Path(np.__file__).parent), __file__,
    str(Path(__file__).with_name("sanitizer.py")),
)  # fmt: skip


def site() -> str:
    """The kernel's line that is running."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED):
        frame = frame.f_back  # type: ignore[assignment]
    return "?" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_POINTERS = ("create_addptr", "create_splat", "create_broadcast", "create_expand_dims", "create_reshape",
             "create_bitcast", "create_trans", "create_unsplat")  # fmt: skip


def _order(semantics: Any, scope: Any) -> str:
    """What order an atomic makes between programs."""
    return "relaxed" if scope.name == "CTA" else str(semantics.name).lower()


def _bound(handle: Any) -> int:
    known = handle.attr.get("bound")
    if known is not None:
        return int(known)
    return int(np.abs(handle.data.astype(np.int64)).max(initial=0))


_EXACT: Mapping[str, tuple[Callable[..., Any], Callable[[int, int], int]]] = {
    "create_add": (np.add, lambda a, b: a + b),
    "create_sub": (np.subtract, max),
    "create_mul": (np.multiply, lambda a, b: a * b),
}
_BOUNDED: Mapping[str, Callable[[int, int], int]] = {
    "create_minsi": min,
    "create_maxsi": max,
    "create_sdiv": lambda a, b: a,
    "create_srem": min,
    "create_ashr": lambda a, b: a,
    "create_and": min,
}


class Hooks:
    """Put into the interpreter by `install`, taken out by `remove`."""

    def __init__(self, watch: Sanitizer) -> None:
        from triton.runtime import interpreter

        self.watch, self.interpreter = watch, interpreter
        self.builder = interpreter.InterpreterBuilder
        self._changed: list[tuple[Any, str, Any]] = []

    def _put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        real = inspect.getattr_static(owner, name)
        self._changed.append((owner, name, real if name in vars(owner) else None))  # None: it is a base class's
        setattr(owner, name, make(real))

    def remove(self) -> None:
        while self._changed:
            owner, name, real = self._changed.pop()
            if real is None:
                delattr(owner, name)
            else:
                setattr(owner, name, real)

    def install(self) -> None:
        self._put(torch.Tensor, "data_ptr", self._asked)
        self._launches()
        self._accesses()
        self._pointers()
        self._numbers()
        self._hints()

    def _asked(self, real: Any) -> Any:
        memory = self.watch.memory

        def data_ptr(tensor: torch.Tensor) -> int:
            memory.note(tensor)
            return int(real(tensor))

        return data_ptr

    def _launches(self) -> None:
        watch, interpreter = self.watch, self.interpreter

        def run(real: Any) -> Any:
            def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
                if warmup:
                    return real(kernel, *args, grid=grid, warmup=warmup, **kwargs)
                # The arguments in the order in which the executor converts them: all but constants.
                known = inspect.getfullargspec(kernel.fn)
                own = {k: v for k, v in kwargs.items() if k in known.args or k in known.kwonlyargs}
                constants = interpreter.GridExecutor(kernel.rewrite(), kernel.arg_names, grid).constexprs
                names = [n for n in inspect.getcallargs(kernel.fn, *args, **own) if n not in constants]
                return watch.run(
                    kernel, lambda: real(kernel, *args, grid=grid, warmup=warmup, **kwargs), names,
                    kwargs.get("num_warps", 4),
                )  # fmt: skip

            return run

        def convert(real: Any) -> Any:
            within = False  # a tuple's members are converted one by one

            def convert(value: Any) -> Any:
                nonlocal within
                outer, within = within, True
                try:
                    made = real(value)
                finally:
                    within = outer
                if not outer:
                    watch.argument(value, made)
                return made

            return convert

        def set_dim(real: Any) -> Any:
            def set_dim(builder: Any, *grid: int) -> None:
                real(builder, *grid)
                if watch.now is not None:
                    watch.now.begin(grid)  # type: ignore[arg-type]

            return set_dim

        def set_idx(real: Any) -> Any:
            def set_idx(builder: Any, *place: int) -> None:
                real(builder, *(place if watch.now is None else watch.begin_program()))

            return set_idx

        def barrier(real: Any) -> Any:
            def barrier(builder: Any) -> Any:
                watch.barrier()
                return real(builder)

            return barrier

        self._put(interpreter.InterpretedFunction, "run", run)
        self._put(interpreter, "_implicit_cvt", convert)
        self._put(self.builder, "set_grid_dim", set_dim)
        self._put(self.builder, "set_grid_idx", set_idx)
        self._put(self.builder, "create_barrier", barrier)

    def _accesses(self) -> None:
        watch, interpreter = self.watch, self.interpreter

        def size_of(pointers: Any) -> tuple[int, Any]:
            kind = interpreter._get_np_dtype(pointers.get_element_ty())
            return kind.itemsize, kind

        def hidden(mask: Any, left: Numbers) -> Any:
            return mask if left is mask.data else interpreter.TensorHandle(left, mask.dtype)

        def load(real: Any) -> Any:
            def load(builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **named: Any) -> Any:
                size, kind = size_of(pointers)
                mask = hidden(mask, watch.access(READ, pointers, mask.data, size, None))
                # Of one element, `other=0` arrives as None, too: Triton asks whether it is true.
                if other is None and watch.now is not None and pointers.data.size > 1:
                    number = np.nan if kind.kind == "f" else True if kind.kind == "b" else _POISON[size]
                    other = interpreter.TensorHandle(
                        np.full(pointers.data.shape, number, kind), pointers.get_element_ty()
                    )
                made = real(builder, pointers, mask, other, *rest, **named)
                if kind == np.int32:
                    made.attr["bound"] = INT32
                return made

            return load

        def store(real: Any) -> Any:
            def store(builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
                left = watch.access(WRITE, pointers, mask.data, size_of(pointers)[0], value.data)
                return real(builder, pointers, value, hidden(mask, left), *rest, **named)

            return store

        def rmw(real: Any) -> Any:
            def rmw(builder: Any, op: Any, pointers: Any, value: Any, mask: Any, sem: Any, scope: Any) -> Any:
                left = watch.access(ATOMIC, pointers, mask.data, size_of(pointers)[0], None, _order(sem, scope))
                return real(builder, op, pointers, value, hidden(mask, left), sem, scope)

            return rmw

        def cas(real: Any) -> Any:
            def cas(builder: Any, pointers: Any, compare: Any, value: Any, sem: Any, scope: Any) -> Any:
                every = np.ones(pointers.data.shape, bool)
                size = size_of(pointers)[0]
                if not watch.access(ATOMIC, pointers, every, size, None, _order(sem, scope)).all():
                    raise SanitizerError("a compare-and-swap cannot be hidden")
                return real(builder, pointers, compare, value, sem, scope)

            return cas

        self._put(self.builder, "create_masked_load", load)
        self._put(self.builder, "create_masked_store", store)
        self._put(self.builder, "create_atomic_rmw", rmw)
        self._put(self.builder, "create_atomic_cas", cas)

    def _pointers(self) -> None:
        """Whatever is made of a pointer points from the same root; a number's bound goes along, too."""

        def follow(index: int) -> Callable[[Any], Any]:
            def follow(real: Any) -> Any:
                def follow(builder: Any, *args: Any, **named: Any) -> Any:
                    made = real(builder, *args, **named)
                    for name in ("root", "bound"):
                        if name in args[index].attr:
                            made.attr[name] = args[index].attr[name]
                    return made

                return follow

            return follow

        for name in _POINTERS:
            self._put(self.builder, name, follow(1 if name == "create_splat" else 0))

        def select(real: Any) -> Any:
            def select(builder: Any, condition: Any, one: Any, other: Any) -> Any:
                made = real(builder, condition, one, other)
                if "root" in one.attr and one.attr["root"] == other.attr.get("root"):
                    made.attr["root"] = one.attr["root"]
                elif "bound" in one.attr or "bound" in other.attr:
                    made.attr["bound"] = max(_bound(one), _bound(other))
                return made

            return select

        self._put(self.builder, "create_select", select)

    def _numbers(self) -> None:
        watch, tl = self.watch, triton.language
        options = self.interpreter.interpreter_builder.options
        # Triton's own check of overflow computes everything twice, and tells nobody.
        self._put(
            self.interpreter.interpreter_builder, "options",
            lambda _: dataclasses.replace(options, sanitize_overflow=False),
        )  # fmt: skip

        def exact(operation: Any, bound: Any) -> Callable[[Any], Any]:
            def exact(real: Any) -> Any:
                def exact(builder: Any, one: Any, other: Any) -> Any:
                    made = real(builder, one, other)
                    launch = watch.now
                    if launch is None or one.dtype.scalar != tl.int32:
                        return made
                    if (launch.kernel, operation.__name__) in WRAPS:
                        return made
                    wide = operation(one.data.astype(np.int64), other.data.astype(np.int64))
                    if (wide != made.data).any():
                        bad = wide[wide != made.data]
                        watch.found("wrap", f"int32 {operation.__name__} at {site()}", f"{bad.flat[0]}")
                    elif "bound" in one.attr or "bound" in other.attr:
                        most = bound(_bound(one), _bound(other))
                        if most > INT32:
                            watch.found(
                                "may wrap",
                                f"int32 {operation.__name__} at {site()}",
                                f"up to {_bound(one)} and {_bound(other)}",
                            )
                        made.attr["bound"] = min(most, INT32)
                    return made

                return exact

            return exact

        def bounded(bound: Any) -> Callable[[Any], Any]:
            def bounded(real: Any) -> Any:
                def bounded(builder: Any, one: Any, other: Any) -> Any:
                    made = real(builder, one, other)
                    if one.dtype.scalar == tl.int32 and ("bound" in one.attr or "bound" in other.attr):
                        made.attr["bound"] = bound(_bound(one), _bound(other))
                    return made

                return bounded

            return bounded

        def divided(real: Any) -> Any:
            def divided(builder: Any, one: Any, other: Any) -> Any:
                if watch.now is not None and (other.data == 0).any():
                    watch.found("divisor", f"division at {site()}", "by 0")
                return real(builder, one, other)

            return divided

        def shifted(real: Any) -> Any:
            def shifted(builder: Any, one: Any, other: Any) -> Any:
                if watch.now is not None:
                    by = other.data.astype(np.int64)
                    width = one.dtype.scalar.primitive_bitwidth
                    if ((by < 0) | (by >= width)).any():
                        watch.found("divisor", f"shift at {site()}", f"of {width} bits by {by.flat[0]}")
                return real(builder, one, other)

            return shifted

        def numbered(what: str) -> Callable[[Any], Any]:
            def numbered(real: Any) -> Any:
                def numbered(builder: Any, axis: int) -> Any:
                    made = real(builder, axis)
                    if watch.now is not None:
                        made.attr["bound"] = watch.grid_bound(what, axis)
                    return made

                return numbered

            return numbered

        for name, (operation, bound) in _EXACT.items():
            self._put(self.builder, name, exact(operation, bound))
        for name, bound in _BOUNDED.items():
            self._put(self.builder, name, bounded(bound))
        for name in ("create_idiv", "create_srem", "create_urem"):
            self._put(self.builder, name, divided)
        for name in ("create_shl", "create_lshr", "create_ashr"):
            self._put(self.builder, name, shifted)
        self._put(self.builder, "create_get_program_id", numbered("program_id"))
        self._put(self.builder, "create_get_num_programs", numbered("num_programs"))

    def _hints(self) -> None:
        watch, tl = self.watch, triton.language

        def patch(real: Any) -> Any:
            def patch(lang: Any, scope: Any) -> None:
                real(lang, scope)
                for name in ("multiple_of", "max_contiguous", "max_constancy"):
                    scope.set_attr(lang, name, hinted(getattr(lang, name), name))

            return patch

        def hinted(real: Any, name: str) -> Any:
            def hinted(value: Any, numbers: Any, *rest: Any, **named: Any) -> Any:
                if watch.now is not None and isinstance(value, tl.tensor):
                    each = numbers if isinstance(numbers, (list, tuple)) else [numbers]
                    each = [int(getattr(n, "value", n)) for n in each]
                    if not _TRUE[name](value.handle.data, each, value.shape):
                        watch.found("hint", f"{name} {each} at {site()}", f"of {value.handle.data.reshape(-1)[:8]}")
                return real(value, numbers, *rest, **named)

            return hinted

        self._put(self.interpreter, "_patch_lang_core", patch)


def _multiples(data: Numbers, each: list[int], shape: Sequence[int]) -> bool:
    """Whether all numbers are; but for lanes of memory that was never written, which no access may use ("memory")."""
    numbers = data.astype(np.int64)
    return not (numbers[~np.isin(numbers, list(_POISON.values()))] % max(each)).any()


def _steps(step: int) -> Callable[[Numbers, list[int], Sequence[int]], bool]:
    """Groups of so many along each axis go up by `step`."""

    def steps(data: Numbers, each: list[int], shape: Sequence[int]) -> bool:
        wide = data.astype(np.int64)
        for axis, count in enumerate(each if len(shape) else []):
            grown = np.diff(wide, axis=axis)
            within = np.arange(1, wide.shape[axis]) % count != 0
            if (np.compress(within, grown, axis=axis) != step).any():
                return False
        return True

    return steps


_TRUE: Mapping[str, Callable[[Numbers, list[int], Sequence[int]], bool]] = {
    "multiple_of": _multiples,
    "max_contiguous": _steps(1),
    "max_constancy": _steps(0),
}
