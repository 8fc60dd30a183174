"""Four ranks on two hosts, a table under each sharding type, and training beside the unsharded module."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.modules.collection import TableCollection
from tilerec.parallel.full_state import full_state_dict
from tilerec.parallel.shard import shard
from tilerec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from tilerec.sparse.keyed_tensor import KeyedTensor
from tilerec.spec.plan import ParameterSharding, ShardingType
from tilerec.spec.topology import Topology
from tilerec.testing.batches import concat_batches
from tilerec.testing.virtual import run_virtual_ranks

HOSTS = ((0, 1), (2, 3))
SIZE = 4
KINDS = [kind.value for kind in ShardingType if kind is not ShardingType.EXPLICIT]


def placed(kind: str, table: int, dim: int) -> ParameterSharding:
    """The `table`-th table of a module under a sharding type; tables take turns where a type names one place."""
    host, everyone = list(HOSTS[table % 2]), [(table + r) % SIZE for r in range(SIZE)]
    # Columns are cut into as many blocks as divide them, however narrow.
    ranks: dict[str, list[int]] = {
        "table_wise": [(2 * table + 1) % SIZE],
        "column_wise": everyone[: math.gcd(dim, SIZE)],
        "table_row_wise": host,
        "table_column_wise": host[: math.gcd(dim, 2)],
        "grid_shard": [*HOSTS[0], *HOSTS[1]] if dim % 2 == 0 else host,
    }
    return ParameterSharding(kind, ranks=ranks.get(kind))


def sharded(base: TableCollection, kind: str, group: Group, hosts: Sequence[Sequence[int]] | None = HOSTS) -> Any:
    """A copy of a collection, all its tables under one sharding type; `hosts=None` is one host."""
    plan = {name: placed(kind, t, table.config.embedding_dim) for t, (name, table) in enumerate(base._tables.items())}
    topology = Topology(group.size, "cpu", hosts=hosts)
    return shard(copy.deepcopy(base), plan=plan, mesh=group, topology=topology)


def flat(output: Any) -> Tensor:
    """One tensor of what a collection gives."""
    if isinstance(output, KeyedTensor):
        return output.values()
    parts = [jagged.values().reshape(-1) for jagged in output.values()]
    return torch.cat(parts)


def equals_unsharded(
    base: TableCollection, kind: str, batch: Callable[[int, int], KeyedJaggedTensor], steps: int = 2
) -> list[Any]:
    """Train a collection on four ranks and its twin on the global batches; compare outputs and tables.

    Args:
        batch: of (rank, step).

    Returns:
        The sharded modules, with the values that `full_state_dict` gave.
    """
    whole = copy.deepcopy(base)
    wanted = []
    for step in range(steps):
        local = [batch(rank, step) for rank in range(SIZE)]
        wanted.append([flat(whole(features)).detach() for features in local])
        y = flat(whole(concat_batches(local)))
        (y * y).sum().backward()

    def run(group: Group) -> Any:
        module = sharded(base, kind, group)
        for step in range(steps):
            y = flat(module(batch(group.rank, step)))
            torch.testing.assert_close(y.detach(), wanted[step][group.rank], rtol=1e-5, atol=1e-5)
            (y * y).sum().mul(SIZE).backward()
        got = full_state_dict(module)
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5, msg=f"{kind}: {name}")
        return module

    return run_virtual_ranks(SIZE, run)
