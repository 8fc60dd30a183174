"""Every op passes torch's own checks with the kernels that serve GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.ops.op_cases import cases, check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("op", cases("cpu"))
def test_ops_pass_torchs_own_checks(op: str) -> None:
    check(op, "cuda")
