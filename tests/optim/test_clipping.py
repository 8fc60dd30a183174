"""GradientClippingOptimizer equals torch's own clipping followed by a step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.optim.clipping import GradientClipping, GradientClippingOptimizer
from tilerec.optim.wrapper import KeyedOptimizerWrapper


def _params() -> dict[str, nn.Parameter]:
    params = {
        "a": nn.Parameter(torch.ones(3)),
        "b": nn.Parameter(torch.ones(2, 2)),
        "c": nn.Parameter(torch.ones(1)),
    }
    params["a"].grad = torch.tensor([3.0, 0.0, -4.0])
    params["b"].grad = torch.tensor([[1.0, -2.0], [2.0, 4.0]])
    return params  # c has no gradient


def _clipping(params: dict[str, nn.Parameter], **kwargs: Any) -> GradientClippingOptimizer:
    return GradientClippingOptimizer(KeyedOptimizerWrapper(params, lambda p: torch.optim.SGD(p, lr=0.1)), **kwargs)


@pytest.mark.parametrize("max_gradient", [0.5, 1.0, 100.0])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, "inf", float("inf")])
def test_norm_clipping_equals_torchs(norm_type: Any, max_gradient: float) -> None:
    ours, theirs = _params(), _params()
    opt = _clipping(ours, clipping=GradientClipping.NORM, max_gradient=max_gradient, norm_type=norm_type)
    opt.step()
    total = torch.nn.utils.clip_grad_norm_(theirs.values(), max_gradient, float(norm_type))
    torch.optim.SGD(theirs.values(), lr=0.1).step()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=0, atol=0)
    torch.testing.assert_close(opt.last_total_grad_norm, total, rtol=0, atol=0)


def test_the_norm_is_euclidean_unless_another_is_named() -> None:
    params = _params()
    opt = _clipping(params, clipping="norm", max_gradient=1e3)
    opt.step()
    assert float(opt.last_total_grad_norm) == pytest.approx(50.0**0.5)  # type: ignore[arg-type]


def test_value_clipping_clamps_every_element() -> None:
    params = _params()
    opt = _clipping(params, clipping="value", max_gradient=1.5)
    opt.step()
    assert params["a"].grad.tolist() == [1.5, 0.0, -1.5]  # type: ignore[union-attr]
    assert params["b"].grad.tolist() == [[1.0, -1.5], [1.5, 1.5]]  # type: ignore[union-attr]
    torch.testing.assert_close(params["a"].detach(), torch.tensor([0.85, 1.0, 1.15]))
    assert opt.last_total_grad_norm is None


def test_no_clipping_is_the_default() -> None:
    params = _params()
    opt = _clipping(params)
    opt.step()
    assert params["a"].grad.tolist() == [3.0, 0.0, -4.0]  # type: ignore[union-attr]
    assert opt.last_total_grad_norm is None


@pytest.mark.parametrize("clipping", list(GradientClipping))
def test_the_norm_is_tracked_before_clipping(clipping: GradientClipping) -> None:
    params = _params()
    opt = _clipping(params, clipping=clipping, max_gradient=1.0, track_grad_norm=True)
    opt.step()
    assert float(opt.last_total_grad_norm) == pytest.approx(50.0**0.5)  # type: ignore[arg-type]


def test_repeated_entries_of_a_sparse_gradient_are_one_element() -> None:
    table = nn.Parameter(torch.ones(5, 1))
    table.grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 3]]), torch.tensor([[1.0], [2.0], [4.0]]), (5, 1), check_invariants=True
    )
    opt = _clipping({"t": table}, clipping=GradientClipping.NORM, max_gradient=1.0)
    opt.step()
    assert float(opt.last_total_grad_norm) == pytest.approx(5.0)  # type: ignore[arg-type]
    torch.testing.assert_close(table.detach()[:, 0], torch.tensor([1.0, 1 - 0.06, 1.0, 1 - 0.08, 1.0]))


def test_the_closures_gradients_are_clipped() -> None:
    p = nn.Parameter(torch.ones(1))
    opt = _clipping({"p": p}, clipping=GradientClipping.VALUE, max_gradient=1.0)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = (100.0 * p).sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 100.0
    assert p.item() == pytest.approx(0.9)


def test_each_evaluation_of_the_closure_is_clipped() -> None:
    p = nn.Parameter(torch.ones(1))
    opt = GradientClippingOptimizer(
        KeyedOptimizerWrapper({"p": p}, lambda ps: torch.optim.LBFGS(ps, lr=0.1, max_iter=3)),
        GradientClipping.VALUE,
        1.0,
    )
    losses: list[float] = []

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = (100.0 * p * p).sum()
        loss.backward()
        losses.append(loss.item())
        return loss

    assert opt.step(closure).item() == 100.0
    assert len(losses) > 1
    assert p.grad is not None
    assert p.grad.item() == 1.0


@pytest.mark.parametrize("clipping", ["norm", "value"])
def test_a_largest_gradient_of_zero_makes_all_gradients_zero(clipping: str) -> None:
    params = _params()
    _clipping(params, clipping=clipping, max_gradient=0).step()
    assert [p.grad.abs().max().item() for p in params.values() if p.grad is not None] == [0.0, 0.0]
    assert all(bool((p == 1).all()) for p in params.values())


def test_without_gradients_nothing_happens() -> None:
    opt = _clipping({"p": nn.Parameter(torch.ones(1))}, clipping=GradientClipping.NORM)
    opt.step()
    assert float(opt.last_total_grad_norm) == 0.0  # type: ignore[arg-type]
    assert opt.params["p"].item() == 1.0


def test_a_nan_gradient_shows_in_the_norm() -> None:
    params = _params()
    params["a"].grad[0] = float("nan")  # type: ignore[index]
    opt = _clipping(params, clipping=GradientClipping.NORM, max_gradient=1.0)
    assert torch.isnan(opt.clip_grad_norm_())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"clipping": "sometimes"}, "got clipping='sometimes'; expected one of"),
        ({"max_gradient": -0.5}, "got max_gradient=-0.5; expected a number from 0"),
        ({"max_gradient": float("nan")}, "got max_gradient=nan"),
        ({"norm_type": 0.0}, "got norm_type=0.0; expected a number > 0"),
        ({"norm_type": "two"}, "got norm_type='two'"),
        (
            {"param_to_pgs": {nn.Parameter(torch.ones(1)): ["group"]}},
            "got 1 parameters outside sharded tables in param_to_pgs",
        ),
    ],
)
def test_a_setting_out_of_range_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _clipping(_params(), **kwargs)


def test_a_global_norm_may_be_asked_for_and_is_the_norm() -> None:
    ours, theirs = _params(), _params()
    _clipping(ours, clipping="norm", enable_global_grad_clip=True, max_gradient=1.0).step()
    _clipping(theirs, clipping="norm", max_gradient=1.0).step()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)


def test_parameters_that_the_backward_pass_updates_are_named_in_a_warning() -> None:
    params = _params()
    params["b"]._in_backward_optimizers = [object()]  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="got .*b, which the backward pass updates without clipping"):
        _clipping(params, clipping=GradientClipping.NORM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _clipping(params)


def test_state_is_that_of_the_optimizer_inside() -> None:
    params = _params()
    inner = KeyedOptimizerWrapper(params, lambda p: torch.optim.Adam(p))
    opt = GradientClippingOptimizer(inner, GradientClipping.NORM)
    opt.step()
    assert opt.state_dict()["state"].keys() == {"a", "b"}
    torch.testing.assert_close(opt.state_dict(), inner.state_dict(), rtol=0, atol=0)
