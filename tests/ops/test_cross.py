"""Cross ops: native passes equal the formula, with the same bits for any number of threads and any vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tilerec.errors import InputError
from tilerec.ops import backends as backends
from tilerec.ops.cross.cpu import kernels
from tilerec.ops.cross.definition import cross, cross_backward
from tilerec.ops.runtime.cpu.library import library
from tilerec.ops.runtime.library import LIBRARY

NATIVE = library()
with_native = pytest.mark.skipif(NATIVE is None, reason="the native CPU library is not built")
# Of one vector and a rest, more features than a tile, more samples than a block, and results that bypass the cache.
SHAPES = [(0, 3), (3, 0), (1, 1), (2, 37), (131, 16), (3, 4101), (65, 4096), (70, 16384)]
Native = dict[str, Callable[..., None]]


@pytest.fixture
def native() -> Native:
    assert NATIVE is not None
    return LIBRARY.taking_arguments(kernels(NATIVE))


@pytest.fixture
def isa() -> Iterator[Callable[[int], int]]:
    """A way to choose an instruction set for one test."""
    assert NATIVE is not None
    before = NATIVE.tr_isa()
    yield NATIVE.tr_isa_choose
    NATIVE.tr_isa_choose(before)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def made(samples: int, features: int, count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(samples + features)
    return [torch.randn(samples, features, generator=generator).to(dtype) for _ in range(count)]


def forward(kernel: Callable[..., None], given: list[Tensor], bias_I: Tensor | None) -> Tensor:
    out = torch.full_like(given[0], torch.nan, memory_format=torch.contiguous_format)
    kernel(*given, bias_I, out)
    return out


def backward(
    kernel: Callable[..., None], given: list[Tensor], bias_I: Tensor | None, sum_BI: Tensor | None, first: bool
) -> list[Tensor]:
    shape = given[0].shape
    results = [given[0].new_full(size, torch.nan) for size in (shape, shape, shape[1:])]
    if sum_BI is not None:
        results[0].copy_(sum_BI)
    kernel(*given, bias_I, sum_BI is not None, first, *results)
    return results


def test_the_worked_example_is_true() -> None:
    def one(value: float) -> Tensor:
        return torch.tensor([[value]], dtype=torch.float32)

    bias = torch.tensor([1.0])
    out, of_x0, of_factor, of_bias = one(0), one(0), one(0), torch.zeros(1)
    cross(one(2), one(3), one(4), bias, out)
    assert out.tolist() == [[17]]
    options: dict[str, Any] = {"of_x0_BI": of_x0, "of_factor_BI": of_factor, "of_bias_I": of_bias}
    cross_backward(one(10), one(3), one(4), bias, adds=False, first=False, **options)
    assert (of_x0.item(), of_factor.item(), of_bias.item()) == (50, 30, 30)
    cross_backward(one(10), one(3), one(4), bias, adds=True, first=True, **options)
    assert of_x0.item() == 50 + 50 + 10


@with_native
@pytest.mark.parametrize(("samples", "features"), SHAPES)
@pytest.mark.parametrize("with_bias", [True, False])
def test_native_passes_equal_the_formula_in_float64(
    native: Native, samples: int, features: int, with_bias: bool
) -> None:
    *given, sum_BI = made(samples, features, 4)
    bias = made(1, features, 1)[0][0] if with_bias else None
    exact, exact_bias = [t.double() for t in given], None if bias is None else bias.double()
    expected = forward(LIBRARY.references["cross_"], exact, exact_bias)
    torch.testing.assert_close(forward(native["cross_"], given, bias).double(), expected, rtol=1e-6, atol=1e-6)
    for sums in (None, sum_BI):
        for first in (False, True):
            exact_sums = None if sums is None else sums.double()
            wanted = backward(LIBRARY.references["cross_backward_"], exact, exact_bias, exact_sums, first)
            for own, right in zip(backward(native["cross_backward_"], given, bias, sums, first), wanted, strict=True):
                torch.testing.assert_close(own.double(), right, rtol=1e-5, atol=1e-5)


@with_native
@pytest.mark.parametrize(("samples", "features"), [(131, 37), (70, 16384)])
def test_bits_do_not_depend_on_threads_or_vectors(
    native: Native, isa: Callable[[int], int], threads: Callable[[int], None], samples: int, features: int
) -> None:
    *given, sum_BI = made(samples, features, 4)
    bias = made(1, features, 1)[0][0]

    def all_results() -> list[Tensor]:
        return [
            forward(native["cross_"], given, bias), *backward(native["cross_backward_"], given, bias, sum_BI, True)
        ]  # fmt: skip

    threads(1)
    expected = all_results()
    for count in (2, 3):
        threads(count)
        assert all(map(torch.equal, all_results(), expected))
    for level in (0, 1):
        isa(level)
        assert all(map(torch.equal, all_results(), expected))


@with_native
def test_results_without_a_vectors_alignment_are_written_alike(native: Native) -> None:
    given = made(70, 16384, 3)
    out = torch.zeros(70 * 16384 + 1)[1:].view(70, 16384)
    native["cross_"](*given, None, out)
    assert torch.equal(out, forward(native["cross_"], given, None))


@with_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_strided_tensors_and_other_types_equal_the_reference(native: Native, dtype: torch.dtype) -> None:
    wide = made(5, 80, 3, dtype)
    given = [wide[0][:, ::2], wide[1][:1, :40].expand(5, 40), wide[2].view(10, 40)[::2]]
    bias = made(1, 80, 1, dtype)[0][0, ::2]
    expected = forward(LIBRARY.references["cross_"], given, bias)
    torch.testing.assert_close(forward(native["cross_"], given, bias), expected)
    results = [torch.zeros(5, 80, dtype=dtype)[:, ::2], *made(5, 40, 1, dtype), torch.zeros(40, dtype=dtype)]
    native["cross_backward_"](*given, bias, False, True, *results)
    wanted = backward(LIBRARY.references["cross_backward_"], given, bias, None, True)
    for own, right in zip(results, wanted, strict=True):
        torch.testing.assert_close(own, right)


def test_shapes_and_types_that_do_not_fit_are_named() -> None:
    x, bias = torch.zeros(2, 3), torch.zeros(3)
    with pytest.raises(InputError, match=r"x0 of shape \[2, 4\]"):
        cross(x, torch.zeros(2, 4), x, bias, x.clone())
    with pytest.raises(InputError, match=r"factor of shape \[2, 3\] and torch\.float64"):
        cross(x, x, x.double(), bias, x.clone())
    with pytest.raises(InputError, match=r"bias of shape \[2\]"):
        cross(x, x, x, torch.zeros(2), x.clone())
    with pytest.raises(InputError, match=r"got x of shape \[3\]; expected \[samples, features\]"):
        cross(bias, bias, bias, bias, bias.clone())
    with pytest.raises(InputError, match=r"of_bias of shape \[2\]"):
        cross_backward(
            x, x, x, None, adds=False, first=False, of_x0_BI=x.clone(), of_factor_BI=x.clone(), of_bias_I=torch.zeros(2)
        )
