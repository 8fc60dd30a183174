"""Numbers of packages as numpy arrays: torch's numbers, codes and rounding."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from tilerec.export.arguments import torch_dtype
from tilerec.export.array_package import _CODES
from tilerec.export.arrays import ARRAY_DTYPES, array_of, floats_of, is_float
from tilerec.export.torch_library import torch_home

FLOATS = [name for name in ARRAY_DTYPES if is_float(name)]


def test_every_dtype_has_torch_s_size_and_code() -> None:
    library = ctypes.CDLL(str(torch_home() / "lib" / "libtorch_cpu.so"))
    for name, dtype in ARRAY_DTYPES.items():
        assert dtype.itemsize == torch_dtype(name).itemsize
        assert _CODES[name] == getattr(library, f"aoti_torch_dtype_{name}")()


@pytest.mark.parametrize("name", FLOATS)
def test_every_code_is_torch_s_number(name: str) -> None:
    kind = ARRAY_DTYPES[name]
    codes = np.arange(1 << min(8 * kind.itemsize, 16)).astype(f"u{kind.itemsize}").view(kind)
    want = torch.from_numpy(codes).view(torch_dtype(name)).double().numpy()
    np.testing.assert_array_equal(floats_of(codes, name), want)


@pytest.mark.parametrize("name", FLOATS)
def test_numbers_are_rounded_as_torch_rounds_them(name: str) -> None:
    draw = np.random.default_rng(0)
    numbers = draw.standard_normal(20_000) * 10.0 ** draw.integers(-12, 12, 20_000)
    few = np.arange(1 << 15, dtype=np.uint16)
    halves = torch.from_numpy(few).view(torch.bfloat16).double().numpy()  # with many ties of the 8-bit floats
    numbers = np.concatenate([numbers, halves[np.isfinite(halves)], [0.0, -0.0, 464.0, 480.0, 61440.0, 1e300]])
    if name == "float8_e4m3fn":  # torch's versions differ beyond its range
        beyond = np.abs(numbers) > 464
        assert np.isnan(floats_of(array_of(numbers[beyond], name), name)).all()
        numbers = numbers[~beyond]
    want = torch.tensor(numbers, dtype=torch_dtype(name))
    same = torch.from_numpy(array_of(numbers, name)).view(torch_dtype(name)).double().numpy()
    np.testing.assert_array_equal(same, want.double().numpy())
    np.testing.assert_array_equal(np.signbit(same), np.signbit(want.double().numpy()))
