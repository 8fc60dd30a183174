from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

from tilerec.errors import ConfigError, InputError
from tilerec.modules.activation import SwishLayerNorm
from tilerec.modules.mlp import MLP, Perceptron


def by_hand(state: dict[str, torch.Tensor], x: torch.Tensor, activations: list[Any]) -> torch.Tensor:
    """Row by row and feature by feature, from the state dict alone."""
    for layer, activation in enumerate(activations):
        weight, bias = state[f"_mlp.{layer}._linear.weight"], state[f"_mlp.{layer}._linear.bias"]
        rows = [torch.stack([(row * w).sum() + b for w, b in zip(weight, bias, strict=True)]) for row in x]
        x = activation(torch.stack(rows) if rows else x.new_zeros(0, len(bias)))
    return x


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("sizes", [[1], [3, 1], [4, 257, 2]], ids=str)
@pytest.mark.parametrize("on_last", [True, False])
def test_an_mlp_is_its_layers_by_hand(batch: int, sizes: list[int], on_last: bool) -> None:
    mlp = MLP(3, sizes, activation=torch.tanh, dtype=torch.float64, activation_on_last=on_last)
    x = torch.randn(batch, 3, dtype=torch.float64)
    activations = [torch.tanh] * (len(sizes) - 1) + [torch.tanh if on_last else identity]
    torch.testing.assert_close(mlp(x), by_hand(mlp.state_dict(), x, activations))


def test_no_layers_return_the_input() -> None:
    x = torch.randn(2, 4)
    assert torch.equal(MLP(4, [])(x), x)


def test_names_shapes_and_types_of_the_state_are_fixed() -> None:
    state = MLP(4, [3, 2], activation="swish_layernorm", dtype=torch.bfloat16).state_dict()
    assert {name: tuple(t.shape) for name, t in state.items()} == {
        "_mlp.0._linear.weight": (3, 4),
        "_mlp.0._linear.bias": (3,),
        "_mlp.0._activation_fn.norm.0.weight": (3,),
        "_mlp.0._activation_fn.norm.0.bias": (3,),
        "_mlp.1._linear.weight": (2, 3),
        "_mlp.1._linear.bias": (2,),
        "_mlp.1._activation_fn.norm.0.weight": (2,),
        "_mlp.1._activation_fn.norm.0.bias": (2,),
    }
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    assert list(Perceptron(4, 3, bias=False).state_dict()) == ["_linear.weight"]


@pytest.mark.parametrize(("name", "function"), [("relu", torch.relu), ("sigmoid", torch.sigmoid)])
def test_an_activation_has_a_name(name: str, function: Any) -> None:
    x = torch.randn(4, 3)
    torch.manual_seed(1)
    named = MLP(3, [5, 2], activation=name)
    torch.manual_seed(1)
    given = MLP(3, [5, 2], activation=function)
    assert torch.equal(named(x), given(x))


def test_swish_layernorm_is_sized_per_layer() -> None:
    mlp = MLP(3, [5, 2], activation="swish_layernorm")
    norms = [m for m in mlp.modules() if isinstance(m, SwishLayerNorm)]
    assert [tuple(m.norm[0].weight.shape) for m in norms] == [(5,), (2,)]
    assert mlp(torch.randn(4, 3)).shape == (4, 2)


def test_a_class_makes_one_activation_per_layer_and_a_module_is_shared() -> None:
    assert len([n for n, _ in MLP(3, [4, 2], activation=nn.PReLU).named_parameters() if "_activation" in n]) == 2
    assert len([n for n, _ in MLP(3, [4, 2], activation=nn.PReLU()).named_parameters() if "_activation" in n]) == 1


def test_the_default_activation_is_relu() -> None:
    perceptron = Perceptron(3, 4)
    x = torch.randn(6, 3)
    assert torch.equal(perceptron(x), perceptron._linear(x).clamp(min=0))
    assert (MLP(3, [4])(x) >= 0).all()


def test_copies_pickles_and_meta_modules_work() -> None:
    mlp = MLP(3, [4, 2], activation_on_last=False)
    x = torch.randn(5, 3)
    assert torch.equal(copy.deepcopy(mlp)(x), mlp(x))
    assert torch.equal(pickle.loads(pickle.dumps(mlp))(x), mlp(x))
    meta = MLP(3, [4, 2], activation="swish_layernorm", device=torch.device("meta"))
    assert all(p.is_meta for p in meta.parameters())


def test_it_compiles_in_one_graph() -> None:
    mlp = MLP(3, [4, 2], activation="swish_layernorm")
    x = torch.randn(5, 3)
    torch.testing.assert_close(torch.compile(mlp, fullgraph=True, backend="aot_eager")(x), mlp(x))


def test_sizes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match=r"MLP: in_size: got 0; expected an integer of at least 1"):
        MLP(0, [3])
    with pytest.raises(ConfigError, match="each of layer_sizes: got -3"):
        MLP(4, [-3])
    with pytest.raises(ConfigError, match=r"Perceptron: out_size: got 2\.5"):
        Perceptron(4, 2.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=re.escape("MLP: got input of shape [2, 5]; expected […, 4]")):
        MLP(4, [3])(torch.zeros(2, 5))
    with pytest.raises(InputError, match=re.escape("Perceptron: got input of shape []")):
        Perceptron(4, 3)(torch.zeros(()))


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(ConfigError, match="got activation='swisch'; expected one of"):
        MLP(4, [3], activation="swisch")


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_hook_of_a_linear_layer_reads_its_output_without_the_relu(everywhere: bool) -> None:
    perceptron, x, seen = Perceptron(3, 4), torch.randn(6, 3), []
    expected = torch.nn.functional.linear(x, perceptron._linear.weight, perceptron._linear.bias)

    def keep(module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        if module is perceptron._linear:
            seen.append(output)

    register = (
        nn.modules.module.register_module_forward_hook if everywhere else perceptron._linear.register_forward_hook
    )
    handle = register(keep)
    output = perceptron(x)
    handle.remove()
    assert torch.equal(seen[0], expected)
    assert (expected < 0).any()
    assert torch.equal(output, expected.clamp(min=0))
    assert torch.equal(perceptron(x), output)


def test_a_layer_put_in_place_of_the_linear_layer_is_called() -> None:
    perceptron = Perceptron(3, 4)
    perceptron._linear = nn.Sequential(nn.Linear(3, 4), nn.Tanh())  # type: ignore[assignment]
    x = torch.randn(6, 3)
    assert torch.equal(perceptron(x), torch.relu(perceptron._linear(x)))
