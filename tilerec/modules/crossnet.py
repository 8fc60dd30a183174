"""Cross networks: explicit feature crosses of bounded degree.

Nouns
  x_0     the input of the network; every layer multiplies by it, so l layers give crosses of degree up to l + 1
  x_l     the input of layer l
  expert  one low-rank cross of a mixture; a softmax gate over x_l weighs the experts

Equations (⊙ is the element-wise product; DCN is 1708.05123, DCN-V2 is 2008.13535)
  CrossNet                x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l                        DCN-V2, eq. 1
  LowRankCrossNet         x_{l+1} = x_0 ⊙ (W_l V_l x_l + b_l) + x_l                    DCN-V2, eq. 2
  VectorCrossNet          x_{l+1} = x_0 (w_l · x_l) + b_l + x_l                        DCN, eq. 3
  LowRankMixtureCrossNet  x_{l+1} = Σ_e G_e(x_l) E_e(x_l) + x_l                        DCN-V2, eq. 3
                          E_e(x) = x_0 ⊙ (U_le g(C_le g(V_le x)) + b_l)                DCN-V2, eq. 4
                          G(x) = softmax(gates x)

Legend of the shapes in names: B samples, I features, R low rank, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tilerec.modules.linear import add_input_gradient, input_gradient, linear, product, weight_gradient
from tilerec.modules.utils import TensorFunction, check_last_dim, check_size
from tilerec.ops.backends import reused_empty
from tilerec.ops.cross.definition import adds_bias, cross, cross_backward
from tilerec.ops.runtime.dispatch import can_bypass_dispatcher


class _Crossed(torch.autograd.Function):
    """`addcmul` with a backward of two products; torch's own multiplies both by 1 before, which writes two tensors."""

    @staticmethod
    def forward(ctx: Any, x_BI: torch.Tensor, x0_BI: torch.Tensor, factor_BI: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x0_BI, factor_BI)
        return torch.addcmul(x_BI, x0_BI, factor_BI)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x0_BI, factor_BI = ctx.saved_tensors
        of_x, of_x0, of_factor = ctx.needs_input_grad
        grad_BI = grads[0]
        return (
            grad_BI if of_x else None,
            grad_BI * factor_BI if of_x0 else None,
            grad_BI * x0_BI if of_factor else None,
        )


def _crossed(x_BI: torch.Tensor, x0_BI: torch.Tensor, factor_BI: torch.Tensor) -> torch.Tensor:
    """Return `x + x0 ⊙ factor`."""
    tensors = (x_BI, x0_BI, factor_BI)
    if not can_bypass_dispatcher(tensors) or len({t.dtype for t in tensors}) > 1:
        return torch.addcmul(x_BI, x0_BI, factor_BI)
    crossed: torch.Tensor = _Crossed.apply(x_BI, x0_BI, factor_BI)
    return crossed


def _plain_crosses(x0_BI: torch.Tensor, layers: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Return the output of layers `x + x0 ⊙ (M_k … M_1 x + b)`, each given as (M_1, …, M_k, b).

    `addcmul` would round once, on processors with fused products. The native passes of eager mode round twice.
    """
    x_BI = x0_BI
    for *inner, last, bias_I in layers:
        hidden = x_BI
        for matrix in inner:
            hidden = linear(hidden, matrix)
        x_BI = x_BI + x0_BI * linear(hidden, last, bias_I)
    return x_BI


class _Crosses(torch.autograd.Function):
    """`_plain_crosses` with one pass per layer each way (`ops/cross`), and one tensor for each sum of gradients.

    autograd would write a new tensor [B, I] for each term and for each sum of two terms. Such a tensor has 28 MB for
    2,048 samples of 27 vectors of 128, so the step waits for memory. docs/modules.md has the figures.
    """

    @staticmethod
    def forward(ctx: Any, x0_BI: torch.Tensor, count: int, *parameters: torch.Tensor) -> torch.Tensor:
        saved: list[torch.Tensor] = []
        x_BI = x0_BI
        for *inner, last, bias_I in _split(parameters, count):
            inputs = [x_BI]
            for matrix in inner:
                inputs.append(product(inputs[-1], matrix))
            apart = adds_bias(x_BI)
            factor_BI = product(inputs[-1], last) if apart else linear(inputs[-1], last, bias_I)
            saved += [*inputs, factor_BI]
            out_BI = _like(x0_BI)
            cross(x_BI, x0_BI, factor_BI, bias_I if apart else None, out_BI)
            x_BI = out_BI
        ctx.count = count
        ctx.save_for_backward(x0_BI, *parameters, *saved[1:])  # saved[0] is x0
        return x_BI

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x0_BI, *saved = ctx.saved_tensors
        count = ctx.count
        each = (len(saved) + 1) // (2 * count)  # parameters of a layer; as many tensors were saved for it
        parameters = saved[: each * count]
        if torch.is_grad_enabled():  # create_graph=True
            return _differentiable(x0_BI, parameters, grads[0], ctx.needs_input_grad, count)
        layers = _split(parameters, count)
        kept = _split([x0_BI, *saved[each * count :]], count)
        of_parameters: list[torch.Tensor | None] = [None] * len(parameters)
        wanted = ctx.needs_input_grad[2:]
        grad_BI, of_x0_BI, room_BI = grads[0], _like(x0_BI), _like(x0_BI)
        for number in reversed(range(count)):
            *matrices, bias_I = layers[number]
            *inputs, factor_BI = kept[number]
            of_bias_I = bias_I.new_empty(bias_I.shape)
            cross_backward(
                grad_BI, x0_BI, factor_BI, bias_I if adds_bias(x0_BI) else None, adds=number < count - 1,
                first=number == 0, of_x0_BI=of_x0_BI, of_factor_BI=room_BI, of_bias_I=of_bias_I,
            )  # fmt: skip
            flow = room_BI  # the gradient of the factor, then of the inputs of its matrices
            place = number * each
            if wanted[place + each - 1]:
                of_parameters[place + each - 1] = of_bias_I
            for m in reversed(range(each - 1)):
                if wanted[place + m]:
                    of_parameters[place + m] = weight_gradient(flow, inputs[m])
                if m:
                    flow = input_gradient(flow, matrices[m])
            if number:
                own = number < count - 1  # the first one belongs to autograd
                grad_BI = add_input_gradient(grad_BI, flow, matrices[0], in_place=own)
            else:
                of_x0_BI = add_input_gradient(of_x0_BI, flow, matrices[0], in_place=True)
        return of_x0_BI, None, *of_parameters


def _like(x_BI: torch.Tensor) -> torch.Tensor:
    return reused_empty(x_BI.shape, x_BI.dtype, x_BI.device)


def _differentiable(
    x0_BI: torch.Tensor, parameters: Sequence[torch.Tensor], grad_BI: torch.Tensor, wanted: Sequence[bool], count: int
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients as functions that autograd can differentiate again."""
    inputs = [x0_BI, *parameters]
    needed = [wanted[0], *wanted[2:]]
    made = torch.autograd.grad(
        _plain_crosses(x0_BI, _split(parameters, count)), [t for t, own in zip(inputs, needed, strict=True) if own],
        grad_BI, create_graph=True,
    )  # fmt: skip
    found = iter(made)
    of_x0, *rest = [next(found) if own else None for own in needed]
    return of_x0, None, *rest


def _split(tensors: Sequence[torch.Tensor], count: int) -> list[Sequence[torch.Tensor]]:
    """Return the tensors in `count` parts of one length."""
    each = len(tensors) // count
    return [tensors[i * each : (i + 1) * each] for i in range(count)]


def _crosses(x0_BI: torch.Tensor, layers: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Return the output of layers `x + x0 ⊙ (M_k … M_1 x + b)`, each given as (M_1, …, M_k, b)."""
    tensors = [x0_BI, *(t for layer in layers for t in layer)]
    usual = can_bypass_dispatcher(tensors) and len({t.dtype for t in tensors}) == 1
    if not layers or not usual or torch.is_autocast_enabled(x0_BI.device.type):
        return _plain_crosses(x0_BI, layers)
    crossed: torch.Tensor = _Crosses.apply(x0_BI, len(layers), *tensors[1:])
    return crossed


class _CrossLayers(nn.Module):
    """Parameters and checks of the cross networks, which have one parameter of each kind per layer."""

    def __init__(
        self, in_features: int, num_layers: int, device: torch.device | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        self._in_features = check_size(f"{kind}: in_features", in_features)
        self._num_layers = check_size(f"{kind}: num_layers", num_layers, least=0)
        self._placed: dict[str, Any] = {"device": device, "dtype": dtype}

    def _matrices(self, *shape: int) -> nn.ParameterList:
        """Return a stack of matrices (last two dimensions) per layer: deviation sqrt(2 / (rows + columns)).

        For a stack of experts, torch's own initialiser would count the number of experts in the fan and shrink every
        matrix.
        """
        made = [nn.Parameter(torch.empty(shape, **self._placed)) for _ in range(self._num_layers)]
        for parameter in made:
            nn.init.normal_(parameter, std=(2.0 / (shape[-2] + shape[-1])) ** 0.5)
        return nn.ParameterList(made)

    def _zeros(self, *shape: int) -> nn.ParameterList:
        return nn.ParameterList(nn.Parameter(torch.zeros(shape, **self._placed)) for _ in range(self._num_layers))

    def _check(self, input: torch.Tensor) -> None:
        check_last_dim(type(self).__name__, input, self._in_features, dims=2)


class CrossNet(_CrossLayers):
    """Full-rank cross network, `x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l` (DCN-V2, 2008.13535, eq. 1).

    Args:
        in_features: features of the input and of the output.
        num_layers: layers; 0 returns the input.
        device, dtype: of the weights.

    Shape: `[B, in_features]` in and out.

    State: `kernels.<layer>` [in_features, in_features], `bias.<layer>` [in_features, 1].

    With one feature, W = 2, b = 1 and x_0 = 3, a layer gives 3 · (2 · 3 + 1) + 3 = 24.
    """

    def __init__(
        self, in_features: int, num_layers: int, *, device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, num_layers, device, dtype)
        self.kernels = self._matrices(in_features, in_features)
        self.bias = self._zeros(in_features, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check(input)
        biases = [bias_I1.squeeze(1) for bias_I1 in self.bias]
        return _crosses(input, list(zip(self.kernels, biases, strict=True)))


class LowRankCrossNet(_CrossLayers):
    """Cross network with kernels of rank `low_rank`, `x_{l+1} = x_0 ⊙ (W_l V_l x_l + b_l) + x_l` (DCN-V2, eq. 2).

    Args:
        in_features: features of the input and of the output.
        num_layers: layers; 0 returns the input.
        low_rank: R. Cheaper than `CrossNet` while `2 R < in_features`.
        device, dtype: of the weights.

    Shape: `[B, in_features]` in and out.

    State: `W_kernels.<layer>` [in_features, R], `V_kernels.<layer>` [R, in_features], `bias.<layer>`
    [in_features].
    """

    def __init__(
        self, in_features: int, num_layers: int, low_rank: int = 1, *, device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, num_layers, device, dtype)
        self._low_rank = check_size("LowRankCrossNet: low_rank", low_rank)
        self.W_kernels = self._matrices(in_features, low_rank)
        self.V_kernels = self._matrices(low_rank, in_features)
        self.bias = self._zeros(in_features)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check(input)
        return _crosses(input, list(zip(self.V_kernels, self.W_kernels, self.bias, strict=True)))


class VectorCrossNet(_CrossLayers):
    """Cross network with one vector per layer, `x_{l+1} = x_0 (w_l · x_l) + b_l + x_l` (DCN, 1708.05123, eq. 3).

    Args:
        in_features: features of the input and of the output.
        num_layers: layers; 0 returns the input.
        device, dtype: of the weights.

    Shape: `[B, in_features]` in and out.

    State: `kernels.<layer>` [in_features, 1], `bias.<layer>` [in_features, 1].
    """

    def __init__(
        self, in_features: int, num_layers: int, *, device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, num_layers, device, dtype)
        self.kernels = self._matrices(in_features, 1)
        self.bias = self._zeros(in_features, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check(input)
        x_BI = input
        for kernel_I1, bias_I1 in zip(self.kernels, self.bias, strict=True):
            x_BI = torch.addcmul(x_BI + bias_I1.squeeze(1), input, x_BI @ kernel_I1)
        return x_BI


class LowRankMixtureCrossNet(_CrossLayers):
    """Mixture of low-rank crosses with a non-linearity inside (DCN-V2, eq. 3 and 4; equations at the head of the file).

    The gates sum to 1, so the experts' weighted sum is one product with the concatenated `U`. No [B, E, I] tensor is
    allocated.

    Args:
        in_features: features of the input and of the output.
        num_layers: layers; 0 returns the input.
        num_experts: E; one expert has no gate.
        low_rank: R.
        activation: g, applied in the low-rank space.
        device, dtype: of the weights.

    Shape: `[B, in_features]` in and out.

    State: `U_kernels.<layer>` [E, in_features, R], `V_kernels.<layer>` [E, R, in_features],
    `C_kernels.<layer>` [E, R, R], `bias.<layer>` [in_features, 1], and for E > 1 `gates.<expert>.weight` [1,
    in_features], shared by all layers.
    """

    def __init__(
        self, in_features: int, num_layers: int, num_experts: int = 1, low_rank: int = 1,
        activation: nn.Module | TensorFunction = torch.relu, *, device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, num_layers, device, dtype)
        self._num_experts = check_size("LowRankMixtureCrossNet: num_experts", num_experts)
        self._low_rank = check_size("LowRankMixtureCrossNet: low_rank", low_rank)
        self.U_kernels = self._matrices(num_experts, in_features, low_rank)
        self.V_kernels = self._matrices(num_experts, low_rank, in_features)
        self.bias = self._zeros(in_features, 1)
        if num_experts > 1:
            self.gates = nn.ModuleList(
                nn.Linear(in_features, 1, bias=False, device=device, dtype=dtype) for _ in range(num_experts)
            )
        self.C_kernels = self._matrices(num_experts, low_rank, low_rank)
        self._activation = activation

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check(input)
        experts, rank, width = self._num_experts, self._low_rank, self._in_features
        gates_EI = torch.cat([gate.weight for gate in self.gates]) if experts > 1 else None  # type: ignore[misc]
        x_BI = input
        for u_EIR, v_ERI, c_ERR, bias_I1 in zip(self.U_kernels, self.V_kernels, self.C_kernels, self.bias, strict=True):
            hidden_BER = self._activation(linear(x_BI, v_ERI.reshape(experts * rank, width)))
            hidden_BER = hidden_BER.view(-1, experts, rank)
            hidden_BER = self._activation(_by_expert(hidden_BER, c_ERR))
            if gates_EI is not None:
                hidden_BER = hidden_BER * linear(x_BI, gates_EI).softmax(dim=1).unsqueeze(2)
            u_IER = u_EIR.transpose(0, 1).reshape(width, experts * rank)
            cross_BI = linear(hidden_BER.reshape(-1, experts * rank), u_IER, bias_I1.squeeze(1))
            x_BI = _crossed(x_BI, input, cross_BI)
        return x_BI


def _by_expert(hidden_BER: torch.Tensor, c_ERR: torch.Tensor) -> torch.Tensor:
    """Return each expert's vectors times its matrix: `out[b, e, s] = sum_r hidden[b, e, r] * c[e, s, r]`."""
    if torch.compiler.is_exporting():  # einsum decides by sizes, and would refuse batches of one sample
        product_EBR = torch.bmm(hidden_BER.transpose(0, 1), c_ERR.transpose(1, 2))
        return product_EBR.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    return torch.einsum("ber,esr->bes", hidden_BER, c_ERR)
