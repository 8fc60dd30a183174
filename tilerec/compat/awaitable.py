"""TorchRec's results that may not be there yet: `wait` returns the value.

tilerec's modules return their results; these classes are for programs that define results of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

W = TypeVar("W")


class Awaitable(ABC, Generic[W]):
    """A result that `wait` returns, after the callbacks have been applied to it; subclasses define `_wait_impl`."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[W], W]] = []

    @abstractmethod
    def _wait_impl(self) -> W:
        """Return the result."""

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Functions that `wait` applies to the result, in order."""
        return self._callbacks

    def wait(self) -> W:
        """Return the result."""
        out = self._wait_impl()
        for callback in self._callbacks:
            out = callback(out)
        return out


class NoWait(Awaitable[W]):
    """A result that is there."""

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


class LazyAwaitable(Awaitable[W]):
    """A result that attributes, items, operators and functions of torch wait for. `wait` computes it once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._result: list[W] = []

    def wait(self) -> W:
        """Return the result."""
        if not self._result:
            self._result.append(super().wait())
        return self._result[0]

    def __getattr__(self, name: str) -> Any:
        if name in ("_result", "_callbacks"):
            raise AttributeError(f"{type(self).__name__}: call super().__init__() first.")
        return getattr(self.wait(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.wait()[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.wait())  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return iter(self.wait())  # type: ignore[call-overload]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch with the results of its arguments."""

        def there(value: Any) -> Any:
            if isinstance(value, LazyAwaitable):
                return value.wait()
            if isinstance(value, (list, tuple)):
                return type(value)(there(item) for item in value)
            return value

        return func(*there(tuple(args)), **{name: there(value) for name, value in (kwargs or {}).items()})


def _forward(name: str) -> Callable[..., Any]:
    def call(self: LazyAwaitable[Any], *args: Any) -> Any:
        plain = [arg.wait() if isinstance(arg, LazyAwaitable) else arg for arg in args]
        return getattr(self.wait(), name)(*plain)

    return call


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "neg", "lt",
              "le", "gt", "ge", "contains"):  # fmt: skip
    setattr(LazyAwaitable, f"__{_name}__", _forward(f"__{_name}__"))


class LazyNoWait(LazyAwaitable[W]):
    """A result that is there, with the interface of `LazyAwaitable`."""

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj
