"""Ranks read within their own team, and replicas meet over a group of their own."""

from __future__ import annotations

import pytest
import torch

from tilerec.comms.group import Group
from tilerec.sharding.layout import ExchangeLayout, SlotRead, TableLayout, reader
from tilerec.sharding.replica_groups import ReplicaGroups, exchange_group, mean_over_replica_groups
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology
from tilerec.testing.virtual import run_virtual_ranks

HOSTS = Topology(8, "cpu", hosts=[[0, 1], [2, 3], [4, 5], [6, 7]])
TEAM_OF = (0, 0, 0, 0, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("owners", "home", "expected"),
    [
        ((2, 6), 0, 2),
        ((2, 6), 7, 6),
        ((2, 6), 6, 6),
        ((0, 2, 3, 4, 6, 7), 1, 0),  # of several in the team, one on the host
        ((2, 3, 6, 7), 1, 3),  # none on the host: by turns
        ((5,), 0, 5),  # of no copy in the team, the one there is
    ],
)
def test_a_rank_reads_from_the_owner_in_its_team(owners: tuple[int, ...], home: int, expected: int) -> None:
    assert reader(owners, home, HOSTS, TEAM_OF) == expected


def test_rows_of_one_host_are_added_up_in_every_team() -> None:
    """Rows of a team of two hosts, a quarter on each rank: what a home's other host holds meets on a proxy there."""
    cuts = [(0, 4), (4, 8), (8, 12), (12, 16)]
    tiling = Tiling.of("t", 16, 4, [(r0, r1, 0, 4, (k, k + 4)) for k, (r0, r1) in enumerate(cuts)])
    tables = [TableLayout("t", tiling)]
    one_team = ExchangeLayout(tables, [SlotRead(0, "f")], HOSTS, 0)
    assert not one_team.hierarchical, "copies are not merged"
    for home in range(8):
        layout = ExchangeLayout(tables, [SlotRead(0, "f")], HOSTS, home, TEAM_OF)
        (merge,) = layout.own_merges
        far = {0: 2, 1: 3, 2: 0, 3: 1}[home % 4] + home // 4 * 4
        assert (merge.proxy, merge.parts) == (far, (2, 3) if home % 4 < 2 else (0, 1))


def test_replicas_meet_over_their_own_group_and_others_over_that_of_all() -> None:
    def run(group: Group) -> list[object]:
        axis = group.partition("axis", ((0, 2), (1, 3)))
        teams = ReplicaGroups((0, 0, 1, 1), axis, (group.rank % 2, group.rank % 2 + 2))
        found: list[object] = [teams.apart]
        for owners in (teams.peers, (0, 1, 2, 3)):
            over, ranks = exchange_group(group, teams, owners)
            found += [over is axis, ranks]
        grads = [
            torch.full((2, 3), float(group.rank)),
            torch.full((4,), float(group.rank), dtype=torch.float64),
        ]
        mean_over_replica_groups(ReplicaGroups((0,), axis, ()), grads)
        return [*found, *(grad.unique().tolist() for grad in grads)]

    for rank, found in enumerate(run_virtual_ranks(4, run)):
        assert found == [False, True, (0, 1), False, (0, 1, 2, 3), *[[rank % 2 + 1.0]] * 2]
