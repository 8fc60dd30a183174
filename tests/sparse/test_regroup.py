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
    with pytest.raises(UnknownKeyError, match=r"unknown key 'q'; expected some of \['x', 'y', 'z'\]"):
        RegroupPlan.make([ONE, TWO], [["q"]])
    with pytest.raises(InputError, match="got key 'x' in more than one input"):
        RegroupPlan.make([ONE, ONE], [["x"]])
    assert RegroupPlan.make([ONE, Columns(["x", "w"], [2, 1])], [["y", "w"]]).groups == ((Run(0, 2, 5), Run(1, 2, 3)),)


def test_an_input_is_split_once_and_its_gradient_put_together_once() -> None:
    """Runs that overlap, that are taken twice, and columns that no group takes."""
    inputs = [Columns(["a", "b", "c", "d"], [2, 3, 1, 2]), Columns(["e", "f"], [1, 2])]
    groups = [["d", "b", "e"], ["a", "b", "f", "d"], ["f"], ["e", "e"], []]
    one = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    two = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    column = {
        "a": one[:, 0:2],
        "b": one[:, 2:5],
        "c": one[:, 5:6],
        "d": one[:, 6:8],
        "e": two[:, :1],
        "f": two[:, 1:],
    }
    outputs = RegroupPlan.make(inputs, groups).apply([one, two], 1)
    expected = [torch.cat([column[key] for key in group], 1) if group else one[:, :0] for group in groups]
    for output, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(output, wanted)
    grads = [torch.randn_like(output) for output in outputs]
    got = torch.autograd.grad(outputs, [one, two], grads)
    for one_grad, wanted in zip(got, torch.autograd.grad(expected, [one, two], grads), strict=True):
        torch.testing.assert_close(one_grad, wanted, rtol=1e-12, atol=1e-12)


def test_a_backward_makes_one_tensor_as_large_as_the_input() -> None:
    keys = [f"k{i}" for i in range(12)]
    plan = RegroupPlan.make([Columns(keys, [4] * 12)], [keys[::2], keys[1::2]])
    value = torch.randn(5, 48, requires_grad=True)
    outputs = plan.apply([value], 1)
    with torch.profiler.profile() as profile:
        torch.autograd.grad([output.sum() for output in outputs], value)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls.get("aten::cat") == 1
    assert "aten::slice_backward" not in calls
