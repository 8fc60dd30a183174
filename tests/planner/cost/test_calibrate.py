"""Measuring a machine: every rank gets the same speeds, and a planner can use them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tilerec.comms.group import Group
from tilerec.planner.cost import calibrate as module
from tilerec.planner.cost import whole_steps
from tilerec.planner.cost.calibrate import calibrate, calibrate_to, machine
from tilerec.spec.speeds import PER_WIDTH, SINGLE
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

SMALL = {
    "_FAR_BYTES": 2**20,
    "_NEAR_BYTES": 2**16,
    "_FLUSH": 2**12,
    "_IDS": 480,
    "_REPEATS": 2,
    "_ROUNDS": 1,
    "_STEPS": 1,
    "_PASSES": 1,
    "WIDTHS": (16, 64),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables and few repeats: tests read no times."""
    for name, value in SMALL.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(whole_steps, "SHAPES", whole_steps.SHAPES[:2])


def test_ranks_measure_together_and_write_what_they_found(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"

    first, second = run_virtual_ranks(2, calibrate_to, str(path))
    assert first == second == Topology.from_json(json.loads(path.read_text()))
    assert first.world_size == 2
    measured = first.speeds
    assert measured.origin.startswith("measured, 2 cpu ranks")
    assert all(rate >= 0 for name in PER_WIDTH for rate in getattr(measured, name))
    assert measured.fresh is not None
    assert measured.fresh > 0
    assert all(getattr(measured, name) >= 0 for name in SINGLE)
    assert all(rate > 0 for rate in (*measured.lookup_near, *measured.place))
    assert measured.link_in == measured.link_out > 0


def test_a_rank_alone_has_no_links_to_measure() -> None:
    def run(group: Group) -> None:
        measured = calibrate(group, machine(1)).speeds
        assert measured is not None
        assert measured.row_sum == measured.replica == 0

    run_virtual_ranks(1, run)


@pytest.mark.parametrize(
    ("measure", "per_call", "rates"),
    [
        # An id costs 0.1 near and 0.4 far, its bag 0.5: bags of one id, and of ten.
        ("_lookup", (0.9, 0.6, 0.15, 0.45), {"lookup_bag": 0.5, "lookup_near": 0.1, "lookup_far": 0.4}),
        # An id costs 0.2, its bag 0.3, a row 0.6 near and 0.8 far.
        (
            "_update",
            (0.5, 0.23, 0.5 + 0.6, 0.5 + 0.8),
            {"update_id": 0.2, "update_bag": 0.3, "update_near": 0.6, "update_far": 0.8},
        ),
    ],
)
def test_rates_are_those_of_which_the_measured_calls_are_made(
    measure: str, per_call: tuple[float, ...], rates: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of nothing takes 2 s, each other one 2 s and so many for each of its 480 ids."""
    seconds = iter([2.0, *(2.0 + 480 * each for each in per_call)])
    monkeypatch.setattr(module._Bench, "_seconds", lambda *_, **__: next(seconds))

    def run(group: Group) -> dict[str, float]:
        found: dict[str, float] = getattr(module._Bench(group, torch.device("cpu"), machine(1)), measure)(16)
        return found

    assert run_virtual_ranks(1, run) == [pytest.approx(rates)]


def test_rows_are_placed_at_the_mean_of_writing_and_adding(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 2048 * 105
    seconds = iter([0.2 * rows, 0.4 * rows, 0.7 * rows])
    monkeypatch.setattr(module._Bench, "_seconds", lambda *_, **__: next(seconds))
    found = run_virtual_ranks(
        1, lambda group: module._Bench(group, torch.device("cpu"), machine(1))._place(16)
    )
    assert found == [pytest.approx({"place": 0.3, "pick": 0.7})]


def test_a_machines_memory_is_shared_out() -> None:
    assert machine(4).memory_cap == machine(1).memory_cap // 4 > 0
