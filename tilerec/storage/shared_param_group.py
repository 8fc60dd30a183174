"""Settings of an attached optimizer as one `param_groups` entry, shared by the tables that were attached together.

Nouns
  number   a setting of the optimizer (`spec/optimizer.py`); a new value takes effect at the next backward
  rate     the learning rate that updates of a `capturable` optimizer read: a 0-d tensor per device; if `lr` is a
           tensor, that tensor

Of values written after a capture, replays read the rate only. So learning-rate schedules work under replays, and a
write to any other number warns.

    group["lr"] = 0.05                  a number: its copies on devices are updated at once
    group["lr"].fill_(0.05)             a tensor, as torch's schedulers write it
"""

from __future__ import annotations

import copy
import functools
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilerec.errors import ConfigError
from tilerec.ops.runtime.upload import capturing
from tilerec.spec.optimizer import OptimizerSpec
from tilerec.storage.update_watch import UpdateWatch


@functools.lru_cache(maxsize=256)
def _interned(spec: OptimizerSpec) -> OptimizerSpec:
    """Return one object for equal specs."""
    return spec


class SharedParamGroup(dict[str, Any]):
    """A `param_groups` entry that tables share: the current numbers of their optimizer.

    A written value takes effect at the next backward. The entry names no parameters: tables of several collections may
    share it. Copies and pickles keep the sharing.
    """

    def __init__(self, values: Mapping[str, Any], numbers: Sequence[str]) -> None:
        super().__init__(values)
        self._numbers = tuple(numbers)  # the spec's entries; schedulers and users add others
        self._made: tuple[tuple[Any, ...], OptimizerSpec] | None = None
        self._current: OptimizerSpec | None = None  # valid until the next write
        self._alike: tuple[int, int] | None = None  # valid until the next write
        self._digest: int | None = None  # valid until the next write
        self._rates: dict[torch.device, Tensor] = {}  # copies of `lr`, float64
        self._copied: float | None = None  # the value of these copies
        # True once the loss scale was given or written: a GradScaler with another scale is then not for these tables.
        self.scale_known = values.get("grad_scale", 1.0) != 1.0
        self.watch = UpdateWatch()
        self._frozen = False  # True once a graph has captured an update with these numbers

    @staticmethod
    def of(spec: OptimizerSpec, lr: Any = None) -> SharedParamGroup:
        """Return the group of a newly attached optimizer.

        Args:
            lr: the learning rate as the user gave it; a tensor stays a tensor if `spec.capturable`.
        """
        values = spec.to_json()
        group = SharedParamGroup(values, list(values))
        if isinstance(lr, Tensor) and spec.capturable:
            group["lr"] = lr
        return group

    def __setitem__(self, name: str, value: Any) -> None:
        if name == "lr" and isinstance(value, Tensor):
            value = _checked(value, self) if self.get("capturable") else float(value)
        before = self.get(name)
        self._current = self._alike = self._digest = None
        self.scale_known |= name == "grad_scale"
        super().__setitem__(name, value)
        if name == "lr" and not isinstance(value, Tensor) and not isinstance(before, Tensor):
            self._copy_rate()
        elif self._frozen and name in self._numbers and value is not before:
            self._warn_frozen(name, before, value)

    def spec(self) -> OptimizerSpec:
        """Return the optimizer spec of these numbers; checked again after each write.

        If `capturable`, its lr is 0: updates read `rate` instead.
        """
        if self._current is None:
            self._current = self._spec()
        return self._current

    def __delitem__(self, name: str) -> None:
        self._current = self._alike = self._digest = None
        super().__delitem__(name)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __ior__(self, values: Any) -> SharedParamGroup:  # type: ignore[override, misc]
        self.update(values)
        return self

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self:
            return super().pop(name, *default)
        value = self[name]
        del self[name]
        return value

    def popitem(self) -> tuple[str, Any]:
        name, value = super().popitem()
        self._current = self._alike = self._digest = None
        return name, value

    def clear(self) -> None:
        self._current = self._alike = self._digest = None
        super().clear()

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def _spec(self) -> OptimizerSpec:
        if isinstance(self.get("lr"), Tensor) and not self.get("capturable"):
            # No longer capturable: updates would miss later writes into the tensor.
            super().__setitem__("lr", float(self["lr"]))
        missing = [name for name in self._numbers if name not in self]
        if missing:
            raise ConfigError(
                f"param_groups: got an entry without {missing}; expected all numbers of the attached optimizer. Put "
                "them back."
            )
        values = tuple([self[name] for name in self._numbers])
        if self.get("capturable"):
            at = self._numbers.index("lr")
            values = (*values[:at], 0.0, *values[at + 1 :])
        if self._made is None or self._made[0] != values:
            made = _interned(OptimizerSpec.from_json(dict(zip(self._numbers, values, strict=True))))
            if self._made is not None and made.slots != self._made[1].slots:
                raise ConfigError(
                    f"{self['optimizer']}: the numbers written to its param_groups change its state from "
                    f"{[s.name for s in self._made[1].slots]} to {[s.name for s in made.slots]}. "
                    "Attach it again with replace=True instead."
                )
            self._made = (values, made)
        return self._made[1]

    def rate(self, device: torch.device) -> Tensor:
        """Return the learning rate that updates on this device read, 0-d."""
        lr = self["lr"]
        if isinstance(lr, Tensor):
            if lr.device != device:
                raise ConfigError(
                    f"{self['optimizer']}: got lr as a tensor on {lr.device}; expected it on {device}, where its "
                    f"tables are. Write param_groups[...]['lr'] = lr.to('{device}')."
                )
            return lr if lr.dim() == 0 else lr.view(())
        self._copy_rate()
        rate = self._rates.get(device)
        if rate is None:
            if capturing():
                raise ConfigError(
                    f"{self['optimizer']}: its learning rate is not on {device} yet, and every replay would repeat a "
                    "copy made during the capture. Run a step before the capture."
                )
            rate = self._rates[device] = torch.full((), self._valid(lr), dtype=torch.float64, device=device)
            self._copied = lr
        return rate

    def mark(self) -> int:
        """Return a number that is equal for groups with one learning rate.

        Tables of groups with equal marks and rules may be updated together.
        """
        return id(self) if self.get("capturable") else 0

    def alike(self) -> tuple[int, int]:
        """Return the identity of the rule, and the mark; equal specs are one object.

        Comparing 26 records by value would cost more than updating their tables.
        """
        if self._alike is None:
            self._alike = (id(self.spec()), self.mark())
        return self._alike

    def numbers(self) -> dict[str, Any]:
        """Return the numbers by name, for comparison between ranks. Tensors are left out: reading one may wait."""
        found = {name: self.get(name) for name in self._numbers}
        plain = {name: n for name, n in found.items() if not isinstance(n, Tensor)}
        return {name: float(n) if isinstance(n, float) else n for name, n in plain.items()}

    def digest(self) -> int:
        """Return 32 bits that are equal on ranks whose `numbers` are equal."""
        if self._digest is None:
            self._digest = zlib.crc32(repr(self.numbers()).encode())
        return self._digest

    def freeze(self) -> None:
        """Record that an update with these numbers is being captured: later writes warn."""
        self._frozen = True

    def _copy_rate(self) -> None:
        """Update the copies of `lr` on devices."""
        lr = self["lr"]
        if not self._rates or lr == self._copied:
            return
        if capturing():
            raise ConfigError(
                f"{self['optimizer']}: lr was written during the capture of a CUDA graph, and every replay would write "
                "that value again. Step schedules outside of the capture."
            )
        for rate in self._rates.values():
            rate.fill_(self._valid(lr))
        self._copied = lr

    def _valid(self, lr: Any) -> float:
        return replace(self.spec(), lr=lr).lr

    def _warn_frozen(self, name: str, before: Any, value: Any) -> None:
        if isinstance(before, Tensor) or isinstance(value, Tensor) or before != value:
            what = "Write the new value into the old tensor with fill_()" if name == "lr" else "Capture again"
            warnings.warn(
                f"{self['optimizer']}: {name} was written after an update was captured in a CUDA graph, whose replays "
                f"keep the old value. {what}.",
                stacklevel=4,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedParamGroup:
        twin = memo[id(self)] = SharedParamGroup(
            {name: copy.deepcopy(value, memo) for name, value in self.items()}, self._numbers
        )
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        return (SharedParamGroup, (dict(self), self._numbers))


def _checked(lr: Tensor, group: SharedParamGroup) -> Tensor:
    if lr.numel() != 1 or not lr.is_floating_point():
        raise ConfigError(
            f"{group['optimizer']}: got lr as a tensor of shape {list(lr.shape)} and dtype {lr.dtype}; expected one "
            "floating-point number of shape []. Pass torch.tensor(0.1, device=...)."
        )
    return lr
