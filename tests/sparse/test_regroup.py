"""Which columns are copied where."""

from __future__ import annotations

import pytest
import torch

from tilerec.errors import InputError
from tilerec.sparse.columns import Columns
from tilerec.sparse.keys import UnknownKeyError
from tilerec.sparse.regroup import RegroupPlan, Run

ONE, TWO = Columns(["x", "y"], [2, 3]), Columns(["z"], [1])


def test_neighbours_are_copied_as_one_block() -> None:
    plan = RegroupPlan.make([ONE, TWO], [["z", "x"], ["x", "y"], ["y", "x"], []])
    assert plan.groups == (
        (Run(1, 0, 1), Run(0, 0, 2)),
        (Run(0, 0, 5),),
        (Run(0, 2, 5), Run(0, 0, 2)),
        (),
    )


def test_a_plan_concatenates_and_views() -> None:
    one, two = torch.arange(10.0).view(2, 5), torch.tensor([[10.0], [11.0]])
    outputs = RegroupPlan.make([ONE, TWO], [["z", "x"], ["x", "y"], []]).apply([one, two], 1)
    assert outputs[0].tolist() == [[10, 0, 1], [11, 5, 6]]
    assert outputs[1].data_ptr() == one.data_ptr()
    assert outputs[2].shape == (2, 0)


def test_keys_that_are_missing_or_ambiguous_are_refused() -> None:
    with pytest.raises(UnknownKeyError, match=r"unknown key 'q'; the inputs have \['x', 'y', 'z'\]"):
        RegroupPlan.make([ONE, TWO], [["q"]])
    with pytest.raises(InputError, match="key 'x' is in more than one input"):
        RegroupPlan.make([ONE, ONE], [["x"]])
    assert RegroupPlan.make([ONE, Columns(["x", "w"], [2, 1])], [["y", "w"]]).groups == (
        (Run(0, 2, 5), Run(1, 2, 3)),
    )
