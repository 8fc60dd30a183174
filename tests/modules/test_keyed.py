"""Modules that change how features are keyed."""

from __future__ import annotations

import copy

import pytest
import torch

from tilerec.errors import ConfigError, InputError
from tilerec.modules.keyed import ComputeJTDictToKJT, ComputeKJTToJTDict, KTRegroupAsDict
from tilerec.sparse.jagged_tensor import jt_is_equal
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor, kjt_is_equal
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.spec.table import DataType


def _inputs(seed: int, dim: int = 2) -> list[KeyedTensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        KeyedTensor(["x", "y"], [dim, 3], torch.rand(4, dim + 3, generator=generator)),
        KeyedTensor(["z"], [1], torch.rand(4, 1, generator=generator)),
    ]


def test_dict_modules_are_inverse() -> None:
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(5), torch.rand(5), torch.tensor([2, 0, 1, 2]))
    by_key = ComputeKJTToJTDict()(kjt)
    assert list(by_key) == ["a", "b"]
    assert jt_is_equal(by_key["b"], kjt["b"])
    assert kjt_is_equal(ComputeJTDictToKJT()(by_key), kjt)


def test_regrouping_equals_the_function_for_each_kind_of_batch() -> None:
    groups, names = [["z", "x"], ["y"]], ["u", "v"]
    module = KTRegroupAsDict(groups, names)
    for inputs in (_inputs(0), _inputs(1), _inputs(2, dim=5), _inputs(3)):
        outputs = module(inputs)
        expected = KeyedTensor.regroup_as_dict(inputs, groups, names)
        assert list(outputs) == names
        assert all(torch.equal(outputs[name], expected[name]) for name in names)
    assert torch.equal(copy.deepcopy(module)(_inputs(0))["u"], module(_inputs(0))["u"])


def test_the_plan_is_made_once_per_kind() -> None:
    module = KTRegroupAsDict([["x"]], ["u"])
    module(_inputs(0))
    plan = module._plan
    module(_inputs(1))
    assert module._plan is plan
    module(_inputs(1, dim=7))
    assert module._plan is not plan


def test_outputs_are_converted_when_asked() -> None:
    assert KTRegroupAsDict([["x"]], ["u"], DataType.BF16)(_inputs(0))["u"].dtype == torch.bfloat16
    assert KTRegroupAsDict([["x"]], ["u"])(_inputs(0))["u"].dtype == torch.float32


def test_regrouping_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    module = KTRegroupAsDict([["z", "x"], ["y"]], ["u", "v"])
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    for seed in range(3):
        inputs = _inputs(seed)
        assert torch.equal(compiled(inputs)["u"], module(inputs)["u"])


def test_what_does_not_fit_is_refused_or_warned_of() -> None:
    with pytest.raises(ConfigError, match="expected one name per group"):
        KTRegroupAsDict([["x"]], ["u", "v"])
    with pytest.raises(ConfigError, match="each once"):
        KTRegroupAsDict([["x"], ["y"]], ["u", "u"])
    with pytest.warns(UserWarning, match="multi_device has no effect"):
        KTRegroupAsDict([["x"]], ["u"], multi_device=True)
    with pytest.raises(InputError, match="unknown key 'q'"):
        KTRegroupAsDict([["q"]], ["u"])(_inputs(0))
