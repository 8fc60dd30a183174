"""Measuring a machine: every rank gets the same speeds, and a planner can use them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilerec.comms.group import Group
from tilerec.comms.process import ProcessGroupComms
from tilerec.planner import calibrate as module
from tilerec.planner.calibrate import calibrate, calibrate_to, machine
from tilerec.spec.speeds import PER_WIDTH, SINGLE
from tilerec.spec.topology import Topology
from tilerec.testing.ranks import Ranks
from tilerec.testing.virtual import run_virtual_ranks

SMALL = {
    "_FAR_BYTES": 2**20,
    "_NEAR_BYTES": 2**16,
    "_FLUSH": 2**12,
    "_IDS": 480,
    "_REPEATS": 2,
    "_ROUNDS": 1,
    "_PASSES": 1,
    "WIDTHS": (16, 64),
}


def quickly(folder: str) -> str:
    """In a rank's process: small tables and few repeats: tests read no times."""
    module._FAR_BYTES, module._NEAR_BYTES, module._FLUSH, module._IDS, module._REPEATS = (
        2**20,
        2**16,
        2**12,
        480,
        2,
    )
    calibrate_to(ProcessGroupComms(), f"{folder}/topology.json")
    ProcessGroupComms().barrier()
    return Path(folder, "topology.json").read_text()


def test_ranks_measure_together_and_write_what_they_found(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        first, second = ranks.run(quickly, str(tmp_path))
    assert first == second
    topology = Topology.from_json(json.loads(first))
    measured = topology.speeds
    assert topology.world_size == 2
    assert measured is not None
    assert measured.origin.startswith("measured, 2 cpu ranks")
    assert all(rate >= 0 for name in PER_WIDTH for rate in getattr(measured, name))
    assert all(getattr(measured, name) >= 0 for name in SINGLE)
    assert all(rate > 0 for rate in measured.lookup_near + measured.place)
    assert measured.link_in == measured.link_out > 0
    assert measured.step > 0


def test_a_rank_alone_has_no_links_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(module, name, value)

    def run(group: Group) -> None:
        measured = calibrate(group, machine(1)).speeds
        assert measured is not None
        assert measured.row_sum == measured.replica == 0

    run_virtual_ranks(1, run)


def test_a_machines_memory_is_shared_out() -> None:
    assert machine(4).memory_cap == machine(1).memory_cap // 4 > 0
