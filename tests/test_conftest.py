"""The test bench tests itself: poison that does not poison would hide every bug it exists for."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_unwritten_float_memory_is_nan(dtype: torch.dtype) -> None:
    like = torch.zeros(2, 3, dtype=dtype)
    for fresh in (
        torch.empty(2, 3, dtype=dtype),
        torch.empty_like(like),
        torch.empty_strided((2, 3), (3, 1), dtype=dtype),
        like.new_empty(2, 3),
    ):
        assert fresh.dtype is dtype
        assert torch.isnan(fresh).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_unwritten_integer_memory_is_out_of_every_range(dtype: torch.dtype) -> None:
    assert (torch.empty(5, dtype=dtype) > 2**30).all()


@pytest.mark.real_empty
def test_marked_tests_get_the_real_factory() -> None:
    assert torch.empty.__module__ != __name__
    assert isinstance(torch.empty, type(torch.zeros))


def test_leaf_that_requires_grad_can_be_made_and_is_poisoned() -> None:
    leaf = torch.empty(3, requires_grad=True)
    assert leaf.is_leaf
    assert leaf._version == 0
    assert torch.isnan(leaf).all()


def test_device_context_still_decides_where_factories_allocate() -> None:
    with torch.device("meta"):
        assert torch.empty(3).is_meta
        assert torch.nn.Linear(2, 3).weight.is_meta


def test_compiled_code_may_call_a_factory() -> None:
    def fill(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x).copy_(x) + x.new_empty(x.shape).zero_()

    compiled = torch.compile(fill, fullgraph=True, backend="aot_eager")
    x = torch.arange(4.0)
    assert torch.equal(compiled(x), x)


def test_each_test_starts_from_the_same_seed() -> None:
    assert torch.rand(1, generator=torch.Generator().manual_seed(0)).item() == torch.rand(1).item()
