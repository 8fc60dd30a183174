"""What is reserved, in bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.embedding_bag import EmbeddingBagCollection
from tilerec.planner import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
)
from tilerec.planner.reservation import dense_bytes
from tilerec.spec.table import EmbeddingBagConfig


def model() -> nn.Module:
    module = nn.Sequential(
        EmbeddingBagCollection([EmbeddingBagConfig(10**6, 64, "t")], device=torch.device("meta")),
        nn.Linear(10, 4),
        nn.BatchNorm1d(4),
    )
    module.add_module("tied", module[1])
    return module


DENSE = 4 * (10 * 4 + 4) + 4 * 4 * 4 + 8


def test_dense_bytes_are_those_of_no_table_each_once() -> None:
    assert dense_bytes(model()) == DENSE
    assert dense_bytes(None) == 0


@pytest.mark.parametrize(
    ("reservation", "bytes_"),
    [
        (HeuristicalStorageReservation(0.15), 150 + 6 * DENSE + 14),
        (HeuristicalStorageReservation(0.15, parameter_multiplier=2), 150 + 2 * DENSE + 14),
        (HeuristicalStorageReservation(0.15, 6.0, 99), 150 + 99 + 14),
        (FixedPercentageStorageReservation(0.25), 250),
        (FixedPercentageStorageReservation(percentage=0), 0),
        (FixedAbsoluteStorageReservation(77), 77),
        (InferenceStorageReservation(0.1), 100 + DENSE + 14),
        (InferenceStorageReservation(0.1, 5), 100 + 5 + 14),
    ],
)
def test_reservations_are_what_they_say(reservation: Any, bytes_: int) -> None:
    assert reservation.reserved(1000, model(), 7) == bytes_


@pytest.mark.parametrize("percentage", [-0.1, 1.0, 1.5, float("nan"), "10%", None, True])
def test_a_part_that_is_none_is_refused(percentage: Any) -> None:
    for kind in (
        HeuristicalStorageReservation, FixedPercentageStorageReservation, InferenceStorageReservation,
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"percentage is .* it is a part of the memory"):
            kind(percentage)


def test_gigabytes_are_of_1024_cubed_bytes() -> None:
    reservation = FixedAbsoluteStorageReservation.from_gb(1.5)
    assert reservation.reserved(10**12, None, 0) == 3 * 2**29
    with pytest.raises(ConfigError, match="got hbm_reserved_gb=-1; expected GB from 0"):
        FixedAbsoluteStorageReservation.from_gb(-1)


def test_bytes_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="hbm_reserved_bytes is -1"):
        FixedAbsoluteStorageReservation(-1)
    with pytest.raises(ConfigError, match="parameter_multiplier is nan"):
        HeuristicalStorageReservation(0.1, float("nan"))
    with pytest.raises(ConfigError, match="dense_tensor_estimate is -3"):
        HeuristicalStorageReservation(0.1, 6, -3)
