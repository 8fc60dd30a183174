from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.crossnet import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet

SHAPES = [(0, 3, 2), (1, 1, 1), (4, 3, 0), (3, 5, 3), (2, 257, 2)]  # samples, features, layers


def perturb(module: nn.Module) -> nn.Module:
    """Values in float64 that no initialiser gives: biases are not zero."""
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    return module


def sample_by_sample(
    x0: torch.Tensor, cross: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor], layers: int
) -> torch.Tensor:
    """`x_{l+1} = cross(l, x_0, x_l) + x_l` for each sample alone."""
    out = []
    for x_0 in x0:
        x_l = x_0
        for layer in range(layers):
            x_l = cross(layer, x_0, x_l) + x_l
        out.append(x_l)
    return torch.stack(out) if out else x0


@pytest.mark.parametrize(("batch", "width", "layers"), SHAPES)
def test_cross_net_is_equation_1_of_dcn_v2(batch: int, width: int, layers: int) -> None:
    net = perturb(CrossNet(width, layers))
    x = torch.randn(batch, width, dtype=torch.float64)

    def cross(layer: int, x_0: torch.Tensor, x_l: torch.Tensor) -> torch.Tensor:
        return x_0 * (torch.mv(net.kernels[layer], x_l) + net.bias[layer][:, 0])

    torch.testing.assert_close(net(x), sample_by_sample(x, cross, layers))


@pytest.mark.parametrize(("batch", "width", "layers"), SHAPES)
@pytest.mark.parametrize("rank", [1, 4])
def test_low_rank_cross_net_is_equation_2_of_dcn_v2(batch: int, width: int, layers: int, rank: int) -> None:
    net = perturb(LowRankCrossNet(width, layers, rank))
    x = torch.randn(batch, width, dtype=torch.float64)

    def cross(layer: int, x_0: torch.Tensor, x_l: torch.Tensor) -> torch.Tensor:
        return x_0 * (torch.mv(net.W_kernels[layer] @ net.V_kernels[layer], x_l) + net.bias[layer])

    torch.testing.assert_close(net(x), sample_by_sample(x, cross, layers))


@pytest.mark.parametrize(("batch", "width", "layers"), SHAPES)
def test_vector_cross_net_is_equation_3_of_dcn(batch: int, width: int, layers: int) -> None:
    net = perturb(VectorCrossNet(width, layers))
    x = torch.randn(batch, width, dtype=torch.float64)

    def cross(layer: int, x_0: torch.Tensor, x_l: torch.Tensor) -> torch.Tensor:
        # the paper's x_0 x_lᵀ w: an outer product, then a vector
        return torch.outer(x_0, x_l) @ net.kernels[layer][:, 0] + net.bias[layer][:, 0]

    torch.testing.assert_close(net(x), sample_by_sample(x, cross, layers))


@pytest.mark.parametrize(("batch", "width", "layers"), SHAPES)
@pytest.mark.parametrize("experts", [1, 3])
def test_mixture_cross_net_is_equations_3_and_4_of_dcn_v2(batch: int, width: int, layers: int, experts: int) -> None:
    net = perturb(LowRankMixtureCrossNet(width, layers, experts, low_rank=2, activation=torch.tanh))
    x = torch.randn(batch, width, dtype=torch.float64)

    def cross(layer: int, x_0: torch.Tensor, x_l: torch.Tensor) -> torch.Tensor:
        u, v, c = net.U_kernels[layer], net.V_kernels[layer], net.C_kernels[layer]
        scores = [(net.gates[e].weight[0] * x_l).sum() if experts > 1 else x_l.new_zeros(()) for e in range(experts)]
        total = sum(score.exp() for score in scores)
        out = torch.zeros_like(x_0)
        for e in range(experts):
            hidden = torch.tanh(c[e] @ torch.tanh(v[e] @ x_l))
            out = out + scores[e].exp() / total * (x_0 * (u[e] @ hidden + net.bias[layer][:, 0]))
        return out

    torch.testing.assert_close(net(x), sample_by_sample(x, cross, layers))


NETS = {
    "full": lambda **kw: CrossNet(5, 2, **kw),
    "low_rank": lambda **kw: LowRankCrossNet(5, 2, 3, **kw),
    "vector": lambda **kw: VectorCrossNet(5, 2, **kw),
    "mixture": lambda **kw: LowRankMixtureCrossNet(5, 2, 3, 2, activation=torch.tanh, **kw),
}


@pytest.mark.parametrize("name", NETS)
def test_a_gradient_check_passes_for_input_and_weights(name: str) -> None:
    net = perturb(NETS[name]())
    names = [n for n, _ in net.named_parameters()]
    values = tuple(p.detach().clone().requires_grad_() for p in net.parameters())

    def call(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(net, dict(zip(names, weights, strict=True)), (x,))
        return out

    assert torch.autograd.gradcheck(
        call, (torch.randn(2, 5, dtype=torch.float64, requires_grad=True), *values), fast_mode=True
    )


@pytest.mark.parametrize("name", NETS)
def test_gradients_of_gradients_are_right(name: str) -> None:
    net = perturb(NETS[name]())
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(net, (x,), fast_mode=True)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("frozen", ["input", "V_kernels", "bias"])
def test_frozen_parts_get_no_gradient_and_the_others_keep_theirs(layers: int, frozen: str) -> None:
    """Beside autograd's own backward; the gradient of the output stays as it is, for others may read it."""
    net = perturb(LowRankCrossNet(5, layers, 3))
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=frozen != "input")
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    wanted = [t for t in (x, *net.parameters()) if t.requires_grad]
    y = x
    for w, v, b in zip(net.W_kernels, net.V_kernels, net.bias, strict=True):
        y = x * (y @ v.t() @ w.t() + b) + y
    grad = torch.randn_like(y)
    before = grad.clone()
    found = torch.autograd.grad(net(x), wanted, grad)
    torch.testing.assert_close(found, torch.autograd.grad(y, wanted, grad))
    assert torch.equal(grad, before)
    net(x).backward(grad)
    assert all((p.grad is None) == name.startswith(frozen) for name, p in net.named_parameters())


@pytest.mark.parametrize("kind", ["full", "low_rank"])
@pytest.mark.parametrize("layers", [1, 3])
def test_float32_equals_float64_for_strided_inputs_and_expanded_gradients(kind: str, layers: int) -> None:
    """In float32 on the CPU the bias is added by the element-wise pass, elsewhere by the product."""
    torch.manual_seed(layers)
    net: nn.Module = CrossNet(33, layers) if kind == "full" else LowRankCrossNet(33, layers, 4)
    perturb(net)
    wide = torch.randn(70, 66)
    results = []
    for dtype in (torch.float32, torch.float64):
        own = copy.deepcopy(net).to(dtype)
        x = wide.to(dtype)[:, ::2].requires_grad_()
        out = own(x)
        of_x, *of_weights = torch.autograd.grad(out.sum(), (x, *own.parameters()))
        scale = 1 / max(t.abs().max().item() for t in (out, of_x, *of_weights))
        results.append([t.double() * scale for t in (out, of_x, *of_weights)])
    torch.testing.assert_close(*results, rtol=1e-5, atol=2e-6)


def test_the_gradient_of_the_output_stays_as_it_is() -> None:
    net = LowRankCrossNet(7, 3, 2)
    x, grad = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
    before = grad.clone()
    net(x).backward(grad)
    assert torch.equal(grad, before)


def test_memory_of_earlier_steps_does_not_change_later_ones() -> None:
    """Vectors of 4 MB are in memory that is used again; results that are still in use keep theirs."""
    net = LowRankCrossNet(1024, 2, 2)
    x = torch.randn(1024, 1024, requires_grad=True)
    first = net(x)
    (of_x,) = torch.autograd.grad(first.sum(), x)
    kept, kept_grad = first.clone(), of_x.clone()
    with torch.inference_mode():
        assert torch.equal(net(x), kept)
    for _ in range(2):
        assert torch.equal(net(x), kept)
        assert torch.equal(torch.autograd.grad(net(x).sum(), x)[0], kept_grad)
    assert torch.equal(first, kept)
    assert torch.equal(of_x, kept_grad)


def test_autocast_reaches_the_products() -> None:
    net = LowRankCrossNet(16, 2, 8)
    x = torch.randn(32, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = net(x)
    out.sum().backward()
    torch.testing.assert_close(out.float(), net(x), atol=0.1, rtol=0.05)
    assert not torch.equal(out.float(), net(x))


@pytest.mark.parametrize("name", NETS)
def test_it_compiles_in_one_graph_and_copies(name: str) -> None:
    net = NETS[name]()
    x = torch.randn(4, 5)
    torch.testing.assert_close(torch.compile(net, fullgraph=True, backend="aot_eager")(x), net(x))
    assert torch.equal(copy.deepcopy(net)(x), net(x))


@pytest.mark.parametrize("name", NETS)
def test_device_and_dtype_reach_every_weight(name: str) -> None:
    net = NETS[name](device=torch.device("meta"), dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in net.parameters())


def test_names_and_shapes_of_the_state_are_fixed() -> None:
    def shapes(net: nn.Module) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in net.state_dict().items()}

    assert shapes(CrossNet(5, 1)) == {"kernels.0": (5, 5), "bias.0": (5, 1)}
    assert shapes(LowRankCrossNet(5, 1, 3)) == {"W_kernels.0": (5, 3), "V_kernels.0": (3, 5), "bias.0": (5,)}
    assert shapes(VectorCrossNet(5, 1)) == {"kernels.0": (5, 1), "bias.0": (5, 1)}
    mixture = {"U_kernels.0": (2, 5, 3), "V_kernels.0": (2, 3, 5), "C_kernels.0": (2, 3, 3), "bias.0": (5, 1)}
    assert shapes(LowRankMixtureCrossNet(5, 1, 2, 3)) == mixture | {
        "gates.0.weight": (1, 5),
        "gates.1.weight": (1, 5),
    }
    assert not any(name.startswith("gates") for name in shapes(LowRankMixtureCrossNet(5, 1, 1, 3)))


def test_initial_kernels_have_the_spread_of_one_matrix_whatever_the_experts() -> None:
    net = LowRankMixtureCrossNet(300, 1, num_experts=4, low_rank=60)
    assert net.U_kernels[0].std().item() == pytest.approx((2 / 360) ** 0.5, rel=0.05)
    assert CrossNet(200, 1).kernels[0].std().item() == pytest.approx((2 / 400) ** 0.5, rel=0.05)
    assert not net.bias[0].any()


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="CrossNet: in_features: got 0"):
        CrossNet(0, 1)
    with pytest.raises(ConfigError, match="LowRankCrossNet: low_rank: got 0"):
        LowRankCrossNet(5, 1, 0)
    with pytest.raises(ConfigError, match="VectorCrossNet: num_layers: got -1; expected an integer of at least 0"):
        VectorCrossNet(5, -1)
    with pytest.raises(ConfigError, match="num_experts: got 0"):
        LowRankMixtureCrossNet(5, 1, 0)
    for name, net in NETS.items():
        with pytest.raises(InputError, match=re.escape("got input of shape [2, 4]; expected [batch, 5]")):
            net()(torch.zeros(2, 4))
        with pytest.raises(InputError, match=re.escape("got input of shape [5]")):
            NETS[name]()(torch.zeros(5))
