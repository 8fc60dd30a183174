"""`RankGrid`: the sharding groups and replica groups of 2D parallelism.

Nouns
  sharding group  ranks that together hold every table once; a plan is for one such group, its ranks numbered from 0
  replica group   the ranks of all sharding groups that hold the same tiles
  member          a rank's number in its sharding group
  team            the number of a sharding group

    W ranks = R teams x G members                                   a mesh of ("replicate", "shard")
    adjacent      rank = member * R + team      replicas are neighbours: their exchanges stay on fast links
    across hosts  rank = team * G + member      members are neighbours: exchanges of rows and ids stay on fast links

W = 8, G = 4:  adjacent has the sharding groups 0,2,4,6 | 1,3,5,7 and the replica groups 0,1 | 2,3 | 4,5 | 6,7;
across hosts has the sharding groups 0-3 | 4-7 and the replica groups 0,4 | 1,5 | 2,6 | 3,7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilerec.errors import ConfigError
from tilerec.spec.ranks import ranks_to_text
from tilerec.spec.tile import Tile, Tiling
from tilerec.spec.topology import Topology


@dataclass(frozen=True)
class RankGrid:
    """A world of `world_size` ranks, divided into sharding groups of `group_size` ranks.

    Args:
        across_hosts: True: members are neighbours and replicas are apart; False: replicas are neighbours.

    Raises:
        ConfigError: a size is not an integer from 1, or the group size does not divide the world size.
    """

    world_size: int
    group_size: int
    across_hosts: bool = False

    def __post_init__(self) -> None:
        for name, value in (("world_size", self.world_size), ("sharding_group_size", self.group_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"2D parallelism: {name}: got {value!r}; expected an integer from 1.")
        if self.world_size % self.group_size:
            fitting = [size for size in range(1, self.world_size + 1) if self.world_size % size == 0]
            raise ConfigError(
                f"2D parallelism: sharding_group_size: got {self.group_size}; expected a divisor of the world size "
                f"{self.world_size}: {', '.join(map(str, fitting))}."
            )

    @property
    def replicas(self) -> int:
        """R, the number of sharding groups; each holds a copy of all tables."""
        return self.world_size // self.group_size

    def rank(self, team: int, member: int) -> int:
        """Return the rank of a member of a team."""
        return team * self.group_size + member if self.across_hosts else member * self.replicas + team

    def team_of(self, rank: int) -> int:
        """Return the number of a rank's sharding group."""
        return rank // self.group_size if self.across_hosts else rank % self.replicas

    def member_of(self, rank: int) -> int:
        """Return a rank's number in its sharding group."""
        return rank % self.group_size if self.across_hosts else rank // self.replicas

    @property
    def sharding_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each sharding group, in the order of their members."""
        return tuple(
            tuple(self.rank(team, member) for member in range(self.group_size)) for team in range(self.replicas)
        )

    @property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica group, in the order of their teams."""
        return tuple(
            tuple(self.rank(team, member) for team in range(self.replicas)) for member in range(self.group_size)
        )

    def over_replicas(self, name: str, tiling: Tiling) -> Tiling:
        """Return a sharding group's tiling as a tiling of the world: every tile has an owner in each group.

        Hot rows are on every rank of the world.

        W = 4, G = 2, adjacent: rows [0, 5) on rank 0 and [5, 9) on rank 1 are rows [0, 5) on ranks 0, 1 and [5, 9) on
        ranks 2, 3.
        """
        groups = self.replica_groups
        tiles = [
            Tile(*tile.rectangle, tuple(sorted(rank for member in tile.owners for rank in groups[member])))
            for tile in tiling.tiles()
        ]
        hot = None if tiling.head is None else tiling.head.hot
        return Tiling.of(name, tiling.rows, tiling.dim, tiles).with_hot(name, hot, self.world_size)

    def hosts_of(self, team: int, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """Return the members of a sharding group, one tuple per host."""
        by_host: dict[int, list[int]] = {}
        for member in range(self.group_size):
            by_host.setdefault(topology.host_of(self.rank(team, member)), []).append(member)
        return tuple(tuple(members) for members in by_host.values())

    def crossing(self, groups: Sequence[Sequence[int]], topology: Topology) -> bool:
        """Return True if any of the groups has ranks on several hosts."""
        return any(len({topology.host_of(rank) for rank in group}) > 1 for group in groups)

    def topology_of(self, team: int, topology: Topology, hosts: Sequence[Sequence[int]] | None = None) -> Topology:
        """Return the topology of one sharding group, its ranks numbered from 0.

        Args:
            topology: the topology of the world.
            hosts: members by host; None: the hosts in `topology` (see `hosts_of`).
        """
        ranks = self.sharding_groups[team]
        own = hosts if hosts is not None else self.hosts_of(team, topology)
        data = topology.to_json()
        data.update(world_size=self.group_size, local_world_size=None, hosts=[list(host) for host in own])
        for name in ("hbm_caps", "ddr_caps"):
            caps = getattr(topology, name)
            if caps is not None:
                data[name], data[name.removesuffix("s")] = [caps[rank] for rank in ranks], None
        # These have no effect; the world's topology has warned of them already.
        data.update(ssd_cap=None, pod_size=None)
        return Topology.from_json(data)

    def check_topology(self, topology: Topology) -> None:
        """Check that a topology is for this world.

        Raises:
            ConfigError: the topology has another number of ranks.
        """
        if topology.world_size != self.world_size:
            raise ConfigError(
                f"2D parallelism: topology: got {topology.world_size} ranks; expected {self.world_size}. Pass the "
                "topology of all ranks, not of one sharding group."
            )

    def described(self, topology: Topology) -> str:
        """Return a text that lists the groups and whether they cross hosts."""
        lines = [f"{self.world_size} ranks = {self.replicas} replicas x {self.group_size} shards"]
        for title, groups in (
            ("sharding groups", self.sharding_groups),
            ("replica groups", self.replica_groups),
        ):
            where = "across hosts" if self.crossing(groups, topology) else "each on one host"
            lines.append(f"{title:15}  {_listed(groups)}  ({where})")
        return "\n".join(lines)


def runs_of(count: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Split 0 … count - 1 into runs of `size`; the last run may be shorter: `(5, 2)` -> 0,1 | 2,3 | 4."""
    return tuple(tuple(range(at, min(at + size, count))) for at in range(0, count, size))


def _listed(groups: Sequence[Sequence[int]], most: int = 8) -> str:
    def text(group: Sequence[int]) -> str:
        parts = ranks_to_text(group).split(",")
        return ",".join(parts) if len(parts) <= most else f"{','.join(parts[:4])},…,{parts[-1]}"

    shown = " | ".join(text(group) for group in groups[:most])
    return shown if len(groups) <= most else f"{shown} | … {len(groups)} in all"
