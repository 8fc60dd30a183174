"""RowWiseAdagrad, the torch optimizer, against its formula in float64 and against its row rule."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError
from tilerec.optim.rowwise_adagrad import RowWiseAdagrad
from tilerec.spec import optimizer as spec
from tilerec.spec.torch_optimizer import from_torch


def _oracle(w: list[list[float]], grads: list[list[list[float]]], **s: float) -> tuple[list[list[float]], list[float]]:
    """The formula, one number at a time."""
    sums = [s.get("initial_accumulator_value", 0.0)] * len(w)
    w = [list(row) for row in w]
    for t, grad in enumerate(grads, start=1):
        lr = s["lr"] / (1 + (t - 1) * s.get("lr_decay", 0.0))
        for r, row in enumerate(w):
            sign = -1.0 if s.get("maximize") else 1.0
            g = [sign * grad[r][d] + s.get("weight_decay", 0.0) * row[d] for d in range(len(row))]
            sums[r] += math.fsum(x * x for x in g) / len(row)
            for d in range(len(row)):
                row[d] -= lr * g[d] / (math.sqrt(sums[r]) + s.get("eps", 1e-10))
    return w, sums


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"weight_decay": 0.1},
        {"lr_decay": 0.1},
        {"initial_accumulator_value": 0.5},
        {"eps": 0.1},
        {"maximize": True},
        {"lr_decay": 0.5, "weight_decay": 0.2, "initial_accumulator_value": 0.1, "maximize": True},
    ],
)
@pytest.mark.parametrize("shape", [(4, 3), (5, 1), (1, 257)])
def test_it_follows_the_formula_in_float64(shape: tuple[int, int], settings: dict[str, Any]) -> None:
    p = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    grads = torch.randn(20, *shape, dtype=torch.float64)
    want, sums = _oracle(p.tolist(), grads.tolist(), lr=0.1, **settings)
    opt = RowWiseAdagrad([p], lr=0.1, **settings)
    for grad in grads:
        p.grad = grad.clone()
        opt.step()
    torch.testing.assert_close(p.detach(), torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(opt.state[p]["sum"], torch.tensor(sums, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert opt.state[p]["sum"].shape == shape[:1]
    assert float(opt.state[p]["step"]) == 20.0


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4), (0, 3), (3, 0), (0,)])
def test_a_row_is_a_slice_along_the_last_dimension(shape: tuple[int, ...]) -> None:
    p = nn.Parameter(torch.ones(shape))
    opt = RowWiseAdagrad([p], lr=0.1)
    p.grad = torch.full(shape, 2.0)
    opt.step()
    assert opt.state[p]["sum"].shape == shape[:-1]
    torch.testing.assert_close(p.detach(), torch.full(shape, 0.9))


def test_a_sparse_gradient_moves_its_rows_and_no_others() -> None:
    dense, sparse = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.empty(6, 3))
    with torch.no_grad():
        sparse.copy_(dense)
    start = dense.detach().clone()
    opts = [RowWiseAdagrad([p], lr=0.1, weight_decay=0.1) for p in (dense, sparse)]
    rows = torch.tensor([4, 1, 4])
    for _ in range(3):
        values = torch.randn(3, 3)
        sparse.grad = torch.sparse_coo_tensor(rows[None], values, (6, 3), check_invariants=True)
        dense.grad = sparse.grad.to_dense()
        for opt in opts:
            opt.step()
    torch.testing.assert_close(sparse[[1, 4]], dense[[1, 4]])
    untouched = [0, 2, 3, 5]
    torch.testing.assert_close(sparse.detach()[untouched], start[untouched], rtol=0, atol=0)
    assert opts[1].state[sparse]["sum"][untouched].tolist() == [0.0] * 4


def test_a_sparse_gradient_of_single_elements_is_refused() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    p.grad = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (3, 2), check_invariants=True)
    with pytest.raises(ConfigError, match=r"2 sparse dimensions .* expected whole rows"):
        RowWiseAdagrad([p]).step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_accumulate_in_float32(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.ones(2, 4, dtype=dtype))
    opt = RowWiseAdagrad([p], lr=0.1)
    for _ in range(3):
        p.grad = torch.full((2, 4), 1 / 64, dtype=dtype)
        opt.step()
    assert opt.state[p]["sum"].dtype == torch.float32
    assert opt.state[p]["sum"].tolist() == [3 / 4096] * 2
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    twin = RowWiseAdagrad([nn.Parameter(p.detach().clone())])
    twin.load_state_dict(torch.load(buffer, weights_only=True))
    state = next(iter(twin.state.values()))
    assert state["sum"].dtype == torch.float32
    assert state["sum"].tolist() == [3 / 4096] * 2


def test_sums_of_shape_rows_by_one_are_loaded() -> None:
    p = nn.Parameter(torch.ones(3, 2))
    opt = RowWiseAdagrad([p])
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["sum"] = torch.tensor([[1.0], [2.0], [3.0]])
    opt.load_state_dict(saved)
    assert opt.state[p]["sum"].tolist() == [1.0, 2.0, 3.0]


def test_groups_have_their_own_settings_and_parameters_without_gradient_stand_still() -> None:
    a, b, c = (nn.Parameter(torch.ones(2, 2)) for _ in range(3))
    opt = RowWiseAdagrad([{"params": [a], "lr": 0.5}, {"params": [c]}], lr=0.1)
    opt.add_param_group({"params": [b], "lr": 0.25, "initial_accumulator_value": 3.0})
    for p in (a, b):
        p.grad = torch.ones(2, 2)
    opt.step()
    assert a.tolist() == [[0.5, 0.5]] * 2
    assert b.tolist() == [[0.875, 0.875]] * 2
    assert c.tolist() == [[1.0, 1.0]] * 2
    assert float(opt.state[c]["step"]) == 0.0


def test_the_closure_runs_with_gradients_on() -> None:
    p = nn.Parameter(torch.ones(1, 1))
    opt = RowWiseAdagrad([p], lr=0.5)

    def closure() -> torch.Tensor:
        loss = p.sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == 1.0
    assert p.item() == 0.5


@pytest.mark.parametrize("name", ["lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_setting_out_of_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"got {name}={value}"):
        RowWiseAdagrad([nn.Parameter(torch.ones(1, 1))], **{name: value})


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(TypeError, match="foo"):
        RowWiseAdagrad([nn.Parameter(torch.ones(1, 1))], foo=3)  # type: ignore[call-arg]


def test_share_memory_moves_the_state() -> None:
    p = nn.Parameter(torch.ones(2, 2))
    opt = RowWiseAdagrad([p])
    opt.share_memory()
    assert all(value.is_shared() for value in opt.state[p].values())


def test_attached_it_stands_for_its_row_rule_with_the_same_defaults() -> None:
    assert from_torch(RowWiseAdagrad) == spec.RowWiseAdagrad()
    defaults = RowWiseAdagrad([nn.Parameter(torch.ones(1, 1))]).defaults
    ours = spec.RowWiseAdagrad().to_json()
    shared = {"lr", "eps", "weight_decay", "initial_accumulator_value"}
    assert {name: ours[name] for name in shared} == {name: defaults[name] for name in shared}
    assert from_torch(RowWiseAdagrad, {"lr": 0.5, "weight_decay": 0.1, "maximize": False}) == (
        spec.RowWiseAdagrad(0.5, weight_decay=0.1)
    )
    with pytest.raises(ConfigError, match="got maximize=True; expected"):
        from_torch(RowWiseAdagrad, {"maximize": True})
