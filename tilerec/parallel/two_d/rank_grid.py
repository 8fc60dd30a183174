"""`RankGrid`: which ranks of a world form the sharding groups and the replica groups of 2D parallelism.

Nouns
  sharding group  ranks that together hold every table once; a plan is made for one of them, its ranks numbered from 0
  replica group   the ranks of all sharding groups that hold the same tiles
  member          a rank's number in its sharding group;  team: the number of that group

    W ranks = R teams x G members                                   a mesh of ("replicate", "shard")
    adjacent      rank = member * R + team      replicas are neighbours: what they exchange stays on fast links
    across hosts  rank = team * G + member      members are neighbours: rows and ids stay on fast links

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
    """A world of `world_size` ranks in sharding groups of `group_size`.

    Args:
        across_hosts: members are neighbours, replicas far from each other; else the other way round.

    Raises:
        ConfigError: the group size is no number from 1 that divides the world.
    """

    world_size: int
    group_size: int
    across_hosts: bool = False

    def __post_init__(self) -> None:
        for name, value in (("world_size", self.world_size), ("sharding_group_size", self.group_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"2D parallelism: {name} is {value!r}; it must be a whole number from 1.")
        if self.world_size % self.group_size:
            fitting = [size for size in range(1, self.world_size + 1) if self.world_size % size == 0]
            raise ConfigError(
                f"2D parallelism: sharding_group_size is {self.group_size}, and groups of {self.group_size} ranks do "
                f"not divide a world of {self.world_size}; use {', '.join(map(str, fitting))}."
            )

    @property
    def replicas(self) -> int:
        """R: how many sharding groups there are, each with a copy of everything."""
        return self.world_size // self.group_size

    def rank(self, team: int, member: int) -> int:
        """The rank at a place."""
        return team * self.group_size + member if self.across_hosts else member * self.replicas + team

    def team_of(self, rank: int) -> int:
        """The sharding group of a rank."""
        return rank // self.group_size if self.across_hosts else rank % self.replicas

    def member_of(self, rank: int) -> int:
        """A rank's number in its sharding group."""
        return rank % self.group_size if self.across_hosts else rank // self.replicas

    @property
    def sharding_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each sharding group, in the order of their members."""
        return tuple(
            tuple(self.rank(team, member) for member in range(self.group_size))
            for team in range(self.replicas)
        )

    @property
    def replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each replica group, in the order of their teams."""
        return tuple(
            tuple(self.rank(team, member) for team in range(self.replicas))
            for member in range(self.group_size)
        )

    def over_replicas(self, name: str, tiling: Tiling) -> Tiling:
        """A tiling of one sharding group as one of the world: every tile is owned in all of them.

        W = 4, G = 2, adjacent: rows [0, 5) on rank 0 and [5, 9) on rank 1 are rows [0, 5) on ranks 0, 1 and [5, 9) on
        ranks 2, 3.
        """
        groups = self.replica_groups
        tiles = [
            Tile(*tile.rectangle, tuple(sorted(rank for member in tile.owners for rank in groups[member])))
            for tile in tiling.tiles()
        ]
        return Tiling.of(name, tiling.rows, tiling.dim, tiles)

    def hosts_of(self, team: int, topology: Topology) -> tuple[tuple[int, ...], ...]:
        """The members of a sharding group by the hosts that they are on."""
        by_host: dict[int, list[int]] = {}
        for member in range(self.group_size):
            by_host.setdefault(topology.host_of(self.rank(team, member)), []).append(member)
        return tuple(tuple(members) for members in by_host.values())

    def crossing(self, groups: Sequence[Sequence[int]], topology: Topology) -> bool:
        """Whether any of these groups has ranks on several hosts."""
        return any(len({topology.host_of(rank) for rank in group}) > 1 for group in groups)

    def topology_of(
        self, team: int, topology: Topology, hosts: Sequence[Sequence[int]] | None = None
    ) -> Topology:
        """The machines of one sharding group, its ranks numbered from 0.

        Args:
            topology: of the world.
            hosts: members by host; None: as they are (`hosts_of`).
        """
        ranks = self.sharding_groups[team]
        own = hosts if hosts is not None else self.hosts_of(team, topology)
        data = topology.to_json()
        data.update(world_size=self.group_size, local_world_size=None, hosts=[list(host) for host in own])
        for name in ("hbm_caps", "ddr_caps"):
            caps = getattr(topology, name)
            if caps is not None:
                data[name], data[name.removesuffix("s")] = [caps[rank] for rank in ranks], None
        # Kept, without effect, and said so when the world's topology was made.
        data.update(ssd_cap=None, pod_size=None)
        return Topology.from_json(data)

    def check_topology(self, topology: Topology) -> None:
        """Refuse the topology of another world.

        Raises:
            ConfigError: it has another number of ranks.
        """
        if topology.world_size != self.world_size:
            raise ConfigError(
                f"2D parallelism: the topology has {topology.world_size} ranks and the world {self.world_size}; pass "
                "the topology of all ranks, not of one sharding group."
            )

    def described(self, topology: Topology) -> str:
        """Which ranks form which group, and which of these cross hosts, as text."""
        lines = [f"{self.world_size} ranks = {self.replicas} replicas x {self.group_size} shards"]
        for title, groups in (
            ("sharding groups", self.sharding_groups),
            ("replica groups", self.replica_groups),
        ):
            where = "across hosts" if self.crossing(groups, topology) else "each on one host"
            lines.append(f"{title:15}  {_listed(groups)}  ({where})")
        return "\n".join(lines)


def blocks_of(count: int, size: int) -> tuple[tuple[int, ...], ...]:
    """0 … count - 1 in runs of `size`, the last one shorter where it does not divide: `(5, 2)` -> 0,1 | 2,3 | 4."""
    return tuple(tuple(range(at, min(at + size, count))) for at in range(0, count, size))


def _listed(groups: Sequence[Sequence[int]], most: int = 8) -> str:
    def text(group: Sequence[int]) -> str:
        parts = ranks_to_text(group).split(",")
        return ",".join(parts) if len(parts) <= most else f"{','.join(parts[:4])},…,{parts[-1]}"

    shown = " | ".join(text(group) for group in groups[:most])
    return shown if len(groups) <= most else f"{shown} | … {len(groups)} in all"
