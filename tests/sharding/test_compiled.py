"""Compiled sharded models: one graph for all batches, and the bits of eager mode, updates included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.harness import TILINGS
from tests.sharding.compiled_models import Case, run
from tests.sharding.managed_models import POLICIES
from tilerec.testing.ranks import Ranks

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes: nightly")
FORMS = ["sum", "mean", "weighted", "weighted mean", "variable", "exact", "bf16", "sequence"]
MANAGED = [f"managed{weighted}: {policy}" for policy in POLICIES for weighted in ("", " weighted")]
DAILY = [
    Case("sum"),
    Case("weighted mean", "row_wise", attached=False),
    Case("variable", "column_wise"),
    Case("sequence", "two_tiles"),
    Case("managed weighted: rejected and admitted late"),
]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Ranks]]:
    made = {size: Ranks(size, timeout_s=600.0) for size in (2, 4)}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2]))  # processes unpickle cases of `tests.sharding`
        yield made
    for ranks in made.values():
        ranks.close()


@pytest.mark.parametrize("case", DAILY, ids=lambda case: f"{case.form}-{case.tiling}")
def test_one_graph_has_the_bits_of_eager_mode_for_every_batch_size(case: Case, pools: dict[int, Ranks]) -> None:
    """Five batch sizes, one sample and an empty rank among them; no graph break."""
    assert pools[2].run(run, case) == [1, 1]
