"""How large the cases are: as large as fills a GPU, or a few rows on the simulated one (`tests/simulated_gpu`)."""

from __future__ import annotations

import os

import pytest

SIMULATED = os.environ.get("TILEREC_SIMULATED_GPU") == "1"


def size(on_a_gpu: int, simulated: int) -> int:
    """A number of rows, ids or bags."""
    return simulated if SIMULATED else on_a_gpu


def some(on_a_gpu: list[int], simulated: list[int]) -> list[int]:
    """Several of them."""
    return simulated if SIMULATED else on_a_gpu


real = pytest.mark.skipif(SIMULATED, reason="needs a real GPU: its memory, or what was compiled for it")
