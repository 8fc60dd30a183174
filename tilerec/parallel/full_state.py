"""A sharded model's state as whole tensors: for files that one process reads, and for ranks that are threads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilerec.modules.managed_collision import ManagedCollisionModule
from tilerec.sharding.buckets_view import full_state_of
from tilerec.sharding.table import ShardedTable


@torch.no_grad()
def full_state_dict(module: nn.Module) -> dict[str, Tensor]:
    """The unsharded model's state dict, with every table whole, on every rank. All ranks call it.

    Names are those of the unsharded model; tables are copies (the whole of them: mind the memory), everything else is
    the live tensor, as in `module.state_dict()`, whose hooks run first (those of averaged replicas make them equal).
    """
    if hasattr(module, "_dmp_wrapped_module"):  # names are the model's, not the wrapper's
        module = module.module  # type: ignore[assignment]
    for before in module._state_dict_pre_hooks.values():
        before(module, "", False)
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
