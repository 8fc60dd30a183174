"""Compiled sharded models: one graph for all batches, and the bits of eager mode, updates included."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity.harness import TILINGS
from tests.sharding.compiled_models import Case, run
from tests.sharding.compiled_steps import bad_id, changed_training, cut_again, in_flight, other_mode, unused_output
from tests.sharding.managed_models import POLICIES
from tilerec.errors import CommsError
from tilerec.testing.ranks import Ranks

NIGHTLY = pytest.mark.skipif(os.environ.get("TILEREC_NIGHTLY") != "1", reason="minutes: nightly")
FORMS = ["sum", "mean", "weighted", "weighted mean", "variable", "exact", "bf16", "sequence"]
MANAGED = [f"managed{weighted}: {policy}" for policy in POLICIES for weighted in ("", " weighted")]
DAILY = [
    Case("sum"),
    Case("weighted mean", "row_wise", attached=False),
    Case("variable", "column_wise", backend="eager"),
    Case("sequence", "two_tiles", backend="eager"),
    Case("managed weighted: rejected and admitted late"),
    Case("managed: times to live", "cut", backend="eager"),
]


def graphs_of(case: Case) -> int:
    """Return the number of graphs that a case needs; torch guards strides of inverse indices without samples."""
    return 2 if case.form == "variable" else 1


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
    assert pools[2].run(run, case) == [graphs_of(case)] * 2


@NIGHTLY
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("form", FORMS)
def test_every_tiling_and_form(form: str, backend: str, world: int, pools: dict[int, Ranks]) -> None:
    for tiling in TILINGS:
        for attached in (True, False):
            case = Case(form, tiling, attached, backend)
            assert pools[world].run(run, case) == [graphs_of(case)] * world, case


@NIGHTLY
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("form", MANAGED)
def test_every_policy_of_managed_collision(form: str, backend: str, world: int, pools: dict[int, Ranks]) -> None:
    for tiling in ("mixed", "cut"):
        assert pools[world].run(run, Case(form, tiling, backend=backend)) == [1] * world, tiling


def test_settings_of_training_may_change_after_the_model_was_compiled(pools: dict[int, Ranks]) -> None:
    pools[2].run(changed_training)


@pytest.mark.parametrize("attached", [True, False])
def test_tables_may_be_cut_again_after_the_model_was_compiled(attached: bool, pools: dict[int, Ranks]) -> None:
    assert pools[2].run(cut_again, attached) == [2, 2]


def test_a_bad_id_raises_on_all_ranks_and_the_next_batch_trains(pools: dict[int, Ranks]) -> None:
    for eager, compiled in pools[2].run(bad_id):
        assert compiled == eager
        assert compiled.startswith("InputError")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_rank_that_uses_no_row_has_no_backward_and_all_ranks_raise(compiled: bool) -> None:
    with pytest.MonkeyPatch.context() as patch, Ranks(2, timeout_s=120.0) as ranks:
        patch.syspath_prepend(str(Path(__file__).parents[2]))
        ranks.run(unused_output, compiled, 0.0)  # the remedy of docs/compile.md
        for error in ranks.run(unused_output, compiled, None, return_exceptions=True):
            assert isinstance(error, CommsError)
            assert "rank 0 waits in all_to_all 'gradients', which rank 1 has not called" in str(error)


def test_ranks_that_disagree_on_training_raise(pools: dict[int, Ranks]) -> None:
    for eager, compiled in pools[2].run(other_mode):
        assert compiled == eager
        assert "evaluates" in compiled


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=NIGHTLY)])
def test_rows_travel_while_the_dense_part_runs(inductor: bool, pools: dict[int, Ranks]) -> None:
    for flying in pools[2].run(in_flight, inductor):
        assert list(flying) == ["rows"]
        assert flying["rows"] > 0
