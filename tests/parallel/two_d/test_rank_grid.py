"""`RankGrid`: which ranks form which group, and what a plan of one group is for the world."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilerec.errors import ConfigError
from tilerec.parallel.two_d.rank_grid import RankGrid, runs_of
from tilerec.spec.tile import Tiling
from tilerec.spec.topology import Topology


def test_replicas_are_neighbours_by_default_and_members_are_with_across_hosts() -> None:
    near, far = RankGrid(8, 4), RankGrid(8, 4, across_hosts=True)
    assert near.sharding_groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert near.replica_groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert far.sharding_groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert far.replica_groups == ((0, 4), (1, 5), (2, 6), (3, 7))


@given(st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_every_rank_has_one_place(replicas: int, members: int, across: bool) -> None:
    grid = RankGrid(replicas * members, members, across)
    assert grid.replicas == replicas
    for rank in range(grid.world_size):
        team, member = grid.team_of(rank), grid.member_of(rank)
        assert grid.rank(team, member) == rank
        assert grid.sharding_groups[team][member] == rank == grid.replica_groups[member][team]
    for groups in (grid.sharding_groups, grid.replica_groups):
        assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
        assert all(list(group) == sorted(group) for group in groups)


@pytest.mark.parametrize(("world", "size"), [(4, 3), (4, 8), (6, 4)])
def test_a_group_size_that_does_not_divide_the_world_is_refused_with_those_that_do(world: int, size: int) -> None:
    fitting = ", ".join(str(k) for k in range(1, world + 1) if world % k == 0)
    with pytest.raises(ConfigError, match=f"got {size}; expected a divisor of the world size {world}: {fitting}"):
        RankGrid(world, size)


@pytest.mark.parametrize("size", [0, -2, 1.0, True, None, "2"])
def test_a_group_size_that_is_no_number_from_1_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match=r"group_size: got .*; expected an integer from 1"):
        RankGrid(4, size)  # type: ignore[arg-type]


def test_every_tile_of_a_group_is_owned_in_all_groups() -> None:
    tiling = Tiling.of("t", 9, 4, [(0, 5, 0, 4, 0), (5, 9, 0, 2, 1), (5, 9, 2, 4, (0, 1))])
    got = RankGrid(4, 2).over_replicas("t", tiling)
    want = [(0, 5, 0, 4, (0, 1)), (5, 9, 0, 2, (2, 3)), (5, 9, 2, 4, (0, 1, 2, 3))]
    assert got == Tiling.of("t", 9, 4, want)


def test_hosts_of_a_group_are_those_of_its_ranks() -> None:
    topology = Topology(8, "cpu", hosts=[[0, 1, 2, 3], [4, 5, 6, 7]], ddr_caps=range(1, 9))
    near, far = RankGrid(8, 4), RankGrid(8, 4, across_hosts=True)
    assert near.hosts_of(1, topology) == ((0, 1), (2, 3))
    assert far.hosts_of(1, topology) == ((0, 1, 2, 3),)
    own = near.topology_of(1, topology)
    assert (own.world_size, own.host_ranks, own.ddr_caps) == (4, ((0, 1), (2, 3)), (2, 4, 6, 8))
    assert near.topology_of(1, topology, runs_of(4, 3)).host_ranks == ((0, 1, 2), (3,))
    with pytest.raises(ConfigError, match="topology: got 8 ranks; expected 4"):
        RankGrid(4, 2).check_topology(topology)


def test_the_text_says_which_groups_cross_hosts() -> None:
    topology = Topology(8, "cpu", hosts=[[0, 1, 2, 3], [4, 5, 6, 7]])
    assert RankGrid(8, 4).described(topology) == (
        "8 ranks = 2 replicas x 4 shards\n"
        "sharding groups  0,2,4,6 | 1,3,5,7  (across hosts)\n"
        "replica groups   0-1 | 2-3 | 4-5 | 6-7  (each on one host)"
    )
    assert (
        RankGrid(8, 4, across_hosts=True)
        .described(topology)
        .endswith(
            "sharding groups  0-3 | 4-7  (each on one host)\nreplica groups   0,4 | 1,5 | 2,6 | 3,7  (across hosts)"
        )
    )
    # Known, not assumed: neighbours by number that are not on one host.
    odd = Topology(4, "cpu", hosts=[[0, 2], [1, 3]])
    assert "0-1 | 2-3  (across hosts)" in RankGrid(4, 2).described(odd)


def test_the_text_of_thousands_of_ranks_is_short() -> None:
    text = RankGrid(4096, 256).described(Topology(4096, local_world_size=8))
    assert len(text) < 1000
    assert "0,16,32,48,…,4080 | " in text
    assert "256 in all" in text
