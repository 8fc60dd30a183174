"""The same parity on gloo processes: every tiling once, then what threads cannot show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parity.harness import Record, check, run_process, run_virtual, tabled, with_type
from tilerec.spec.table import DataType
from tilerec.testing.ranks import Ranks

# Tiling, form, optimizer, world. Every tiling, every rule and every form; three ranks where replicas would tie.
MARKS = [
    ("data_parallel", "sum", "rowwise_adagrad_max_norm", "2+2"),
    ("data_parallel", "sequence", "none", "3"),
    ("table_wise", "weighted_mean", "partial_rowwise_lamb", "4"),
    ("column_wise", "weighted", "lamb", "2+2"),
    ("row_wise", "mean", "adagrad", "2+2"),
    ("table_row_wise", "weighted", "partial_rowwise_adam", "2+2"),
    ("table_column_wise", "sum", "rowwise_adagrad", "4"),
    ("grid", "weighted_mean", "adam", "2+2"),
    ("uneven", "sequence", "adamw", "3"),
    ("two_tiles", "sum", "lars_sgd", "4"),
    ("staggered", "weighted", "none", "3"),
    ("some_replicas", "mean", "sgd_momentum", "4"),
    ("two_copies", "weighted", "partial_rowwise_lamb", "2+2"),
    ("mixed", "sequence", "sgd", "2+2"),
]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Ranks]]:
    made = {size: Ranks(size, timeout_s=90.0) for size in (3, 4)}
    with pytest.MonkeyPatch.context() as patch:
        # Processes start with this path and unpickle cases of `tests.parity`; pytest alone does not put it there.
        patch.syspath_prepend(str(Path(__file__).parents[2]))
        yield made
    for ranks in made.values():
        ranks.close()


@pytest.mark.parametrize("marks", MARKS, ids="-".join)
def test_processes_equal_unsharded(marks: tuple[str, str, str, str], pools: dict[int, Ranks]) -> None:
    case = tabled(*marks)
    check(case, pools[case.world_size].run(run_process, case))


@pytest.mark.parametrize("marks", [MARKS[0], MARKS[5], MARKS[7]], ids="-".join)
def test_processes_equal_unsharded_in_float64(marks: tuple[str, str, str, str], pools: dict[int, Ranks]) -> None:
    case = with_type(tabled(*marks), DataType.FP64)
    check(case, pools[case.world_size].run(run_process, case))


@pytest.mark.parametrize("marks", [MARKS[3], MARKS[8], MARKS[12]], ids="-".join)
def test_processes_and_threads_have_the_same_bits(marks: tuple[str, str, str, str], pools: dict[int, Ranks]) -> None:
    """Attached optimizers use no all-reduce, whose order is the backend's: every sum has one order."""
    case = replace(tabled(*marks), variable=True)
    processes: list[Record] = pools[case.world_size].run(run_process, case)
    for one, other in zip(processes, run_virtual(case), strict=True):
        for step, step_other in zip(one.outputs, other.outputs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(step, step_other, strict=True))
        for name, tiles in one.held.items():
            for held, held_other in zip(tiles, other.held[name], strict=True):
                assert held.tile == held_other.tile
                assert torch.equal(held.weight, held_other.weight)
                assert all(torch.equal(held.state[key], held_other.state[key]) for key in held.state)


def test_processes_without_samples_join_every_step(pools: dict[int, Ranks]) -> None:
    case = replace(tabled("grid", "weighted", "rowwise_adagrad", "2+2"), batch_sizes=(0, 3, 0, 0))
    check(case, pools[4].run(run_process, case))


def test_exact_mode_has_the_same_bits_on_processes(pools: dict[int, Ranks]) -> None:
    marks = ("weighted_mean", "partial_rowwise_lamb", "2+2")
    one = replace(tabled("grid", *marks), exact=True)
    other = replace(tabled("row_wise", *marks), exact=True)
    got, want = pools[4].run(run_process, one), pools[4].run(run_process, other)
    for mine, theirs in zip(got, want, strict=True):
        for step, step_want in zip(mine.outputs, theirs.outputs, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(step, step_want, strict=True))
