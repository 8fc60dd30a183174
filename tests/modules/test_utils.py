from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilerec.errors import ConfigError
from tilerec.modules.utils import (
    check_module_output_dimension,
    construct_modulelist_from_single_module,
    convert_list_of_modules_to_modulelist,
    extract_module_or_tensor_callable,
    get_module_output_dimension,
    init_mlp_weights_xavier_uniform,
)


def test_a_module_and_a_tensor_function_stay_what_they_are() -> None:
    module = nn.PReLU()
    assert extract_module_or_tensor_callable(module) is module
    assert extract_module_or_tensor_callable(torch.relu) is torch.relu
    half = functools.partial(F.leaky_relu, negative_slope=0.5)
    assert extract_module_or_tensor_callable(half) is half


@pytest.mark.parametrize(
    "factory",
    [nn.LeakyReLU, lambda: nn.LeakyReLU(0.1), functools.partial(nn.LeakyReLU, 0.2)],
    ids=["class", "lambda", "partial"],
)
def test_a_class_or_factory_is_called(factory: object) -> None:
    made = [extract_module_or_tensor_callable(factory) for _ in range(2)]  # type: ignore[arg-type]
    assert all(isinstance(m, nn.LeakyReLU) for m in made)
    assert made[0] is not made[1]


def test_what_is_no_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected a module"):
        extract_module_or_tensor_callable(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"returned a int; expected a torch\.nn\.Module"):
        extract_module_or_tensor_callable(lambda: 3)  # type: ignore[arg-type, return-value]


def test_output_dimension_is_that_of_a_call() -> None:
    assert get_module_output_dimension(nn.Linear(4, 3), 4) == 3
    assert get_module_output_dimension(lambda x: torch.cat([x, x], 1), 5) == 10


def test_output_dimensions_agree_only_if_all_do() -> None:
    assert check_module_output_dimension(nn.Linear(4, 3), 4, 3)
    assert check_module_output_dimension(nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]), 4, 3)
    assert not check_module_output_dimension([nn.Linear(4, 3), nn.Linear(4, 2)], 4, 3)


def test_xavier_uniform_bounds_weights_and_zeroes_biases() -> None:
    mlp = nn.Sequential(nn.Linear(50, 30), nn.ReLU(), nn.Linear(30, 10, bias=False))
    mlp.apply(init_mlp_weights_xavier_uniform)
    bound = (6 / 80) ** 0.5
    assert 0.95 * bound < mlp[0].weight.abs().max() <= bound
    assert not mlp[0].bias.any()


def test_module_list_holds_independent_copies() -> None:
    lists = construct_modulelist_from_single_module(nn.Linear(2, 3), (2, 4))
    assert [len(inner) for inner in lists] == [4, 4]  # type: ignore[arg-type]
    assert not torch.equal(lists[0][0].weight, lists[0][1].weight)  # type: ignore[index]
    with pytest.raises(ConfigError, match=r"sizes: got \(\)"):
        construct_modulelist_from_single_module(nn.Linear(2, 3), ())


def test_nested_lists_become_module_lists_of_the_given_sizes() -> None:
    nested = [[nn.Linear(2, 3) for _ in range(3)] for _ in range(2)]
    lists = convert_list_of_modules_to_modulelist(nested, (2, 3))  # type: ignore[arg-type]
    assert lists[1][2] is nested[1][2]  # type: ignore[index]
    with pytest.raises(ConfigError, match="got 3 entries; expected 2"):
        convert_list_of_modules_to_modulelist(nested, (2, 2))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sizes: got \(\)"):
        convert_list_of_modules_to_modulelist([], ())
