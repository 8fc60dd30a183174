"""Dense gradients of tiles that have no optimizer attached. They fill `.grad`, so any torch optimizer can step them.

    grad[tile] = (sum over all homes) / W      the same on every owner of the tile

Legend: W ranks of the group.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from tilerec.comms.group import Group
from tilerec.ops.gradient.record import GradientRecord
from tilerec.ops.update.calls import RuleTables, UpdateCall
from tilerec.sharding.replica_groups import ReplicaGroups, exchange_group, mean_over_replica_groups
from tilerec.sharding.replica_messages import ReplicaTable
from tilerec.sharding.replicas import exchange_replica_gradients


def dense_grads(
    group: Group, leaves: Sequence[Tensor], owners: Sequence[tuple[int, ...]], leaf_of: Sequence[int],
    wanted: Sequence[int], record: GradientRecord, *, exact: bool, teams: ReplicaGroups | None = None,
) -> dict[int, Tensor]:  # fmt: skip
    """Return dense gradients by leaf, in the leaves' shapes and dtypes. Collective among the owners of each tile.

    Args:
        owners: per leaf, the ranks that hold its tile.
        leaf_of: per feature of the record, the leaf that it read.
        wanted: leaves that need a gradient; all owners of a tile list it.
        exact: take one sum in unsharded order over the bags of all replicas; else add up the replicas' sums.
        teams: set if the ranks form several teams. The gradients then cover all teams, also those outside the group.
    """
    dense = {i: torch.zeros(leaves[i].shape, dtype=_accum_dtype_of(leaves[i]), device=leaves[i].device) for i in wanted}
    by_owners: dict[tuple[int, ...], list[int]] = {}
    for i in wanted:
        by_owners.setdefault(owners[i], []).append(i)
    alone: list[int] = []
    for ranks, held in sorted(by_owners.items()):
        if len(ranks) > 1 and exact:
            _store_over_replicas(*exchange_group(group, teams, ranks), {i: dense[i] for i in held}, leaf_of, record)
        else:
            alone.extend(held)
    features = [f for f, i in enumerate(leaf_of) if i in set(alone)]
    if features:
        position = {i: t for t, i in enumerate(alone)}
        _store([dense[i] for i in alone], [position[leaf_of[f]] for f in features], record.only(features))
    for ranks, held in sorted(by_owners.items()):
        if len(ranks) > 1 and not exact:
            _sum_over_replicas(*exchange_group(group, teams, ranks), [dense[i] for i in held])
    if teams is not None and teams.apart and dense:
        mean_over_replica_groups(teams, list(dense.values()))
    return {i: (grad / group.size).to(leaves[i].dtype) for i, grad in dense.items()}


def _store(dense: list[Tensor], tables: Sequence[int], record: GradientRecord) -> None:
    """Write a record's row sums into zeros.

    Args:
        tables: per feature, the position in `dense` of its gradient.
    """
    call = UpdateCall(RuleTables.of_sums(dense), record.gradients(list(tables)))
    torch.ops.tilerec.update_rows_.default(*call.packed())


def _store_over_replicas(
    group: Group, ranks: Sequence[int], dense: dict[int, Tensor], leaf_of: Sequence[int], record: GradientRecord
) -> None:  # fmt: skip
    """Write the row sums over the bags of all replicas into zeros; see `_store`."""
    own = record.only([f for f, i in enumerate(leaf_of) if i in dense])
    mine = [i for i in leaf_of if i in dense]
    tables = [
        ReplicaTable(t, grad.shape[0], grad.shape[1], [f for f, leaf in enumerate(mine) if leaf == i])
        for t, (i, grad) in enumerate(dense.items())
    ]
    agreed = exchange_replica_gradients(group, ranks, own, tables, exact=True)()
    _store(list(dense.values()), agreed.sinks, agreed)


def _sum_over_replicas(group: Group, ranks: Sequence[int], grads: Sequence[Tensor]) -> None:
    """Add up the replicas' sums in rank order, in place, with one message for all tiles."""
    flat = torch.cat([grad.view(-1) for grad in grads])
    if len(ranks) == group.size:
        group.all_reduce_("dense gradients", flat).wait()
    else:
        received = {rank: torch.empty_like(flat) for rank in ranks if rank != group.rank}
        group.exchange("dense gradients", received, dict.fromkeys(received, flat)).wait()
        received[group.rank] = flat
        flat = functools.reduce(torch.add, [received[rank] for rank in ranks])
    for grad, summed in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(summed.view(grad.shape))


def _accum_dtype_of(leaf: Tensor) -> torch.dtype:
    return torch.float64 if leaf.dtype == torch.float64 else torch.float32
