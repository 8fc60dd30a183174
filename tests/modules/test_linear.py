"""`linear` equals torch's in values and gradients of any order, whichever library computes it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilerec.modules import linear as module
from tilerec.modules.linear import Linear, linear
from tilerec.torch_private import onednn_linear

with_onednn = pytest.mark.skipif(onednn_linear is None, reason="this torch has no oneDNN")


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """oneDNN for all sizes, on any processor; returns the shapes of its products."""
    shapes: list[tuple[int, ...]] = []
    product = module._product

    def counted(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
        shapes.append((*left.shape, right.shape[0]))
        return product(left, right, bias)

    monkeypatch.setattr(module, "_onednn_is_faster", lambda: True)
    monkeypatch.setattr(module, "_product", counted)
    monkeypatch.setattr(module, "MIN_PRODUCTS", 1)
    monkeypatch.setattr(module, "MIN_WIDTH", 1)
    return shapes


def made(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


@with_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("batch", "inputs", "outputs"), [(17, 13, 32), (1, 8, 8), (5, 1, 3), (64, 40, 1)])
def test_values_and_gradients_equal_those_of_torch(
    faster: list[tuple[int, ...]], batch: int, inputs: int, outputs: int, bias: bool
) -> None:
    x, w, b = made(batch, inputs), made(outputs, inputs), made(outputs) if bias else None
    given = [t for t in (x, w, b) if t is not None]
    ours, torchs = linear(x, w, b), F.linear(x, w, b)
    grad = made(batch, outputs).detach()
    assert faster == [(batch, inputs, outputs)]
    torch.testing.assert_close(ours, torchs)
    for own, other in zip(
        torch.autograd.grad(ours, given, grad), torch.autograd.grad(torchs, given, grad), strict=True
    ):
        torch.testing.assert_close(own, other)
    assert len(faster) == 3


@with_onednn
def test_only_the_needed_gradients_are_computed(faster: list[tuple[int, ...]]) -> None:
    x, w = made(6, 4).detach(), made(5, 4)
    linear(x, w).sum().backward()  # the gradient of a sum is expanded, without memory of its own
    assert faster == [(6, 4, 5), (4, 6, 5)]  # the narrower operand is transposed
    assert w.grad is not None
    torch.testing.assert_close(w.grad, x.sum(0).expand(5, 4))


@with_onednn
def test_transposed_inputs_are_read_in_place(faster: list[tuple[int, ...]]) -> None:
    x, w = made(4, 6).t(), made(4, 5).t()
    torch.testing.assert_close(linear(x, w), F.linear(x, w))
    assert faster


@with_onednn
@pytest.mark.parametrize("strides", [(1, 0), (0, 1), (3, 1), (2, 24), (8, 1)])
def test_operands_may_be_any_views(faster: list[tuple[int, ...]], strides: tuple[int, int]) -> None:
    x = torch.as_strided(made(200).detach(), (12, 6), strides).requires_grad_()
    w = torch.as_strided(made(201).detach(), (9, 6), strides).requires_grad_()
    ours, torchs = (torch.autograd.grad(function(x, w).square().sum(), (x, w)) for function in (linear, F.linear))
    assert faster
    for own, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(own, other)


@with_onednn
def test_second_derivatives_equal_those_of_torch(faster: list[tuple[int, ...]]) -> None:
    x, w, b = made(6, 4), made(5, 4), made(5)
    found = []
    for function in (linear, F.linear):
        (first,) = torch.autograd.grad(function(x, w, b).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (x, w, b)))
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other)


@with_onednn
@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch's own, of `flags`
@pytest.mark.parametrize("case", ["float64", "dims", "autocast", "off", "compile", "vmap", "empty", "small"])
def test_torch_computes_all_else(faster: list[tuple[int, ...]], case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = made(6, 4).detach(), made(5, 4).detach()
    expected = F.linear(x, w)
    found: Tensor
    if case == "float64":
        found = linear(x.double(), w.double()).float()
    elif case == "dims":
        found = linear(x.view(2, 3, 4), w).view(6, 5)
    elif case == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            found = linear(x, w)
        assert found.dtype == torch.bfloat16
        return
    elif case == "off":
        with torch.backends.mkldnn.flags(enabled=False):
            found = linear(x, w)
    elif case == "compile":
        found = torch.compile(linear, backend="eager", fullgraph=True)(x, w)
    elif case == "vmap":
        found = torch.func.vmap(linear, in_dims=(0, None))(x.view(2, 3, 4), w).view(6, 5)
    elif case == "empty":
        found = torch.cat([linear(x[:0], w), expected])
    else:
        monkeypatch.setattr(module, "MIN_PRODUCTS", 6 * 4 * 5 + 1)
        found = linear(x, w)
    torch.testing.assert_close(found, expected)
    assert not faster


def test_wrong_shapes_raise_the_error_of_torch(faster: list[tuple[int, ...]]) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(made(6, 3), made(5, 4))


def test_a_layer_is_a_linear_layer_of_torch() -> None:
    layer = Linear(4, 5)
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == ["weight", "bias"]
    x = made(6, 4)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


@pytest.fixture(params=["oneDNN", "MKL"])
def each_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of all sizes count as large, in each library in turn."""
    if request.param == "oneDNN" and onednn_linear is None:
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(module, "_onednn_is_faster", lambda: request.param == "oneDNN")
    monkeypatch.setattr(module, "MIN_PRODUCTS", 1)
    monkeypatch.setattr(module, "MIN_WIDTH", 1)


@pytest.mark.usefixtures("each_library")
@pytest.mark.parametrize("bias", [True, False])
def test_a_relu_after_the_product_equals_that_of_torch(bias: bool) -> None:
    x, w, b = made(17, 12), made(9, 12), made(9) if bias else None
    x.data[3] = float("nan")
    given = [t for t in (x, w, b) if t is not None]
    ours, torchs = linear(x, w, b, relu=True), torch.relu(F.linear(x, w, b))
    assert 0 < int((ours == 0).sum()) < ours.numel()
    torch.testing.assert_close(ours, torchs, equal_nan=True)
    grad = made(17, 9).detach()
    for own, other in zip(
        torch.autograd.grad(ours, given, grad), torch.autograd.grad(torchs, given, grad), strict=True
    ):
        torch.testing.assert_close(own, other, equal_nan=True)


@pytest.mark.usefixtures("each_library")
def test_second_derivatives_pass_a_relu() -> None:
    x, w, b = made(6, 4), made(5, 4), made(5)
    found = []
    for function in (lambda *t: linear(*t, relu=True), lambda *t: torch.relu(F.linear(*t))):
        (first,) = torch.autograd.grad(function(x, w, b).square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (x, w, b)))
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.usefixtures("each_library")
def test_results_that_a_caller_keeps_are_not_written_again() -> None:
    x, w = made(2048, 16), made(600, 16)  # 4.9 MB: memory that is used again once it is free
    kept = linear(x, w, relu=True)
    before = kept.clone()
    for _ in range(3):
        linear(x * 2, w, relu=True).sum().backward()
    assert torch.equal(kept, before)


def test_a_relu_after_a_small_product_is_that_of_torch() -> None:
    x, w = made(6, 4), made(5, 4)
    assert torch.equal(linear(x, w, relu=True), torch.relu(F.linear(x, w)))
