"""Options by fineness: what they are expected to cost."""

from __future__ import annotations

import numpy as np

from tilerec.planner.search.bound import kinds_of
from tilerec.planner.search.granularity import choose
from tilerec.planner.search.instance import Instance
from tilerec.planner.search.relaxed import Relaxed
from tilerec.planner.search.work import Work


def test_charges_that_no_chosen_option_pays_are_not_expected() -> None:
    # Eight equal tables on 4 ranks: whole with a charge of 10, or split in two at the same cost with one of 5000.
    cost = np.tile(np.array([100, 50]), (8, 1))[:, :, None]
    uses = np.tile(np.array([[True, False], [False, True]]), (8, 1, 1))
    instance = Instance(
        [f"t{i}" for i in range(8)],
        np.ones((8, 2), np.int64),
        np.tile(np.array([1, 2]), (8, 1)),
        cost,
        np.zeros_like(cost),
        np.zeros_like(cost),
        np.ones((4, 1), np.int64),
        np.zeros(4, np.int64),
        uses=uses,
        charge=np.array([10, 5000]),
    )
    relaxed = Relaxed(instance)
    every = max(kinds_of(relaxed), key=lambda kinds: kinds.charge)
    assert every.charge == 5010
    choice = choose(relaxed, every, 4, 1, 0, Work(10**9))
    assert choice is not None
    assert choice.option.tolist() == [0] * 8
    assert choice.average == choice.expected == 210


def test_pieces_are_expected_where_homes_take_least() -> None:
    # 100 at home on the first of two ranks alone, and a piece of 100.
    one = np.full((1, 1, 1), 100)
    instance = Instance(
        ["t"], np.ones((1, 1), np.int64), np.ones((1, 1), np.int64), one, one, np.zeros_like(one),
        np.ones((2, 1), np.int64), np.zeros(2, np.int64), reach=np.array([[1000], [0]]),
    )  # fmt: skip
    relaxed = Relaxed(instance)
    choice = choose(relaxed, kinds_of(relaxed)[0], 4, 1, 0, Work(10**9))
    assert choice is not None
    assert choice.average == choice.expected == 100
