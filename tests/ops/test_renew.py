"""Rows that begin anew: which are written, with what, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from tilerec.errors import ConfigError
from tilerec.ops import backends as backends

OPS = torch.ops.tilerec
KEY = [3, 4]


def whole(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    table = torch.empty(rows, columns, dtype=dtype)
    OPS.random_fill_(table, KEY, 0, 0, "uniform", -0.5, 0.5)
    return table


def renew(rows: list[int], tile: Tensor | None, beside: list[Tensor], *place: int) -> None:
    OPS.renew_rows_(
        torch.tensor(rows, dtype=torch.int64),
        tile,
        beside,
        *place,
        KEY,
        -0.5,
        0.5,
        [7.0, 0.25][: len(beside)],
    )


def test_it_gives_the_worked_example() -> None:
    tile, beside = torch.full((4, 3), 9.0), torch.tensor([1.0, 2.0, 3.0, 4.0])
    OPS.renew_rows_(torch.tensor([5, -1, 9, 5]), tile, [beside], 4, 0, KEY, -0.5, 0.5, [0.0])
    assert beside.tolist() == [1, 0, 3, 4]
    assert torch.equal(tile[1], whole(6, 3)[5])
    assert (tile[[0, 2, 3]] == 9).all()


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        (1, torch.float32),
        (257, torch.float32),
        (3, torch.bfloat16),
        (9, torch.float16),
        (3, torch.float8_e4m3fn),
        (3, torch.float64),
    ],
)
def test_rows_get_the_values_of_their_place_and_others_stay(columns: int, dtype: torch.dtype) -> None:
    table = whole(90, columns + 5, dtype)
    tile, rowwise = torch.full((70, columns), 2.0).to(dtype), torch.full((70,), 2.0)
    moment = torch.full((70, columns), 2.0)
    rows = [-1] * 60 + [19, 20, 45, -1, 89, 90, 2**62, 45]
    renew(rows, tile, [rowwise, moment], 20, 5)
    new = torch.zeros(70, dtype=torch.bool)
    new[[0, 25, 69]] = True
    assert torch.equal(tile[new].float(), table[20:, 5:][new].float())
    assert (tile[~new].float() == 2).all()
    assert torch.equal(rowwise, torch.where(new, 7.0, 2.0))
    assert torch.equal(moment, torch.where(new[:, None], 0.25, 2.0).expand(70, columns))


def test_where_no_row_lies_nothing_is_written() -> None:
    tile, beside = torch.full((4, 3), 9.0), torch.full((4,), 9.0)
    for rows in ([], [-1, -1], [99], [3]):
        renew(rows, tile, [beside], 4, 0)
    renew([4], None, [], 4, 0)
    renew([0], torch.empty(0, 3), [torch.empty(0)], 0, 0)
    assert (tile == 9).all()
    assert (beside == 9).all()
    renew([5], None, [beside], 4, 0)
    assert beside.tolist() == [9, 7, 9, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0]], [torch.zeros(2)], [0.0]), r"tensors of \[1, 2\] rows, and 1 numbers"),
        (([[1.0]], [torch.zeros(1)], []), "0 numbers for 1 tensors in `beside`"),
        (([1.0], [], []), r"a tile of shape \[1\]"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: Any, message: str) -> None:
    tile, beside, numbers = arguments
    with pytest.raises(ConfigError, match=message):
        OPS.renew_rows_(torch.tensor([0]), torch.tensor(tile), beside, 0, 0, KEY, 0.0, 1.0, numbers)
    with pytest.raises(ConfigError, match="flat list of int64"):
        OPS.renew_rows_(torch.tensor([0.0]), None, [], 0, 0, KEY, 0.0, 1.0, [])


def test_it_passes_opcheck() -> None:
    opcheck(
        OPS.renew_rows_.default,
        (
            torch.tensor([1, -1]),
            torch.zeros(3, 4),
            [torch.ones(3), torch.ones(3, 4)],
            0,
            0,
            KEY,
            0.0,
            1.0,
            [0.0, 0.5],
        ),
    )
