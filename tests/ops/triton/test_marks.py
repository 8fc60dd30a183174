"""Marks of rows by Triton's kernel: the reference's cases with this kernel."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

import triton

# With this kernel behind the op (`_served_by_triton`).
from tests.ops.test_marks import (  # noqa: F401
    test_it_gives_the_worked_example,
    test_marks_stay_and_rows_need_not_be_contiguous,
    test_tables_of_any_size_have_the_reference_s_bits,
)
from tests.ops.triton.interpreter import quick
from tilerec.ops.marks.triton import KERNELS
from tilerec.ops.runtime.library import LIBRARY

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels run on the GPU here: see tests/cuda"
)


@pytest.fixture(autouse=True)
def _served_by_triton() -> Iterator[None]:
    served = torch.library.Library("tilerec", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once per process that a kernel is replaced
        served.impl("mark_rows_", LIBRARY.taking_arguments(KERNELS)["mark_rows_"], "CPU", allow_override=True)
    with quick():
        yield
    served._destroy()
