"""Rules as jitted bundles: which numbers they get, and what of them depends on the update count."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.ops.triton.interpreter import quick
from tests.ops.triton.test_update import RULES
from tilerec.errors import ConfigError
from tilerec.ops.runtime.triton import library
from tilerec.ops.update.rules import make_rule
from tilerec.ops.update.triton.rules import power, prepare_rule

pytestmark = pytest.mark.skipif(not library.status().interpreted, reason="kernels run on the GPU here: see tests/cuda")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    with quick():
        yield


@pytest.mark.parametrize("name", RULES)
def test_a_bundle_has_the_slots_and_sums_of_its_rule(name: str) -> None:
    rule, hyper, kinds = RULES[name]
    made, reference = prepare_rule(rule, hyper), make_rule(rule, hyper)
    assert [kind for kind in made.kinds if kind] == [{"element": 1, "row": 2}[kind] for kind in kinds]
    assert [n for n in made.sums if n] == [reference.sums(phase) for phase in range(reference.phases)]
    assert len(made.numbers) == 8
    assert made.bundle.keeps == reference.keeps


def test_paces_are_computed_in_double_from_the_update_count() -> None:
    rule, hyper, _ = RULES["adam"]
    exact = (0.1 / (1 - 0.9**1000), (1 - 0.999**1000) ** 0.5)
    assert prepare_rule(rule, hyper).paces(1000) == pytest.approx(exact, rel=1e-14, abs=0)
    rule, hyper, _ = RULES["adagrad"]
    assert prepare_rule(rule, hyper).paces(101) == (0.1 / 2.0, 0.0)


def test_rules_that_there_are_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="'sdg' is unknown"):
        prepare_rule("sdg", [])
    with pytest.raises(ConfigError, match="got 2 numbers"):
        prepare_rule("sgd", [0.1, 1.0])


@triton.jit
def _power(counts, out, high, low):
    at = tl.arange(0, 8)[:, None]
    tl.store(out + at, power(high, low, tl.load(counts + at)))


@pytest.mark.parametrize("base", [0.0, 0.9, 0.999, 0.999999])
def test_rows_own_bias_corrections_are_those_of_double(base: float) -> None:
    counts = torch.tensor([0.0, 1, 2, 3, 10, 1000, 2**20, 2**24 - 1])
    out = torch.zeros(8, dtype=torch.float64)
    high = float(torch.tensor(base))
    _power[(1,)](counts, out, high, base - high)
    torch.testing.assert_close(
        1 - out, 1 - torch.tensor(base).double().pow(0) * base ** counts.double(), rtol=1e-7, atol=1e-12
    )
