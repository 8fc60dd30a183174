"""Memory that tables may not have: a storage reservation says how much of each rank's.

Bytes are those of the memory that tables lie in: of the device, or of the host where there is no device memory. What
tables themselves need beside their rows (ids, looked-up rows, gradients in flight) is part of the planner's cost model
and needs no reservation.

    dense     parameters and buffers of the model that belong to no table
    input     a batch as it arrives: int64 ids, lengths, weights; one in use and one on its way
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import final

from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.modules.table import Table

GRADIENTS_AND_STATE = 6.0
"""Of a dense parameter: itself, its gradient, two numbers of an optimizer, and as much again for buckets and copies."""


class StorageReservation(ABC):
    """How many bytes of a rank are taken already.

    percentage: of these, the part of the rank's memory: of ranks and machines with more memory, more is taken.
    """

    percentage: float = 0.0

    @abstractmethod
    def reserved(self, cap: int, module: nn.Module | None, input_bytes: int) -> int:
        """Bytes per rank.

        Args:
            cap: of a rank's memory that tables lie in.
            module: the model; None where only tables are planned.
            input_bytes: of one batch of a rank.
        """


@final
class HeuristicalStorageReservation(StorageReservation):
    """A part of the memory, the dense model with gradients and optimizer state, and two batches of input.

    Args:
        percentage: part of the memory, from 0 up to, not including, 1.
        parameter_multiplier: dense bytes count so many times.
        dense_tensor_estimate: bytes of the dense model, all in all, instead of looking at it.
    """

    def __init__(
        self,
        percentage: float,
        parameter_multiplier: float = GRADIENTS_AND_STATE,
        dense_tensor_estimate: int | None = None,
    ) -> None:
        self.percentage = _part(type(self).__name__, percentage)
        self.parameter_multiplier = parameter_multiplier
        self.dense_tensor_estimate = dense_tensor_estimate
        if not _is_number(parameter_multiplier):
            raise ConfigError(
                f"HeuristicalStorageReservation: parameter_multiplier is {parameter_multiplier!r}; it must be a number "
                "from 0."
            )
        if dense_tensor_estimate is not None and not _is_number(dense_tensor_estimate):
            raise ConfigError(
                f"HeuristicalStorageReservation: dense_tensor_estimate is {dense_tensor_estimate!r}; it must be bytes "
                "from 0."
            )

    def reserved(self, cap: int, module: nn.Module | None, input_bytes: int) -> int:
        dense = self.dense_tensor_estimate
        if dense is None:
            dense = math.ceil(dense_bytes(module) * self.parameter_multiplier)
        return math.ceil(cap * self.percentage) + int(dense) + 2 * input_bytes


@final
class FixedPercentageStorageReservation(StorageReservation):
    """A part of the memory and nothing else.

    Args:
        percentage: from 0 up to, not including, 1.
    """

    def __init__(self, percentage: float) -> None:
        self.percentage = _part(type(self).__name__, percentage)

    def reserved(self, cap: int, module: nn.Module | None, input_bytes: int) -> int:
        return math.ceil(cap * self.percentage)


@final
class FixedAbsoluteStorageReservation(StorageReservation):
    """So many bytes of every rank.

    Args:
        hbm_reserved_bytes: of the device's memory; of the host's where tables lie there.
    """

    def __init__(self, hbm_reserved_bytes: int) -> None:
        if not _is_number(hbm_reserved_bytes):
            raise ConfigError(
                f"FixedAbsoluteStorageReservation: hbm_reserved_bytes is {hbm_reserved_bytes!r}; it must be bytes "
                "from 0."
            )
        self.hbm_reserved_bytes = hbm_reserved_bytes

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> FixedAbsoluteStorageReservation:
        """The same in GB of 1024³ bytes, as TorchRec counts them."""
        if not _is_number(hbm_reserved_gb):
            raise ConfigError(
                f"FixedAbsoluteStorageReservation.from_gb: got hbm_reserved_gb={hbm_reserved_gb!r}; expected GB from "
                "0. Pass a number."
            )
        return cls(int(hbm_reserved_gb * 1024**3))

    def reserved(self, cap: int, module: nn.Module | None, input_bytes: int) -> int:
        return int(self.hbm_reserved_bytes)


@final
class InferenceStorageReservation(StorageReservation):
    """For a model that is served: a part of the memory, the dense model as it is, and two batches of input.

    Args:
        percentage: from 0 up to, not including, 1.
        dense_tensor_estimate: bytes of the dense model instead of looking at it.
    """

    def __init__(self, percentage: float, dense_tensor_estimate: int | None = None) -> None:
        self._as = HeuristicalStorageReservation(percentage, 1.0, dense_tensor_estimate)
        self.percentage = self._as.percentage

    def reserved(self, cap: int, module: nn.Module | None, input_bytes: int) -> int:
        return self._as.reserved(cap, module, input_bytes)


def dense_bytes(module: nn.Module | None) -> int:
    """Bytes of parameters and buffers that belong to no table; each tensor once."""
    if module is None:
        return 0
    seen: dict[int, Tensor] = {}
    tables = [part for part in module.modules() if isinstance(part, Table)]
    of_tables = {id(t) for part in tables for t in [*part.parameters(), *part.buffers()]}
    for tensor in [*module.parameters(), *module.buffers()]:
        if id(tensor) not in of_tables:
            seen[id(tensor)] = tensor
    return sum(t.numel() * t.element_size() for t in seen.values())


def _part(who: str, percentage: float) -> float:
    if not _is_number(percentage) or percentage >= 1:
        raise ConfigError(
            f"{who}: percentage is {percentage!r}; it is a part of the memory, from 0 up to, not including, 1."
        )
    return float(percentage)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
