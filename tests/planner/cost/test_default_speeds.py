"""Speeds made from bandwidths, by hand for round bandwidths."""

from __future__ import annotations

import pytest

from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.spec.speeds import WIDTHS
from tilerec.spec.topology import Topology

# Bytes per millisecond: 8 and 80 GB/s of memory, 0.5 and 0.25 GB/s of links.
GPU = Topology(4, hbm_mem_bw=8e7, ddr_mem_bw=8e6, intra_host_bw=5e5, inter_host_bw=2.5e5)
CPU = Topology(4, "cpu", hbm_mem_bw=8e7, ddr_mem_bw=8e6, intra_host_bw=5e5, inter_host_bw=2.5e5)
BYTES = [4 * width for width in WIDTHS]
RANDOM = [64 / 0.25, 128 / 0.4, 256 / 0.6, 512 / 0.75, 1024 / 0.85]
"""Bytes that take as long in large copies as a random row takes: round efficiencies of random rows."""


def near(seconds: object, wanted: object) -> bool:
    return bool(seconds == pytest.approx(wanted, rel=1e-9))


def check_rates(topology: Topology, memory: float, cached: float, per_id: float) -> None:
    found = default_speeds(topology)
    assert found.widths == WIDTHS
    assert near(found.lookup_far, [b / memory for b in RANDOM])
    assert near(found.lookup_near, [b / cached for b in RANDOM])
    assert near(found.lookup_bag, [b / memory for b in BYTES])
    assert near(found.update_far, [2 * b / memory for b in RANDOM])  # read and written
    assert near(found.update_near, [2 * b / cached for b in RANDOM])
    assert near(found.update_id, [per_id + b / cached for b in RANDOM])
    assert near(found.update_bag, [b / memory for b in BYTES])
    assert near(found.place, [2 * b / memory for b in BYTES])
    assert near(found.pick, [2 * b / memory for b in BYTES])
    assert near([found.route, found.copy], [per_id, 1 / memory])


def test_rows_of_a_gpu_take_the_bandwidth_of_its_memory_and_three_times_that_of_its_cache() -> None:
    check_rates(GPU, 8e10, 24e10, 2e-10)


def test_rows_of_a_cpu_rank_take_an_eighth_of_its_memorys_bandwidth_and_four_times_that_in_a_cache() -> None:
    check_rates(CPU, 1e9, 4e9, 2e-8)


def test_links_take_their_own_bandwidth_and_on_cpus_no_less_than_a_copy() -> None:
    fast = {"intra_host_bw": 4e6, "inter_host_bw": 2e6}  # faster than a core copies
    for topology, link, network in (
        (GPU, 2e-9, 4e-9),
        (CPU, 2e-9, 4e-9),
        (Topology(4, hbm_mem_bw=1e6, **fast), 0.25e-9, 0.5e-9),  # type: ignore[arg-type]
        (Topology(4, "cpu", ddr_mem_bw=8e6, **fast), 1e-9, 1e-9),  # type: ignore[arg-type]
    ):
        found = default_speeds(topology)
        assert near([found.link_in, found.link_out], [link, link])
        assert near([found.network_in, found.network_out], [network, network])


def test_constants_of_a_gpus_step_are_launches_and_round_figures() -> None:
    """A collective takes 30 µs, each further rank 0.5 µs (docs/planner-cost.md); two launches of 5 µs for a table."""
    found = default_speeds(GPU)
    assert near([found.call, found.call_peer, found.step, found.part], [30e-6, 0.5e-6, 0, 1e-8])
    assert near([found.replica, found.row_sum], [10e-6, 10e-6])
    assert (found.cache, found.duplex, found.fresh) == (32 << 20, True, None)
    assert found.origin == "default for cuda, from bandwidths; not measured"


def test_constants_of_a_cpus_step_are_those_of_processes() -> None:
    """Both ends of a link are processors that copy: both directions count."""
    found = default_speeds(CPU)
    assert near([found.call, found.call_peer, found.step, found.part], [5e-4, 2e-5, 1e-3, 1e-5])
    assert near([found.replica, found.row_sum], [1e-4, 3e-4])
    assert (found.cache, found.duplex, found.fresh) == (1 << 20, False, None)
