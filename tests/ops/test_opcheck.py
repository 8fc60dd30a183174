"""Every op passes torch's own checks. (Most are run where their families' tests are; all of them here, nightly.)"""

from __future__ import annotations

import os

import pytest
import torch

from tests.ops.op_cases import EXEMPT, cases, check
from tilerec.parallel import data_parallel as data_parallel  # defines an op
from tilerec.sharding import compiled as compiled  # defines ops

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="half a minute: nightly")
ELSEWHERE_UNCHECKED = ("sum_row_gradients_of_tables", "zch_assign_each_")


def test_every_op_has_a_case_or_a_reason() -> None:
    ops = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("tilerec::")}
    assert {name.partition("::")[2].partition(".")[0] for name in ops} == {*cases("cpu"), *EXEMPT}


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=[] if op in ELSEWHERE_UNCHECKED else NIGHTLY) for op in cases("cpu")]
)
def test_ops_pass_torchs_own_checks(op: str) -> None:
    check(op, "cpu")
