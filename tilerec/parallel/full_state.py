"""Full state dicts of sharded models, for files that one process reads and for ranks that are threads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilerec.comms.group import Group
from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.sharding.buckets_view import BucketsView, full_state_of
from tilerec.sharding.table import ShardedTable
from tilerec.torch_private import state_dict_pre_hooks


@torch.no_grad()
def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """Return the unsharded model's state dict, with every table whole, on every rank. Collective.

    Keys are those of the unsharded model. Tables are full copies, so each rank needs memory for all of them. All other
    entries are the live tensors, as in `module.state_dict()`. The hooks of `state_dict` run first; for replicas that
    are averaged they make the replicas equal.
    """
    if hasattr(module, "_dmp_wrapped_module"):  # keys without the wrapper's prefix
        module = module.module  # type: ignore[assignment]
    for before in state_dict_pre_hooks(module).values():
        before(module, "", False)
    for group in _groups(module):
        group.begin("full_state_dict")
    out: dict[str, Any] = {}
    done: dict[int, Tensor] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        if isinstance(part, ShardedTable):
            rows = id(part.rows)
            if rows not in done:
                done[rows] = part.weight_of().full()
            out[f"{prefix}weight"] = done[rows]
        elif isinstance(part, ManagedCollisionModule):
            full_state_of(part, out, prefix)
        else:
            part._save_to_state_dict(out, prefix, keep_vars=False)
    return out


def _groups(module: nn.Module) -> list[Group]:
    """Return the groups of the tables below a module, in one order on all ranks."""
    found: dict[int, Group] = {}
    for part in module.modules():
        if isinstance(part, ShardedTable):
            found.setdefault(id(part.ranks), part.ranks)
        elif isinstance(part, ManagedCollisionModule) and isinstance(part._view, BucketsView):
            found.setdefault(id(part._view.group), part._view.group)
    return list(found.values())
