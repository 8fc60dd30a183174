"""Rows that begin anew by Triton's kernels: the reference's cases with these kernels.

What the compiler makes of them: `test_hash.py`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

import triton

# With these kernels behind the op (`_served_by_triton`).
from tests.ops.test_renew import (  # noqa: F401
    test_it_gives_the_worked_example,
    test_it_passes_opcheck,
    test_rows_get_the_values_of_their_place_and_others_stay,
    test_what_does_not_fit_is_refused,
    test_where_no_row_lies_nothing_is_written,
)
from tests.ops.triton.interpreter import quick
from tests.ops.triton.random_kernels import renew_rows_

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="kernels run on the GPU here: see tests/cuda"
)


@pytest.fixture(autouse=True)
def _served_by_triton() -> Iterator[None]:
    served = torch.library.Library("tilerec", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says once per process that a kernel is replaced
        served.impl("renew_rows_", renew_rows_, "CPU", allow_override=True)
    with quick():
        yield
    served._destroy()
