"""The sides of an exchange, against bytes counted rank by rank."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from tilerec.planner.cost.default_speeds import default_speeds
from tilerec.planner.cost.home_side import Sides, sides_of
from tilerec.planner.cost.model import Model
from tilerec.planner.cost.workload import TableWork, Workload
from tilerec.spec.topology import Topology

LINK, NETWORK = (2.0, 3.0), (5.0, 7.0)  # seconds per byte in, out


def model(hosts: list[list[int]], nic: Any, duplex: bool = False, network: tuple[float, float] = NETWORK) -> Model:
    topology = Topology(sum(map(len, hosts)), hosts=hosts, nic=nic)
    speeds = dataclasses.replace(
        default_speeds(topology), duplex=duplex, link_in=LINK[0], link_out=LINK[1], network_in=network[0],
        network_out=network[1],
    )  # fmt: skip
    return Model(Workload([TableWork("t", 10, 8)]), dataclasses.replace(topology, speeds=speeds))


def seconds(hosts: list[list[int]], held: list[float], nic: str, rates: tuple[float, float]) -> list[float]:
    """Of rows sent home over the network, by a loop: held [R] bytes per home on each rank; rates (in, out)."""
    host_of = {rank: host for host in hosts for rank in host}
    took = [0.0] * len(held)
    for owner, home in itertools.product(range(len(held)), repeat=2):
        if host_of[owner] is not host_of[home]:
            took[owner] += held[owner] * rates[1]
            took[home] += held[owner] * rates[0]
    if nic == "host":
        return [sum(took[rank] for rank in host_of[r]) / len(host_of[r]) for r in range(len(held))]
    return took


def by_sides(hosts: list[list[int]], held: list[float], nic: str, far: Sides) -> list[float]:
    sizes = sorted({len(host) for host in hosts})
    at = [sizes.index(len(next(host for host in hosts if rank in host))) for rank in range(len(held))]
    own = [held[rank] * far.own[at[rank]] for rank in range(len(held))]
    if nic == "host":
        by_host = {rank: sum(own[r] for r in host) / len(host) for host in hosts for rank in host}
        own = [by_host[rank] for rank in range(len(held))]
    return [own[rank] + sum(held) * far.home[at[rank]] for rank in range(len(held))]


@pytest.mark.parametrize("hosts", [[[0], [1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2, 3]], [[0], [1], [2]]], ids=str)
def test_hosts_that_share_a_card_wait_for_its_bytes_wherever_pieces_lie(hosts: list[list[int]]) -> None:
    """Below 0, an owner's side counts as 0: the slowest host is one with a side above 0."""
    _, far = sides_of(model(hosts, "host"), "rows", lower=False)
    lower = sides_of(model(hosts, "host"), "rows", lower=True)[1]
    ranks = sum(map(len, hosts))
    for held in itertools.product([0.0, 1.0, 4.0], repeat=ranks):
        wanted = seconds(hosts, list(held), "host", NETWORK)
        assert max(by_sides(hosts, list(held), "host", far)) == pytest.approx(max(wanted))
        assert max(by_sides(hosts, list(held), "host", lower)) == pytest.approx(max(wanted))


@pytest.mark.parametrize("hosts", [[[0], [1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2]]], ids=str)
def test_ranks_with_cards_of_their_own_wait_for_their_bytes_where_all_hold_as_much(
    hosts: list[list[int]],
) -> None:
    """On hosts of one rank each, wherever pieces lie."""
    _, far = sides_of(model(hosts, "device"), "rows", lower=False)
    _, least = sides_of(model(hosts, "device"), "rows", lower=True)
    ranks, alone = sum(map(len, hosts)), all(len(host) == 1 for host in hosts)
    for held in itertools.product([0.0, 1.0, 4.0], repeat=ranks):
        wanted = seconds(hosts, list(held), "device", NETWORK)
        if alone or len(set(held)) == 1:
            assert by_sides(hosts, list(held), "device", far) == pytest.approx(wanted)
        found = by_sides(hosts, list(held), "device", least)
        assert all(a <= b + 1e-9 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("nic", ["device", "host"])
def test_beside_what_lies_somewhere_already_no_rank_counts_more_than_it_takes(nic: str) -> None:
    """Where every owner saves more than it sends, and any rank may be the slowest."""
    hosts, rates = [[0], [1]], (9.0, 1.0)
    _, far = sides_of(model(hosts, nic, network=rates), "rows", lower=True, pinned=True)
    for held in itertools.product([0.0, 1.0, 4.0], repeat=2):
        found, wanted = by_sides(hosts, list(held), nic, far), seconds(hosts, list(held), nic, rates)
        assert all(a <= b + 1e-9 for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("nic", ["device", "host"])
def test_where_every_owner_saves_more_than_it_sends_pieces_are_taken_to_lie_evenly(nic: str) -> None:
    """What no spread is below, where hosts share cards."""
    hosts, rates = [[0], [1]], (9.0, 1.0)
    _, far = sides_of(model(hosts, nic, network=rates), "rows", lower=False)
    assert far.own.tolist() == [0.0]
    even = [1.0, 1.0]
    assert by_sides(hosts, even, nic, far) == pytest.approx(seconds(hosts, even, nic, rates))
    for held in itertools.product([0.0, 1.0, 4.0], repeat=2):
        assert max(by_sides(hosts, list(held), nic, far)) <= max(seconds(hosts, list(held), nic, rates)) + 1e-9


@pytest.mark.parametrize("exchange", ["ids", "rows", "gradients"])
def test_owners_send_rows_and_receive_ids_and_gradients(exchange: str) -> None:
    near, far = sides_of(model([[0, 1], [2, 3]], "device", duplex=True), exchange, lower=False)
    way = 1 if exchange == "rows" else 0
    assert near.own.tolist() == near.whole.tolist() == [LINK[way]]
    assert far.own.tolist() == far.whole.tolist() == [2 * NETWORK[way]]
    assert not np.any(near.home + far.home)


@pytest.mark.parametrize("hosts", [[[0], [1, 2, 3]], [[0, 1], [2, 3, 4]]], ids=str)
def test_of_two_hosts_that_share_duplex_cards_the_slower_direction_counts_wherever_pieces_lie(
    hosts: list[list[int]],
) -> None:
    """Of cards of their own, between what the owners take and what homes elsewhere do if all hold as much."""
    duplex = model(hosts, "host", duplex=True)
    host_of = {rank: host for host in hosts for rank in host}
    for held in itertools.product([0.0, 1.0, 4.0], repeat=len(host_of)):
        out, into = [0.0] * len(hosts), [0.0] * len(hosts)
        for owner, home in itertools.product(host_of, repeat=2):
            if host_of[owner] is not host_of[home]:
                out[hosts.index(host_of[owner])] += held[owner]
                into[hosts.index(host_of[home])] += held[owner]
        slower = [
            max(sent * NETWORK[1], got * NETWORK[0]) / len(host)
            for sent, got, host in zip(out, into, hosts, strict=True)
        ]
        _, far = sides_of(duplex, "rows", lower=False)
        assert max(by_sides(hosts, list(held), "host", far)) == pytest.approx(max(slower))
    _, own = sides_of(model(hosts, "device", duplex=True), "rows", lower=False)
    assert own.own == pytest.approx(np.sqrt(own.whole * far.own))
    assert np.array_equal(sides_of(duplex, "rows", lower=True)[1].own, own.whole)
