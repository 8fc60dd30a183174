"""`order_rows`: the worked example, what updates do with it, its fake."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

from tilerec.errors import InputError
from tilerec.ops import backends as backends
from tilerec.ops.update.calls import Features
from tilerec.ops.update.order import layers, reach

OPS = torch.ops.tilerec


def example() -> tuple[object, ...]:
    weights = [torch.ones(5, 2), torch.ones(3, 2)]
    return (weights, torch.tensor([4, 1, 2]), torch.tensor([0, 2, 3]), None, [0, 1], [0, 1], [1, 1], [0, 2], [4, 4],
            [0, 0])  # fmt: skip


def test_the_worked_example() -> None:
    keys, places, scales, first_keys = OPS.order_rows(*example())
    assert keys.tolist() == [1, 4, 7]
    assert places.tolist() == [0, 0, 2]
    assert scales.numel() == 0
    assert first_keys.tolist() == [0, 5, 8]
    assert keys.dtype == torch.int16


def test_scales_are_weights_over_lengths_and_the_rest_is_sentinels() -> None:
    weights, ids, offsets, _, *lists = example()
    *_, means = lists
    assert isinstance(means, list)
    rest = [[0], [0], [1], [0], [2], [1]]  # feature 1 is not there
    made = OPS.order_rows(weights[:1], ids, offsets, torch.tensor([1.0, 3.0, 9.0]), *rest)  # type: ignore[index]
    assert made[0].tolist() == [1, 4, 5]
    assert made[2].tolist()[:2] == [1.5, 0.5]


def test_updates_take_an_order_on_every_backend() -> None:
    weights, ids, offsets, _, *lists = example()
    grad = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    ordered = OPS.order_rows(weights, ids, offsets, None, *lists)
    rest = ("sgd", [0.1, 1.0, 0.0, 1.0, 0.0, 0.0], [1, 1], [0] * 4, [0, 0], [0, 0])
    OPS.update_rows_(weights, [], grad, ids, offsets, None, *lists, *rest, None, None, None, ordered)
    assert weights[0][4].tolist() == pytest.approx([0.9, 0.8])  # type: ignore[index]


def test_the_op_is_one_to_torch() -> None:
    opcheck(OPS.order_rows.default, example())


def test_bad_lists_are_refused() -> None:
    weights, ids, offsets, _, *lists = example()
    with pytest.raises(InputError, match="order_rows: feature number 1 has bags"):
        OPS.order_rows(weights, ids, offsets[:2], None, *lists)  # type: ignore[index]


def test_layers_and_reach() -> None:
    nothing, zeros = Features([], [], [], [], [], []), [0, 0]
    assert layers(Features([0] * 3, [0, 4, 0], [4] * 3, [0] * 3, [0] * 3, [0] * 3)) == 2
    assert layers(nothing) == 0
    assert layers(Features(zeros, [0, 2], [2, 2], zeros, zeros, zeros)) == 1
    assert reach([2, 3], Features([0, 1], zeros, [3, 0], [1, 99], [4, 5], zeros)) == 11
    assert reach([], nothing) == 0
