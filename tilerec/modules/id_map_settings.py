"""Settings of a table's id map, alike on all ranks."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilerec.errors import ConfigError, InputError
from tilerec.modules.evict import Evicting
from tilerec.ops.hash.checks import MAX_TIME
from tilerec.ops.hash.definition import Policy

ANY_ID = 2**63 - 1


def hours() -> int:
    """Return hours since 1970, the default clock of times to live."""
    return int(time.time()) // 3600


def read_clock(who: str, clock: Callable[[], int]) -> int:
    """Return the clock's time; raise a `ConfigError` unless it is an integer from -2**61 to 2**61."""
    time_ = clock()
    if isinstance(time_, bool) or not hasattr(time_, "__index__") or not -MAX_TIME <= time_ <= MAX_TIME:
        raise ConfigError(
            f"{who}: got {time_!r} from its clock; expected an integer from -2**61 to 2**61. Pass, for "
            "example, clock=lambda: int(time.time())."
        )
    return operator.index(time_)


@dataclass(frozen=True)
class IdMapSettings:
    """Admission, eviction and ids of one table; TorchRec's names are in the modules' arguments.

    Args:
        evicting: the eviction policy; None: rows are never taken from an id.
        shares: ids without a row share one; otherwise they are dropped from their bags.
        max_probe: slots that a lookup reads at most.
        interval: steps between steps with evictions.
        threshold: uses of an id until it gets a row.
        read_only_suffix: features whose name ends with it insert no ids.
        input_hash: the user's function of (ids, input_size), applied to ids first.
        input_size: its second argument.
    """

    evicting: Evicting | None
    shares: bool
    max_probe: int
    interval: int = 1
    threshold: int = 1
    read_only_suffix: str = "_readonly"
    input_hash: Callable[[Tensor, int], Tensor] | None = None
    input_size: int = ANY_ID

    def check(self, who: str) -> None:
        """Raise a `ConfigError` for a number that is out of range."""
        for name, value in (
            ("max_probe", self.max_probe),
            ("eviction_interval", self.interval),
            ("admission_threshold", self.threshold),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise ConfigError(f"{who}: got {name}={value!r}; expected an integer from 1 to 2**31 - 1.")

    @property
    def policy(self) -> Policy | None:
        """Eviction policy; None: no eviction."""
        return None if self.evicting is None else self.evicting.policy

    def hashed(self, who: str, ids_N: Tensor) -> Tensor:
        """Return the ids in stored form: int64, after the user's `input_hash_func` if there is one."""
        if ids_N.dtype not in (torch.int32, torch.int64):
            raise InputError(
                f"{who}: got ids of dtype {ids_N.dtype}; expected int32 or int64. Cast the batch's values."
            )
        ids_N = ids_N.to(torch.int64)
        if self.input_hash is None:
            return ids_N
        hashed_N = self.input_hash(ids_N, self.input_size)
        if hashed_N.shape != ids_N.shape or hashed_N.dtype != torch.int64:
            raise InputError(
                f"{who}: input_hash_func returned {hashed_N.dtype} of shape {tuple(hashed_N.shape)}; expected "
                f"int64 of the ids' shape {tuple(ids_N.shape)}."
            )
        return hashed_N

    def key_of(self, who: str, id_: int) -> int:
        """Return one id in stored form."""
        if isinstance(id_, bool) or not hasattr(id_, "__index__"):
            raise InputError(f"{who}: got id {id_!r} of type {type(id_).__name__}; expected an integer.")
        number = operator.index(id_)
        if not -(2**63) <= number < 2**63:
            raise InputError(f"{who}: got id {number}; expected an int64.")
        return int(self.hashed(who, torch.tensor([number], dtype=torch.int64))[0])

    def described(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        evicting = self.evicting
        return {
            "evicts": None if evicting is None else evicting.policy.name,
            "exponent": None if evicting is None else evicting.exponent,
            "ttl": None if evicting is None else [evicting.ttl, [list(pair) for pair in evicting.ttl_of]],
            "shares": self.shares,
            "max_probe": self.max_probe,
            "interval": self.interval,
            "admission_threshold": self.threshold,
            "input_hash": getattr(self.input_hash, "__qualname__", None),
        }
