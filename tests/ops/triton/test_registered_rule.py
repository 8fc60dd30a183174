"""A rule that a user registered: the GPU's update op runs it as the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from tests.ops.triton.interpreter import quick
from tests.ops.triton.test_update import SGD, Call, pooled, update_rows_
from tilerec.ops.runtime.triton import library
from tilerec.ops.update.rules import SgdRule, register_rule

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels run on the GPU here: see tests/cuda")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


def test_a_rule_of_a_user_has_no_kernel_and_runs_as_the_reference() -> None:
    register_rule("registered_sgd", SgdRule)
    weights = [torch.randn(9, d) for d in (1, 8)]
    call = Call(weights, ("registered_sgd", *SGD[1:]), pooled([1, 8], [1, 2, 0, 3], 9, 2))
    call.check(rtol=0.0)
    assert not torch.equal(call.run(update_rows_)[1][0], weights[0])
