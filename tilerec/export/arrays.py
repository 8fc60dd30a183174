"""Tensors of packages as numpy arrays, for processes without torch.

bfloat16 and 8-bit floats, which numpy lacks, are arrays of their bits: uint16 and uint8.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from tilerec.errors import InputError
from tilerec.export.signature import TensorSpec

Array = npt.NDArray[Any]

ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "float64": "f8", "float32": "f4", "float16": "f2", "bfloat16": "u2", "float8_e4m3fn": "u1",
        "float8_e5m2": "u1", "int64": "i8", "int32": "i4", "int16": "i2", "int8": "i1", "uint8": "u1", "bool": "?",
        "complex64": "c8", "complex128": "c16",
    }.items()
}  # fmt: skip
"""Types of the tensors of packages, by name: those that can be mapped from a file."""


_FORMATS = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15)}
"""Bits of the fraction, and bias of the exponent."""


def is_float(name: str) -> bool:
    """Return True for the name of a float type: `bfloat16`."""
    return "float" in name


def floats_of(array: Array, name: str) -> Array:
    """Return the numbers of an array of a float type as float64."""
    if name == "bfloat16":
        with np.errstate(invalid="ignore"):  # signalling nans
            return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if name in _FORMATS:
        return _numbers(name)[array]
    return array.astype(np.float64)


def array_of(numbers: Array, name: str) -> Array:
    """Return numbers of any type as an array of a type, rounded to the nearest, ties to even, as torch rounds.

    Numbers beyond the range become infinite, or nan where the type has no infinity.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if name == "bfloat16":
            bits = numbers.astype(np.float32).view(np.uint32)
            return ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        if name in _FORMATS:
            return _rounded(numbers.astype(np.float32).astype(np.float64), name)
        if name == "float16":  # torch rounds twice, too
            numbers = numbers.astype(np.float32)
        return numbers.astype(ARRAY_DTYPES[name])


def _rounded(numbers: Array, name: str) -> Array:
    steps = _steps(name)
    between = (steps[1:] + steps[:-1]) / 2
    size = np.abs(numbers)
    code = np.searchsorted(between, size, side="left")  # at a tie the lower code
    tie = (code < between.size) & (size == between[np.minimum(code, between.size - 1)])
    code += tie & (code & 1 == 1)
    return (code | np.where(np.signbit(numbers), 0x80, 0)).astype(np.uint8)


@functools.cache
def _steps(name: str) -> npt.NDArray[np.float64]:
    """Return the numbers of the codes from 0 to the first that is none, which counts as the next number."""
    fraction, bias = _FORMATS[name]
    code = np.arange(0x80 if name == "float8_e4m3fn" else 0x7D)
    exponent, rest = code >> fraction, code & ((1 << fraction) - 1)
    whole = np.where(exponent > 0, rest + (1 << fraction), rest)
    return np.asarray(whole * 2.0 ** (np.maximum(exponent, 1) - bias - fraction))


@functools.cache
def _numbers(name: str) -> npt.NDArray[np.float64]:
    """Return the number of each of the 256 codes."""
    half = np.full(128, np.nan)
    steps = _steps(name)
    half[: steps.size - 1] = steps[:-1]
    if name == "float8_e5m2":
        half[0x7C] = np.inf
    return np.concatenate([half, -half])


def check_array(spec: TensorSpec, array: Array, sizes: dict[str, int]) -> None:
    """Raise an `InputError` for an array of another dtype or shape.

    Args:
        sizes: values of the named sizes found so far; is extended.
    """
    if array.dtype != ARRAY_DTYPES[spec.dtype]:
        raise InputError(
            f"Input '{spec.name}': got {array.dtype}; expected {spec.dtype}, as in the example of the export. "
            "Convert it."
        )
    spec.check_shape(array.shape, sizes)
