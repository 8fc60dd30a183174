"""Storage reservations: memory of each rank that the planner leaves free for everything but tables.

Bytes are those of the memory that holds the tables: device memory, or host memory on CPU ranks. Temporary memory of
the tables (ids, looked-up rows, gradients in flight) is part of the planner's cost model and needs no reservation.

    dense     parameters and buffers of the model that belong to no table
    input     a batch as it arrives: int64 ids, lengths, weights. Two batches: one in use, one being copied
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import final

from torch import Tensor, nn

from tilerec.errors import ConfigError
from tilerec.modules.table import Table
from tilerec.spec.reserved_memory import RESERVED

GRADIENTS_AND_STATE = 6.0
"""Bytes reserved per byte of a dense parameter.

The parameter, its gradient and two values of optimizer state make 4; buckets and copies take 2 more.
"""


class StorageReservation(ABC):
    """Number of bytes per rank that tables must not use.

    percentage: part of the rank's memory that is reserved, from 0 to 1; it scales with the memory of a rank.
    """

    percentage: float = 0.0

    @abstractmethod
    def reserved(self, cap: int, module: nn.Module | None, input_bytes: int) -> int:
        """Return the reserved bytes of one rank.

        Args:
            cap: bytes of the rank's memory that holds tables.
            module: the model; None if only tables are planned.
            input_bytes: bytes of one batch of a rank.
        """


@final
class HeuristicalStorageReservation(StorageReservation):
    """Reservation of a part of the memory, the dense model with gradients and optimizer state, and two input batches.

    Args:
        percentage: part of the memory, at least 0 and below 1.
        parameter_multiplier: factor on the bytes of the dense model, for gradients and optimizer state.
        dense_tensor_estimate: bytes of the dense model in total, without the factor; None: measured from the model.
    """

    def __init__(
        self,
        percentage: float = RESERVED,
        parameter_multiplier: float = GRADIENTS_AND_STATE,
        dense_tensor_estimate: int | None = None,
    ) -> None:
        self.percentage = _part(type(self).__name__, percentage)
        self.parameter_multiplier = parameter_multiplier
        self.dense_tensor_estimate = dense_tensor_estimate
        _check_number(self, "parameter_multiplier", parameter_multiplier, "a number")
        if dense_tensor_estimate is not None:
            _check_number(self, "dense_tensor_estimate", dense_tensor_estimate, "bytes")

    def reserved(self, cap: int, module: nn.Module | None, input_bytes: int) -> int:
        dense = self.dense_tensor_estimate
        if dense is None:
            dense = math.ceil(dense_bytes(module) * self.parameter_multiplier)
        return math.ceil(cap * self.percentage) + int(dense) + 2 * input_bytes


@final
class FixedPercentageStorageReservation(StorageReservation):
    """Reservation of a part of the memory.

    Args:
        percentage: part of the memory, at least 0 and below 1.
    """

    def __init__(self, percentage: float) -> None:
        self.percentage = _part(type(self).__name__, percentage)

    def reserved(self, cap: int, module: nn.Module | None, input_bytes: int) -> int:
        return math.ceil(cap * self.percentage)


@final
class FixedAbsoluteStorageReservation(StorageReservation):
    """Reservation of a fixed number of bytes per rank.

    Args:
        hbm_reserved_bytes: bytes of device memory, or of host memory on CPU ranks.
    """

    def __init__(self, hbm_reserved_bytes: int) -> None:
        _check_number(self, "hbm_reserved_bytes", hbm_reserved_bytes, "bytes")
        self.hbm_reserved_bytes = hbm_reserved_bytes

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> FixedAbsoluteStorageReservation:
        """Return the reservation for a number of GB of 1024³ bytes, as in TorchRec."""
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
    """Reservation for inference: a part of the memory, the dense model without gradients, and two batches of input.

    Args:
        percentage: part of the memory, at least 0 and below 1.
        dense_tensor_estimate: bytes of the dense model; None: measured from the model.
    """

    def __init__(self, percentage: float, dense_tensor_estimate: int | None = None) -> None:
        self._as = HeuristicalStorageReservation(percentage, 1.0, dense_tensor_estimate)
        self.percentage = self._as.percentage

    def reserved(self, cap: int, module: nn.Module | None, input_bytes: int) -> int:
        return self._as.reserved(cap, module, input_bytes)


def dense_bytes(module: nn.Module | None) -> int:
    """Return the bytes of parameters and buffers that belong to no table; each tensor counts once."""
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
            f"{who}: percentage is {percentage!r}; it is a part of the memory and must be at least 0 and below 1."
        )
    return float(percentage)


def _check_number(of: StorageReservation, name: str, value: object, what: str) -> None:
    if not _is_number(value):
        raise ConfigError(f"{type(of).__name__}: {name} is {value!r}; it must be {what} from 0.")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
